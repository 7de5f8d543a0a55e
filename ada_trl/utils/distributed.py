"""Several processes: errors that all of them raise, exchange of objects, and blocks without collective calls."""

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

# Errors of one process are raised on all of them; otherwise the others would wait for it in a collective call.


class DistributedError(RuntimeError):
    """
    Failure of something that all processes use; each process reports it with the same message.

    Args:
        cause (`str`):
            Description of the failure, without a full stop.
        fix (`str`, *optional*, defaults to `""`):
            Suggested fix, in sentences.
    """

    def __init__(self, cause: str, fix: str = ""):
        super().__init__(f"{cause}. {fix}".rstrip())
        self.cause, self.fix = cause, fix


class ErrorInfo(NamedTuple):
    """Description of an error for the other processes; `common` is cause and fix of a [`DistributedError`]."""

    text: str
    common: tuple[str, str] | None


ErrorFactory = Callable[[int, str, str], DistributedError]
"""
Takes the first process with a [`DistributedError`], its cause and its fix; returns the error that every process
raises.
"""


def describe_error(error: Exception | None) -> ErrorInfo | None:
    if error is None:
        return None
    common = (error.cause, error.fix) if isinstance(error, DistributedError) else None
    return ErrorInfo(f"{type(error).__name__}: {error}", common)


def raise_first(
    reports: Sequence[ErrorInfo | None], error: Exception | None, error_factory: ErrorFactory | None = None
) -> None:
    """
    Raise if any process has failed. The first failed process determines the message.

    Args:
        reports (`Sequence[ErrorInfo | None]`):
            [`describe_error`] of every process.
        error (`Exception`, *optional*):
            Error of this process. A user's error (for example of a reward function) is raised unchanged on its
            process.
        error_factory (`ErrorFactory`, *optional*):
            Creates the error to raise for a [`DistributedError`].

    Raises:
        [`DistributedError`]: from `error_factory`, the same on every process, chained to the original error.
        `RuntimeError`: on a process without an error, with the message of the first failed process.
    """
    if not any(reports):
        return
    if error is not None and (error_factory is None or not isinstance(error, DistributedError)):
        raise error
    process, first = next((i, report) for i, report in enumerate(reports) if report)
    if first.common is not None and error_factory is not None:
        raise error_factory(process, *first.common) from error or RuntimeError(
            f"Process {process} failed: {first.text}"
        )
    raise RuntimeError(f"Process {process} failed: {first.text}") from error


def gather_results(work: Callable[[], T], error_factory: ErrorFactory | None = None) -> list[T]:
    """
    Return the results of `work` on all processes, in order. An error on one process is raised on all, see
    [`raise_first`]. Collective, so `work` must make the same collective calls on every process.
    """
    result = error = None
    try:
        result = work()
    except Exception as caught:  # of any class: the other processes must be notified before it is raised
        error = caught
    received = gather_object([(describe_error(error), result)])
    raise_first([report for report, _ in received], error, error_factory)
    return [result for _, result in received]


@contextmanager
def synchronized_errors(error_factory: ErrorFactory | None = None) -> Iterator[None]:
    """Raise an error of the block on all processes, as [`gather_results`] does. Collective."""
    error = None
    try:
        yield
    except Exception as caught:  # as above
        error = caught
    raise_first(gather_object([describe_error(error)]), error, error_factory)


# Objects for one process


def exchange(outgoing: Mapping[int, Any], accelerator: Accelerator) -> dict[int, Any]:
    """
    Send objects to individual processes. Collective.

    Args:
        outgoing (`Mapping[int, Any]`):
            Object for each receiving process.
        accelerator (`Accelerator`):
            Accelerator of this process.

    Returns:
        `dict[int, Any]`: object from each sending process.
    """
    device = torch.device("cpu") if "gloo" in torch.distributed.get_backend() else accelerator.device
    packed: dict[int, torch.Tensor] = {}

    def pack() -> dict[int, int]:
        for process, package in outgoing.items():
            content = bytearray(pickle.dumps(package))  # live objects such as locks cannot be sent
            packed[process] = torch.frombuffer(content, dtype=torch.uint8).to(device)
        return {process: len(content) for process, content in packed.items()}

    sizes = gather_results(pack)
    me = accelerator.process_index
    arriving = {
        process: torch.empty(sent[me], dtype=torch.uint8, device=device)
        for process, sent in enumerate(sizes)
        if me in sent
    }
    operations = [torch.distributed.P2POp(torch.distributed.isend, content, rank) for rank, content in packed.items()]
    operations += [
        torch.distributed.P2POp(torch.distributed.irecv, content, rank) for rank, content in arriving.items()
    ]
    for transfer in torch.distributed.batch_isend_irecv(operations) if operations else ():
        transfer.wait()
    with synchronized_errors():
        return {process: pickle.loads(content.cpu().numpy().tobytes()) for process, content in arriving.items()}


def exchange_rows(
    local_rows: Sequence[T], ranks: Sequence[int], needed: Sequence[Sequence[int]], accelerator: Accelerator
) -> dict[int, T]:
    """
    Send rows to the ranks that need them. Collective. A row that only its own rank needs is not sent.

    Args:
        local_rows (`Sequence`):
            Rows of this rank, in order.
        ranks (`Sequence[int]`):
            Rank of each row, over all rows.
        needed (`Sequence[Sequence[int]]`):
            Indices that each rank needs; the same on every rank.

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


# Blocks without collective calls

_collectives_disabled: ContextVar[bool] = ContextVar("collectives_disabled", default=False)


@contextmanager
def no_collectives() -> Iterator[None]:
    """
    While the block runs, collective calls of this thread involve this process only, because the other processes do
    other work, at other times, and may fail. Other threads are not affected.
    """
    token = _collectives_disabled.set(True)
    try:
        yield
    finally:
        _collectives_disabled.reset(token)


def collectives_disabled() -> bool:
    """Return whether this thread is inside of [`no_collectives`]."""
    return _collectives_disabled.get()


def gather_unless_disabled(gather: Callable[[T], T]) -> Callable[[T], T]:
    """Wrap `gather` so that it returns its argument inside of [`no_collectives`]."""

    @functools.wraps(gather)
    def gather_here(tensor: T) -> T:
        return tensor if _collectives_disabled.get() else gather(tensor)

    return gather_here
