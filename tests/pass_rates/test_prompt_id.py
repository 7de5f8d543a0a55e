"""Identity of prompts: a stable hash of their content, with the row's `id` if there is one."""

import datetime
import hashlib

import numpy as np
import pytest
import torch
from datasets import Dataset

from ada_trl.pass_rates.prompt_id import prompt_key, prompt_reference, row_key


CONVERSATION = [{"role": "user", "content": "1+2="}]


def test_the_key_is_a_hash_of_the_content():
    content = b'[{"content":"1+2=","role":"user"}]'
    assert prompt_key("1+2=") == hashlib.sha256(b'"1+2="').hexdigest()
    assert prompt_key(CONVERSATION) == hashlib.sha256(content).hexdigest() == prompt_key([dict(CONVERSATION[0])])
    # A dataset adds the fields that other messages have.
    assert prompt_key([{"content": "1+2=", "role": "user", "name": None}]) == prompt_key(CONVERSATION)
    keys = {prompt_key(p) for p in ["1+2=", "1+2= ", "", CONVERSATION, CONVERSATION * 2, content.decode()]}
    assert len(keys) == 6


def test_an_id_is_part_of_the_key_and_not_the_whole_key():
    """Concatenated datasets may both be numbered from 0, and some have one id for all rows."""
    digest = hashlib.sha256(b'"1+2="').hexdigest()[:16]
    assert prompt_key("1+2=", {"id": 17, "prompt": "1+2="}) == f"17-{digest}"
    assert prompt_key("1+2=", {"id": None}) == prompt_key("1+2=", {}) == prompt_key("1+2=")
    assert prompt_key("1+2=", {"id": 0}) != prompt_key("31+4=", {"id": 0})
    assert prompt_key("1+2=", {"id": 0}) != prompt_key("1+2=", {"id": 1})
    assert len(prompt_key("\ud800")) == 64  # not valid in UTF-8


@pytest.mark.parametrize("keep_prompt", [False, True])
def test_other_ranks_receive_key_and_prompt(keep_prompt):
    row, image = {"prompt": CONVERSATION, "id": 0}, np.zeros((2, 2), np.uint8)
    prompt = CONVERSATION if keep_prompt else None
    assert prompt_reference(row, keep_prompt=keep_prompt) == (prompt_key(CONVERSATION, row), prompt)
    with_image, other = (
        prompt_reference({**row, "image": value}, keep_prompt=keep_prompt) for value in (image, image + 1)
    )
    assert with_image[0] != other[0] and (with_image[1] is None) == (not keep_prompt)
    whole = prompt_reference({**row, "level": 1}, hash_entire_row=True)
    assert whole[0] != prompt_reference({**row, "level": 2}, hash_entire_row=True)[0]
    assert prompt_reference({"prompt": [object()], "id": "x"}) == ("x", None)
    for empty in (None, []):  # as in mixed data
        assert prompt_reference({**row, "images": empty}) == prompt_reference(row)


def test_other_objects_have_no_key():
    with pytest.raises(ValueError, match=r"neither text nor an image .* Add a column 'id'"):
        prompt_key([{"role": "user", "content": object()}])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_tensors_are_hashed(dtype):
    def key(image):
        return prompt_key([{"role": "user", "content": [{"type": "image", "image": image}]}])

    image = torch.tensor([[0, 1], [2, 3]], dtype=dtype)
    assert key(image) == key(image.clone())
    assert len({key(image), key(image + 1), key(image.flatten()), key(image.T)}) == 4


def test_columns_of_an_environment_are_hashed():
    row = {"when": datetime.date(2026, 1, 1), "blob": b"x", "board": np.zeros((2, 3)), "none": None}
    key = prompt_key(row)
    assert key == prompt_key({"when": datetime.date(2026, 1, 1), "blob": b"x", "board": np.zeros((2, 3))})
    for change in ({"when": datetime.date(2026, 1, 2)}, {"blob": b"y"}, {"board": np.zeros((3, 2))}, {"none": 1}):
        assert prompt_key(row | change) != key


def test_a_list_in_numpy_format_is_hashed_by_its_content():
    """Its array has the addresses of objects, which differ when a row is read again."""
    row = {"prompt": "1+1=", "choices": ["2", "11"], "tests": [{"in": "1", "out": None}], "steps": [[1], [1, 2]]}
    stream = Dataset.from_list([row, row | {"choices": ["2", "12"]}]).with_format("numpy").to_iterable_dataset()
    keys = [list(map(row_key, stream)) for _ in range(2)]
    assert keys[0] == keys[1] and len(set(keys[0])) == 2
