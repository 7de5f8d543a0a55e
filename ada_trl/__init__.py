"""Reinforce-Ada adaptive sampling for TRL's GRPOTrainer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__


if TYPE_CHECKING:
    from .trainer.ada_grpo_config import AdaGRPOConfig
    from .trainer.ada_grpo_trainer import AdaGRPOTrainer

__all__ = ["AdaGRPOConfig", "AdaGRPOTrainer", "__version__"]

_MODULES = {"AdaGRPOConfig": ".trainer.ada_grpo_config", "AdaGRPOTrainer": ".trainer.ada_grpo_trainer"}


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `ada_trl.core` can be imported without TRL.
    if name not in _MODULES:
        raise AttributeError(f"module 'ada_trl' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
