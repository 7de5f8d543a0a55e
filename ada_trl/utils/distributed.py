"""Several processes: what goes wrong on one of them, what one needs of another, and how each works by itself."""

import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object


T = TypeVar("T")

# Failures: what goes wrong on one process is raised on all of them, before any waits for it in a collective.


class DistributedError(RuntimeError):
    """
    Something that all processes use has failed, which each of them reports with the same message.

    Args:
        cause (`str`):
            What has happened, without a full stop.
        fix (`str`, *optional*, defaults to `""`):
            What to do about it, in sentences.
    """

    def __init__(self, cause: str, fix: str = ""):
        super().__init__(f"{cause}. {fix}".rstrip())
        self.cause, self.fix = cause, fix


class ErrorInfo(NamedTuple):
    """What the other processes are told of an error; cause and fix are those of a [`DistributedError`]."""

    text: str
    common: tuple[str, str] | None


ErrorFactory = Callable[[int, str, str], DistributedError]
"""Takes the process that a [`DistributedError`] was first met on, its cause and its fix; returns what every process raises."""


def describe_error(error: Exception | None) -> ErrorInfo | None:
    if error is None:
        return None
    common = (error.cause, error.fix) if isinstance(error, DistributedError) else None
    return ErrorInfo(f"{type(error).__name__}: {error}", common)


def raise_first(
    reports: Sequence[ErrorInfo | None], error: Exception | None, error_factory: ErrorFactory | None = None
) -> None:
    """
    Raise if any process has failed; the first one that did decides.

    Args:
        reports (`Sequence[ErrorInfo | None]`):
            [`describe_error`] of every process.
        error (`Exception`, *optional*):
            This process's own. The user's error (of a reward function, say) is raised as it is where it happened.
        error_factory (`ErrorFactory`, *optional*):
            What is raised for a [`DistributedError`].

    Raises:
        [`DistributedError`]: as made by `error_factory`, the same on every process, chained to the first original error.
        `RuntimeError`: on a process without an error of its own, with the first other one's.
    """
    if not any(reports):
        return
    if error is not None and (error_factory is None or not isinstance(error, DistributedError)):
        raise error
    process, first = next((i, told) for i, told in enumerate(reports) if told)
    if first.common is not None and error_factory is not None:
        raise error_factory(process, *first.common) from error or RuntimeError(
            f"Process {process} failed: {first.text}"
        )
    raise RuntimeError(f"Process {process} failed: {first.text}") from error


def gather_results(work: Callable[[], T], error_factory: ErrorFactory | None = None) -> list[T]:
    """
    What `work` returns on every process, in order; what it raises on one is raised on all, see [`raise_first`].
    Collective, so `work` must make no unequal collective calls.
    """
    result = error = None
    try:
        result = work()
    except Exception as caught:  # whatever it is, the other processes must hear of it before it goes on
        error = caught
    received = gather_object([(describe_error(error), result)])
    raise_first([told for told, _ in received], error, error_factory)
    return [result for _, result in received]


@contextmanager
def synchronized_errors(error_factory: ErrorFactory | None = None) -> Iterator[None]:
    """[`gather_results`] of a `with` block, which returns nothing."""
    error = None
    try:
        yield
    except Exception as caught:  # as above
        error = caught
    raise_first(gather_object([describe_error(error)]), error, error_factory)


# Objects for one process


def exchange(outgoing: Mapping[int, Any], accelerator: Accelerator) -> dict[int, Any]:
    """
    Send objects to single processes; nobody else receives them. Collective.

    Args:
        outgoing (`Mapping[int, Any]`):
            By process, what it is to get from this one.
        accelerator (`Accelerator`):
            This process and the others.

    Returns:
        `dict[int, Any]`: by process, what it has sent here.
    """
    device = torch.device("cpu") if "gloo" in torch.distributed.get_backend() else accelerator.device
    packed: dict[int, torch.Tensor] = {}

    def pack() -> dict[int, int]:
        for process, package in outgoing.items():
            try:
                content = bytearray(pickle.dumps(package))
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"A row of the data set or a completion cannot be sent to another process ({error}). Remove live objects such as "
                    "locks and clients from the rows, or use adaptive_sampling='uniform', in which rows stay where they are."
                ) from error
            packed[process] = torch.frombuffer(content, dtype=torch.uint8).to(device)
        return {process: len(content) for process, content in packed.items()}

    sizes = gather_results(pack)
    me = accelerator.process_index
    arriving = {
        process: torch.empty(sent[me], dtype=torch.uint8, device=device)
        for process, sent in enumerate(sizes)
        if me in sent
    }
    operations = [torch.distributed.P2POp(torch.distributed.isend, *to) for to in _by_tensor(packed)]
    operations += [torch.distributed.P2POp(torch.distributed.irecv, *sender) for sender in _by_tensor(arriving)]
    for transfer in torch.distributed.batch_isend_irecv(operations) if operations else ():
        transfer.wait()
    with synchronized_errors():
        return {process: pickle.loads(content.cpu().numpy().tobytes()) for process, content in arriving.items()}


def exchange_rows(
    local_rows: Sequence[T], ranks: Sequence[int], needed: Sequence[Sequence[int]], accelerator: Accelerator
) -> dict[int, T]:
    """
    Send rows to the ranks that need them. Collective; a row that is needed only where it is does not travel.

    Args:
        local_rows (`Sequence`):
            The rows of this rank, in order.
        ranks (`Sequence[int]`):
            By index of all rows, which rank has it.
        needed (`Sequence[Sequence[int]]`):
            By rank, the indices that it needs; the same on every rank.

    Returns:
        `dict[int, Any]`: by index, the rows of this rank and those it needs.
    """
    me = accelerator.process_index
    rows = dict(zip((index for index, rank in enumerate(ranks) if rank == me), local_rows, strict=True))
    missing = [{index for index in indices if ranks[index] != rank} for rank, indices in enumerate(needed)]
    if any(missing):
        outgoing = {rank: {i: rows[i] for i in indices if i in rows} for rank, indices in enumerate(missing)}
        for received in exchange({rank: found for rank, found in outgoing.items() if found}, accelerator).values():
            rows |= received
    return rows


def _by_tensor(contents: dict[int, torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    return [(content, process) for process, content in contents.items()]


# One process by itself

_collectives_disabled: ContextVar[bool] = ContextVar("collectives_disabled", default=False)


@contextmanager
def no_collectives() -> Iterator[None]:
    """
    While the block runs, collective calls of this thread concern this process only: other processes do other things,
    perhaps at other times, and may fail. Other threads notice nothing.
    """
    token = _collectives_disabled.set(True)
    try:
        yield
    finally:
        _collectives_disabled.reset(token)


def collectives_disabled() -> bool:
    """Whether this thread is inside of [`no_collectives`]."""
    return _collectives_disabled.get()


def gather_unless_disabled(gather: Callable[[T], T]) -> Callable[[T], T]:
    """`gather`, which returns what it is given inside of [`no_collectives`]."""

    @functools.wraps(gather)
    def gather_here(tensor: T) -> T:
        return tensor if _collectives_disabled.get() else gather(tensor)

    return gather_here
