"""The prompt stream: rows of the dataset in training order, taken and put back by each step."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from datasets import Dataset, IterableDataset
from trl.trainer.utils import RepeatSampler

from ..utils.copying import copy_containers


FEWER_ROWS = "The training dataset has fewer rows than the checkpoint has read. Resume with the same dataset."


class PromptStream:
    """
    The rows of a dataset, epoch after epoch, in the order in which [`~trl.GRPOTrainer`] samples them. Every rank has
    the same stream and reads only the rows that it needs (all rows of an `IterableDataset`, which has no index).

    A row is identified by its *position*: its index in the dataset or, for an `IterableDataset`, the number of rows
    that the run has read before it.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            With `shuffle`, shuffled again in every epoch: by permutation, or with the buffer of an `IterableDataset`.
        shuffle (`bool`), seed (`int`):
            As in [`~trl.GRPOConfig`].

    Raises:
        `ValueError`: if rows are taken from an empty dataset.
    """

    def __init__(self, dataset: Dataset | IterableDataset, *, shuffle: bool, seed: int):
        self.indexed = isinstance(dataset, Dataset)
        self._dataset = dataset
        self._epoch = -1  # the current one; -1 before the first row
        self._read = 0  # rows that were read in the current epoch
        self._taken = 0  # positions that were taken and not put back
        self._front: deque[int] = deque()  # positions that were put back
        if self.indexed:
            self._sampler = RepeatSampler(dataset, mini_repeat_count=1, shuffle=shuffle, seed=seed)
            self._order: Iterator[int] = iter(())
        else:
            self._dataset = dataset.shuffle(seed=seed) if shuffle else dataset
            self._rows: Iterator[dict] = iter(())
            self._starts: list[int] = []  # position of the first row of each epoch
            self._cache: dict[int, dict] = {}  # rows by position, until `forget`: they cannot be read again
            self._columns: dict[str, None] = {}  # of all rows read so far

    @property
    def epoch(self) -> float:
        """
        Number of rows that were taken and not put back, per row of the dataset; if that has no length, whole passes.
        """
        return self._taken / len(self._dataset) if self.indexed else float(max(self._epoch, 0))

    @property
    def put_back_rows(self) -> int:
        return len(self._front)

    def take(self, number: int, exclude: Collection[int] = ()) -> list[int]:
        """
        Take the next positions, each at most once.

        Args:
            number (`int`):
                Number of positions. Fewer are returned if the dataset has fewer that are not excluded.
            exclude (`Collection[int]`, *optional*):
                Positions that the step samples already. They are put back to the front of the stream.
        """
        taken: dict[int, None] = {}
        later: dict[int, None] = {}
        epochs = 0
        # A step may span epochs. After the rest of one epoch and two whole ones every row has been seen, so that a
        # dataset that is too small ends the loop instead of repeating forever. Positions of a stream differ between
        # epochs; after a whole one, the step would take prompts that it already has.
        while (
            len(taken) < number
            and epochs < (3 if self.indexed else 2)
            and not self._has_all_rows(len(taken) + len(exclude))
        ):
            if self._front:
                position = self._front.popleft()
            else:
                following = self._next()
                if following is None:
                    epochs += 1
                    continue
                position = following
            if position in taken or position in exclude:
                # Kept once: a prompt that is retried while other ones are read comes round again in every epoch.
                later[position] = None
            else:
                taken[position] = None
        self._front.extendleft(reversed(later))
        self._taken += len(taken)
        return list(taken)

    def _has_all_rows(self, positions: int) -> bool:
        """
        Whether a step has every row of the dataset. Then reading on would only collect rows that it already has, and
        since a step uses each of them once, the rows to be put back would grow with every step.
        """
        return self.indexed and positions >= len(self._dataset) > 0

    def put_back(self, positions: Iterable[int]) -> None:
        """Put positions back to the front of the stream, in this order."""
        returned = list(positions)
        self._front.extendleft(reversed(returned))
        self._taken -= len(returned)

    def row(self, position: int) -> dict[str, Any]:
        """Return the dataset row at a position that was taken."""
        if self.indexed:
            # As a data loader reads it: in pandas format, `[position]` would be a table.
            return self._dataset.__getitems__([position])[0]
        # A row of a stream is kept until its prompt is finished, and reward functions may modify the one that they are
        # given. Rows may have different columns, of which TRL takes those of the first row of a batch.
        return self._columns | copy_containers(self._cache[position])

    def row_key(self, position: int) -> str:
        """
        Return what identifies the row at a position on other processes and after resuming, where an `IterableDataset`
        that is shuffled without a seed has another one. Images are left out, because decoding them takes long.
        """
        if self.indexed:
            return ""
        from ..pass_rates.prompt_id import row_key

        row = self._cache[position]
        return row_key({name: value for name, value in row.items() if name not in ("image", "images")})

    def forget(self, keep: Collection[int]) -> None:
        """Drop the cached rows, except those at the positions `keep` and those that were put back."""
        if not self.indexed:
            kept = {*keep, *self._front}
            self._cache = {position: row for position, row in self._cache.items() if position in kept}

    def _next(self) -> int | None:
        """Read the next position of the epoch; at its end start the next epoch and return `None`."""
        position = next(self._order, None) if self.indexed else self._next_of_iterable()
        if position is None:
            if self._epoch >= 0 and not self._read:
                raise ValueError(
                    "The training dataset has no rows. Use one with at least as many rows as a step samples."
                )
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
        self._columns |= dict.fromkeys(row)
        return position

    def _start_epoch(self) -> None:
        if not self.indexed:
            self._starts.append(self._starts[-1] + self._read if self._starts else 0)
            self._dataset.set_epoch(len(self._starts) - 1)
            self._rows = iter(self._dataset)
        else:
            # Read at once: the sampler's generator is shared between epochs, so a lazy iterator would mix their
            # permutations.
            self._order = iter(list(self._sampler))
        self._epoch, self._read = self._epoch + 1, 0

    def check_positions(self, positions: Iterable[int]) -> None:
        """Raise a `ValueError` if rows at positions of a checkpoint do not exist."""
        if self.indexed and max(positions, default=-1) >= len(self._dataset):
            raise ValueError(FEWER_ROWS)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers and lists."""
        state = {"epoch": self._epoch, "read": self._read, "taken": self._taken, "front": list(self._front)}
        return state if self.indexed else state | {"starts": self._starts, "cached": sorted(self._cache)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Continue from `state_dict()` on the same dataset.

        Permutations and shuffle buffers are not stored, so the epochs are replayed up to the stored position.
        """
        needed = set(state.get("cached", ()))
        while self._epoch < state["epoch"]:
            if self._epoch >= 0 and not self.indexed:
                self._skip(state["starts"][self._epoch + 1] - state["starts"][self._epoch], needed)
            self._start_epoch()
        self._skip(state["read"], needed)
        self._front, self._taken = deque(state["front"]), state["taken"]

    def _skip(self, number: int, needed: set[int]) -> None:
        for _ in range(number):
            position = self._next()
            if position is None:
                raise ValueError(FEWER_ROWS)
            if not self.indexed and position not in needed:
                del self._cache[position]
