"""Reading and writing state on disk; nothing that a crash could tear."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """
    Give a temporary path in the directory of `path`, which is made if need be; what is written there replaces `path` when the block ends.

    A reader sees the old file or the whole new one. If the block raises, the old file stays and the temporary one is
    removed. One process at a time may write a path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_tensors(path: str | Path, tensors: Mapping[str, "torch.Tensor"]) -> None:
    """Write tensors as safetensors with a checksum, atomically."""
    from safetensors.torch import save_file  # imports torch, which the commands' --help need not wait for

    with atomic_write(path) as temporary:
        save_file(dict(tensors), temporary, metadata={"sha256": _checksum(tensors)})


def load_tensors(path: str | Path) -> dict[str, "torch.Tensor"]:
    """
    Read what [`save_tensors`] wrote. Nothing in the file is executed or unpickled.

    Raises:
        `FileNotFoundError`: if there is no such file.
        `ValueError`: if the file is truncated, corrupt or something else.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            expected = (file.metadata() or {}).get("sha256")
    except SafetensorError as error:
        raise ValueError(f"it cannot be read as safetensors ({error}).") from error
    if _checksum(tensors) != expected:
        raise ValueError("its tensors do not match its checksum.")
    return tensors


def _checksum(tensors: Mapping[str, "torch.Tensor"]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].numpy())
    return digest.hexdigest()


def last_checkpoint(run: str | Path) -> Path | None:
    """The `checkpoint-N` directory of a run with the largest N; as `transformers.trainer_utils`, which imports torch."""
    found = [path for path in Path(run).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    found = [path for path in found if path.is_dir()]
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)
