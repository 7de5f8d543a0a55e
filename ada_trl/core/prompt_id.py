"""Identity of a prompt across steps, runs and machines."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def prompt_identity(row: Mapping[str, Any], *, hash_entire_row: bool = False) -> Any:
    """
    Return the content that identifies a prompt, for [`prompt_key`]: the prompt, with its images if there are any.

    Args:
        row (`Mapping[str, Any]`):
            The data set row.
        hash_entire_row (`bool`, *optional*, defaults to `False`):
            Whether every column counts, because an environment makes the prompt from them.
    """
    if hash_entire_row:
        return dict(row)
    images = {name: row[name] for name in ("image", "images") if row.get(name) is not None}
    return {"prompt": row["prompt"], **images} if images else row["prompt"]


def prompt_reference(
    row: Mapping[str, Any], *, hash_entire_row: bool = False, keep_prompt: bool = False
) -> tuple[Any, str]:
    """
    Return what other ranks need of a data set row to identify its prompt.

    Args:
        row (`Mapping[str, Any]`), hash_entire_row (`bool`):
            As in [`prompt_identity`].
        keep_prompt (`bool`, *optional*, defaults to `False`):
            Whether to return the prompt itself instead of its text.

    Returns:
        `tuple[Any, str]`: the prompt or its text, with digests in place of images, and the prompt's key.

    Raises:
        `ValueError`: as [`prompt_key`].
    """
    prompt = prompt_identity(row, hash_entire_row=hash_entire_row)
    key = prompt_key(prompt, row)
    if not keep_prompt:
        try:
            prompt = prompt_text(prompt)
        except ValueError:  # it has no text, and is identified by its `id`
            pass
    return prompt, key


def prompt_key(prompt: str | list[dict[str, Any]], row: Mapping[str, Any] | None = None) -> str:
    """
    Return a prompt's identity across steps, runs and machines: a hash of its content, after the row's `id` if it has one.

    The hash is the SHA-256 of the prompt as canonical JSON, its first 16 digits if there is an `id` as well. An `id` alone
    would not do: data sets that are concatenated often have the same ids for different prompts, and some have one `id` for
    all rows. With an `id`, equal prompts of different ids (and different answers, say) have separate estimates. Fields that
    are `None` are left out of the hash, because a data set adds them to messages that lack a field which others have.

    Args:
        prompt (`str` or `list[dict[str, Any]]`):
            Text or a conversation.
        row (`Mapping[str, Any]`, *optional*):
            The data set row of the prompt.

    Raises:
        `ValueError`: if the prompt holds something that is neither text nor an image, and the row has no `id`.
    """
    row_id = None if row is None else row.get("id")
    try:
        digest = hashlib.sha256(prompt_text(prompt, quote=True).encode()).hexdigest()
    except ValueError:
        if row_id is None:
            raise
        return str(row_id)
    return digest if row_id is None else f"{row_id}-{digest[:16]}"


def prompt_text(prompt: str | list[dict[str, Any]], *, quote: bool = False) -> str:
    """
    Return a prompt as one string: text as it is (or as a JSON string, with `quote=True`), a conversation as canonical JSON, an
    image in it as the SHA-256 of its pixels.

    Raises:
        `ValueError`: if the prompt holds something that is neither text nor an image.
    """
    if isinstance(prompt, str) and not quote:
        return prompt
    try:
        return json.dumps(
            _without_none(prompt), sort_keys=True, separators=(",", ":"), ensure_ascii=quote, default=_digest
        )
    except TypeError as error:
        raise ValueError(
            f"A prompt that is neither text nor an image cannot be told apart by its content ({error}). Add a column "
            "'id' to the data set."
        ) from error


def _digest(value: Any) -> list | str:
    if hasattr(value, "isoformat"):  # of a date or a time
        return value.isoformat()
    content = value if isinstance(value, bytes) else value.tobytes() if hasattr(value, "tobytes") else None
    if content is None:
        raise TypeError(f"{type(value).__name__} has no canonical form")
    shape = getattr(value, "shape", ()) or getattr(value, "size", ())  # of an array or an image
    return [list(shape), hashlib.sha256(content).hexdigest()]


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
