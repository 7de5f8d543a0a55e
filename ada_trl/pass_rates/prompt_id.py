"""Identity of a prompt across steps, runs and machines."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def prompt_reference(
    row: Mapping[str, Any], *, hash_entire_row: bool = False, keep_prompt: bool = False
) -> tuple[str, Any]:
    """
    Return the parts of a dataset row that other ranks need: the identity of its prompt, and possibly the prompt.

    Args:
        row (`Mapping[str, Any]`):
            The dataset row. Its images, if there are any, belong to the prompt.
        hash_entire_row (`bool`, *optional*, defaults to `False`):
            Whether every column belongs to the prompt, because an environment makes the prompt from them.
        keep_prompt (`bool`, *optional*, defaults to `False`):
            Whether to return the prompt itself as well.

    Returns:
        `tuple[str, Any]`: the prompt's key ([`prompt_key`]), and the prompt or `None`.

    Raises:
        `ValueError`: as [`prompt_key`].
    """
    prompt = dict(row) if hash_entire_row else row["prompt"]
    images = {name: row[name] for name in ("image", "images") if not _is_empty(row.get(name))}
    if images and not hash_entire_row:
        prompt = {"prompt": prompt, **images}
    return prompt_key(prompt, row), row["prompt"] if keep_prompt else None


def _is_empty(value: Any) -> bool:
    """Whether a column of images has none in this row, as in a mixture of data with and without images."""
    return value is None or (isinstance(value, list) and not value)


def prompt_key(prompt: Any, row: Mapping[str, Any] | None = None) -> str:
    """
    Return a prompt's identity across steps, runs and machines: a hash of its content, after the row's `id` if it has
    one.

    The hash is the SHA-256 of the prompt as canonical JSON, in which an image is the hash of its pixels; its first 16
    digits if there is an `id` as well. An `id` alone would not do: datasets that are concatenated often have the same
    ids for different prompts, and some have one `id` for all rows. With an `id`, equal prompts of different ids (and
    different answers, say) have separate estimates. Fields that are `None` are left out of the hash, because a dataset
    adds them to messages that lack a field which others have.

    Args:
        prompt (`Any`):
            Text, a conversation, or a mapping of columns.
        row (`Mapping[str, Any]`, *optional*):
            The dataset row of the prompt.

    Raises:
        `ValueError`: if the prompt holds something that is neither text nor an image, and the row has no `id`.
    """
    row_id = None if row is None else row.get("id")
    try:
        text = json.dumps(_without_none(prompt), sort_keys=True, separators=(",", ":"), default=_digest)
    except TypeError as error:
        if row_id is None:
            raise ValueError(
                f"A prompt that is neither text nor an image cannot be identified by its content ({error}). Add a "
                "column 'id' to the dataset."
            ) from error
        return str(row_id)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return digest if row_id is None else f"{row_id}-{digest[:16]}"


def row_key(row: Mapping[str, Any]) -> str:
    """Return the [`prompt_key`] of all columns, which is empty if there is none: such rows cannot be told apart."""
    try:
        return prompt_key(dict(row), row)
    except ValueError:
        return ""


def _digest(value: Any) -> list | str:
    if hasattr(value, "isoformat"):  # a date or a time
        return value.isoformat()
    if hasattr(value, "detach"):  # a tensor, which may be of a type that NumPy does not have
        value = value.detach().cpu().double().numpy()
    if getattr(getattr(value, "dtype", None), "hasobject", False):  # a list in NumPy format: its bytes are addresses
        return _without_none(value.tolist())
    content = value if isinstance(value, bytes) else value.tobytes() if hasattr(value, "tobytes") else None
    if content is None:
        raise TypeError(f"{type(value).__name__} has no canonical form")
    shape = getattr(value, "shape", ()) or getattr(value, "size", ())  # an array or an image
    return [list(shape), hashlib.sha256(content).hexdigest()]


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
