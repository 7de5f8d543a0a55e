"""The data set as a stream: a step takes what it uses and no more."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from datasets import Dataset, IterableDataset
from trl.trainer.utils import RepeatSampler

from ..utils.copying import copy_containers


class PromptStream:
    """
    The rows of a data set, epoch after epoch, in the order in which [`~trl.GRPOTrainer`] would ask them. Every process
    has the same stream, and reads only the rows that it needs (of a data set that cannot be indexed, all of them).

    A row is known by its *position*: its index in the data set, or, where there is no index, how many rows the run has read
    before it.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            Shuffled anew in every epoch with `shuffle`, by permutation or (`IterableDataset`) with its buffer.
        shuffle (`bool`), seed (`int`):
            As in [`~trl.GRPOConfig`].

    Raises:
        `ValueError`: when rows are taken from a data set that has none.
    """

    def __init__(self, dataset: Dataset | IterableDataset, *, shuffle: bool, seed: int):
        self.indexed = isinstance(dataset, Dataset)
        self._dataset = dataset
        self._epoch = -1  # the one under way
        self._read = 0  # positions of it that were taken from the data set
        self._front: deque[int] = deque()  # positions that were put back
        if self.indexed:
            self._sampler = RepeatSampler(dataset, mini_repeat_count=1, shuffle=shuffle, seed=seed)
            self._order: Iterator[int] = iter(())
        else:
            self._dataset = dataset.shuffle(seed=seed) if shuffle else dataset
            self._rows: Iterator[dict] = iter(())
            self._starts: list[int] = []  # by epoch, its first position
            self._cache: dict[int, dict] = {}  # rows that may be asked for

    @property
    def epoch(self) -> float:
        """How often the data set has been gone through; in whole numbers where its length is not known."""
        epochs = max(self._epoch, 0)
        return epochs + self._read / len(self._dataset) if self.indexed else float(epochs)

    @property
    def put_back_rows(self) -> int:
        return len(self._front)

    def take(self, number: int, exclude: Collection[int] = ()) -> list[int]:
        """
        The next positions, each once.

        Args:
            number (`int`):
                How many. There are fewer if the whole data set has not as many that are not excluded.
            exclude (`Collection[int]`, *optional*):
                Positions that are asked already. Where one of them is next, it stays for later.
        """
        taken: dict[int, None] = {}
        later, epochs = [], 0
        while len(taken) < number and epochs < 3:  # two epochs and the rest of one have every row
            if self._front:
                position = self._front.popleft()
            else:
                following = self._next()
                if following is None:
                    epochs += 1
                    continue
                position = following
            if position in taken or position in exclude:
                later.append(position)
            else:
                taken[position] = None
        self.put_back(later)
        return list(taken)

    def put_back(self, positions: Iterable[int]) -> None:
        """Let these be the next ones, in their order."""
        self._front.extendleft(reversed(list(positions)))

    def row(self, position: int) -> dict[str, Any]:
        """The data set row at a position that was taken."""
        # A row of a stream is kept until its prompt is finished, and reward functions may modify the one that they are given.
        return self._dataset[position] if self.indexed else copy_containers(self._cache[position])

    def forget(self, keep: Collection[int]) -> None:
        """Rows other than those put back and these are not asked for again."""
        if not self.indexed:
            kept = {*keep, *self._front}
            self._cache = {position: row for position, row in self._cache.items() if position in kept}

    def _next(self) -> int | None:
        """The next position of this epoch; `None` where another one begins."""
        position = next(self._order, None) if self.indexed else self._next_of_iterable()
        if position is None:
            if self._epoch >= 0 and not self._read:
                raise ValueError("The training data set has no rows. Give one with at least as many as a step asks.")
            self._start_epoch()
            return None
        self._read += 1
        return position

    def _next_of_iterable(self) -> int | None:
        row = next(self._rows, None)
        if row is None:
            return None
        position = self._starts[-1] + self._read
        self._cache[position] = row
        return position

    def _start_epoch(self) -> None:
        if not self.indexed:
            self._starts.append(self._starts[-1] + self._read if self._starts else 0)
            self._dataset.set_epoch(len(self._starts) - 1)
            self._rows = iter(self._dataset)
        else:
            self._order = iter(list(self._sampler))  # drawn now, so that each epoch has an order of its own
        self._epoch, self._read = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """What was taken and what was put back; plain numbers and lists."""
        state = {"epoch": self._epoch, "read": self._read, "front": list(self._front)}
        return state if self.indexed else state | {"starts": self._starts, "cached": sorted(self._cache)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` on the same data set, which is gone through again as far as it was read."""
        needed = set(state.get("cached", ()))
        while self._epoch < state["epoch"]:
            if self._epoch >= 0 and not self.indexed:
                self._skip(state["starts"][self._epoch + 1] - state["starts"][self._epoch], needed)
            self._start_epoch()
        self._skip(state["read"], needed)
        self._front = deque(state["front"])

    def _skip(self, number: int, needed: set[int]) -> None:
        for _ in range(number):
            if self._next() is None:
                raise ValueError(
                    "The training data set has fewer rows than the checkpoint has read. Resume with the same data set."
                )
        if not self.indexed:
            self._cache = {position: row for position, row in self._cache.items() if position in needed}
