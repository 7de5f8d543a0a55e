"""Online selection of hyperparameters from a grid of candidates, by discounted prediction error."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


TIE_TOLERANCE = 1e-9  # errors closer than this, relative to the smallest, are ties


class GridSelector:
    """
    Selects from a grid of candidate hyperparameters the combination with the lowest discounted prediction error,

    E ← memory · E + error of this step.

    Ties go to the first candidate of each list: before anything was observed these are the defaults, and afterwards the
    choice between candidates with equal predictions does not depend on rounding.

    Args:
        memory (`float`):
            Weight of the errors of earlier steps, between 0 and 1.
        candidates (`Mapping[str, Sequence[float]]`):
            Values to choose from by hyperparameter, in the order of the axes of `errors`.
    """

    def __init__(self, memory: float, candidates: Mapping[str, Sequence[float]]):
        self.memory = memory
        self.candidates = {name: np.array(values) for name, values in candidates.items()}
        self.errors = np.zeros([len(values) for values in candidates.values()])

    @property
    def indices(self) -> tuple[int, ...]:
        """Position of the selected value in each list of candidates."""
        smallest = self.errors.min()
        first = int(np.argmax(self.errors <= smallest + TIE_TOLERANCE * abs(smallest)))
        return tuple(int(i) for i in np.unravel_index(first, self.errors.shape))

    @property
    def selected(self) -> dict[str, float]:
        """Selected value of each hyperparameter."""
        return {
            name: float(values[i]) for (name, values), i in zip(self.candidates.items(), self.indices, strict=True)
        }

    def observe(self, errors: np.ndarray) -> None:
        """Add the prediction errors of one step, one per combination of candidates."""
        self.errors = self.memory * self.errors + errors

    def reset(self) -> None:
        """Forget all errors, so that the selection starts from the defaults."""
        self.errors = np.zeros_like(self.errors)

    def state_dict(self) -> list[Any]:
        """Return the discounted errors as nested lists."""
        return self.errors.tolist()

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Continue from `state_dict()`. Errors of a grid of another shape are ignored: the selection starts again."""
        errors = np.array(state, dtype=np.float64)
        if errors.shape == self.errors.shape:
            self.errors = errors
