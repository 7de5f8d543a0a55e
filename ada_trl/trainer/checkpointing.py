"""State of the prompt queue and of the baseline in a checkpoint, in addition to the table of pass rates."""

import json
import os
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..utils.files import atomic_write


STATE_FILE = "ada_state.json"


def save_state(checkpoint: str, state: dict[str, Any]) -> None:
    """Write the state atomically."""
    with atomic_write(os.path.join(checkpoint, STATE_FILE)) as temporary:
        temporary.write_text(json.dumps(state))


def load_state(checkpoint: str) -> dict[str, Any]:
    """
    Return the state that [`save_state`] wrote, or an empty one if the file is missing.

    Raises:
        `ValueError`: If the file is not valid JSON.
    """
    path = os.path.join(checkpoint, STATE_FILE)
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}). Restore it, or delete it to start without this state."
        ) from error


def reject_removed_modes(checkpoint: str) -> None:
    """
    Check that a checkpoint is not of a mode of an earlier version that was removed.

    Raises:
        `ValueError`: If it is: its rollouts were chosen or weighted in a way that does not exist any more.
    """
    found = None
    pass_rates = os.path.join(checkpoint, "ada_pass_rates.parquet")
    if os.path.exists(os.path.join(checkpoint, "ada_reward_head.safetensors")):
        found = "baseline='posterior'"
    elif os.path.exists(os.path.join(checkpoint, "ada_value_model.safetensors")):
        found = "value_model"
    elif os.path.exists(pass_rates):
        try:
            fitted = json.loads((pq.read_schema(pass_rates).metadata or {})[b"ada_trl"]).get("fitted") or {}
        except (pa.ArrowException, KeyError, ValueError):  # `load_pass_rates` names the damaged file and a fix
            fitted = {}
        found = (
            "baseline='posterior'"
            if "reward_estimator" in fitted
            else "prompt_oversampling"
            if "brier" in fitted
            else None
        )
    if found is not None:
        raise ValueError(
            f"{checkpoint} is the checkpoint of a run with {found}, which was removed in ada_trl 0.2. Finish the run with ada_trl 0.1, "
            "or start a new one from the weights in the checkpoint (model=..., without resume_from_checkpoint)."
        )
