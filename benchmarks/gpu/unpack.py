"""Unpack the parts that `pack` has written, on a machine that has no packages yet: standard library only."""

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import NamedTuple


class Archive(NamedTuple):
    name: str
    size: int  # bytes
    digest: str


class Manifest(NamedTuple):
    """
    Content of the parts.

    Args:
        archives (`list[Archive]`):
            Archives in their order; the parts are their bytes, one after another.
        parts (`list[str]`):
            Digest of each part.
        calls (`list[list[str]]`):
            Stages to run in each call. The first calls bring one part each.
        commit (`str`):
            Commit of the repository.
    """

    archives: list[Archive]
    parts: list[str]
    calls: list[list[str]]
    commit: str

    def as_dict(self) -> dict:
        return self._asdict() | {"archives": [archive._asdict() for archive in self.archives]}

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**fields | {"archives": [Archive(**archive) for archive in fields["archives"]]})


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def unpack(part: Path, target: Path) -> list[str]:
    """
    Add a part to those before it, and extract the archives that are complete now.

    Args:
        part (`Path`):
            Folder that `pack` has written; the parts arrive in order.
        target (`Path`):
            Folder for the received bytes, the manifest and the content of the archives.

    Returns:
        `list[str]`: names of the archives that were extracted.

    Raises:
        `ValueError`: if a part is missing, was damaged, or is from another `pack`.
    """
    manifest = Manifest.load(part / "manifest.json")
    content, number = (part / "part").read_bytes(), int(part.name)
    if digest(content) != manifest.parts[number - 1]:
        raise ValueError(f"{part} has {len(content)} bytes with another SHA-256 than its manifest. Transfer it again.")
    target.mkdir(parents=True, exist_ok=True)
    kept = target / "manifest.json"
    if kept.exists() and Manifest.load(kept) != manifest:
        raise ValueError(f"{part} is from another run of pack than the parts in {target}. Remove {target}.")
    kept.write_text((part / "manifest.json").read_text(encoding="utf-8"))
    received = target / "received"
    received.mkdir(exist_ok=True)
    (received / f"{number:03d}").write_bytes(content)
    if len(list(received.iterdir())) != number:
        raise ValueError(f"{part} arrived as part {len(list(received.iterdir()))}. Transfer the parts in order.")

    stream = b"".join(path.read_bytes() for path in sorted(received.iterdir()))
    extracted, start = [], 0
    for archive in manifest.archives:
        content = stream[start : start + archive.size]
        start += archive.size
        done = target / f"{archive.name}.done"
        if len(content) < archive.size or done.exists():
            continue
        if digest(content) != archive.digest:
            raise ValueError(f"The archive {archive.name} has another SHA-256 than its manifest. Run pack again.")
        with zipfile.ZipFile(io.BytesIO(content)) as files:
            files.extractall(target)
        done.touch()
        extracted.append(archive.name)
    return extracted
