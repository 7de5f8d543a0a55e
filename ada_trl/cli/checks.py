"""What a command needs is there: models, optional packages. Looked at before anything slow begins."""

import importlib.util
from pathlib import Path

from .errors import UserError


MODEL_FILES = ("config.json", "adapter_config.json")


def check_model(name: str, option: str = "--model_name_or_path") -> None:
    """
    A model by name or path is one.

    Args:
        name (`str`):
            A directory with a model or an adapter, or a name on the hub.
        option (`str`):
            What it was given as.

    Raises:
        `UserError`: if it is neither, or the hub does not give it to this user.
    """
    path = Path(name)
    if not path.exists():
        return _check_on_hub(name, option)
    if any((path / file).is_file() for file in MODEL_FILES):
        return None
    checkpoints = sorted(path.glob("checkpoint-*"), key=lambda found: (len(found.name), found.name))
    if checkpoints:
        hint = f"It has checkpoints; give {checkpoints[-1]}."
    else:
        hint = "Give the directory of a model; a data set belongs to --dataset_name."
    raise UserError(f"{option} {name!r} is no model: it has no {' or '.join(MODEL_FILES)}. {hint}")


def _check_on_hub(name: str, option: str) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        hf_hub_download(name, MODEL_FILES[0])
    except HFValidationError as error:
        raise UserError(f"{option} {name!r}: there is no such directory. Correct the path.") from error
    except GatedRepoError as error:
        raise UserError(
            f"{option} {name!r} is gated. Ask for access on https://huggingface.co/{name}, then run `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{option} {name!r} is neither a directory here nor a model on the hub. Correct the name; for a private "
            "one run `hf auth login`."
        ) from error
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"{option} {name!r} is neither a directory here nor in the hub's cache, and the hub cannot be reached. "
            "Correct the name, or download the model where there is a connection."
        ) from error
    except EntryNotFoundError:
        return  # an adapter; whoever loads it says what else is missing


def check_installed(module: str, extra: str, purpose: str) -> None:
    """
    An optional package is installed.

    Raises:
        `UserError`: if not, with the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        name = module.replace("_", "-")
        raise UserError(f"{name}, which {purpose}, is not installed. Install it: pip install 'ada_trl[{extra}]'.")
