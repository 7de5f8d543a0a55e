"""Errors of a vLLM server or engine, the same on every rank."""

from ..utils.distributed import DistributedError, ErrorFactory


RESUME = "Check its log, restart it, and resume from the last checkpoint, if there is one."


class VLLMServerError(DistributedError):
    """
    A request to the vLLM server failed in a way that a retry would not help.

    Args:
        cause (`str`), fix (`str`, *optional*):
            As in [`~utils.distributed.DistributedError`].
        status (`int`, *optional*):
            HTTP status of the server's error response.
    """

    def __init__(self, cause: str, fix: str = "", *, status: int | None = None):
        super().__init__(cause, fix)
        self.status = status


class VLLMServerUnavailable(VLLMServerError):
    """A request missed its deadline, or failed more often than it is retried: dead, stalled or overloaded server."""


def make_error_factory(engine: str, consequence: str, fix: str) -> ErrorFactory:
    """
    Build a function that creates the same [`VLLMServerError`] on every rank. `fix` is suggested if the failure itself
    has no fix.
    """

    def error(process: int, cause: str, its_fix: str) -> VLLMServerError:
        where = f" (process {process})" if process else ""
        return VLLMServerError(f"{engine}{where}: {consequence}: {cause}", its_fix or fix)

    return error
