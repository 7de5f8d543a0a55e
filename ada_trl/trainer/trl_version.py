"""Whether the installed TRL is one that this package works with."""

import functools
import inspect

import trl
from packaging.version import Version
from trl import GRPOTrainer

from ..utils.logging import get_logger


logger = get_logger(__name__)

OLDEST, NEWEST_TESTED = "1.16", "1.16"

# Parameters of the methods of GRPOTrainer that are overridden, or called with arguments of ours, without `self`.
SIGNATURES = {
    "__init__": (
        *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
        *("reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools"),
        *("rollout_func", "environment_factory"),
    ),
    "_generate_and_score_completions": ("inputs",),
    "_generate": ("prompts",),
    "_tokenize_prompts": ("prompts",),
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
    "_tool_call_loop": (
        *("prompts", "prompt_ids", "completion_ids", "completions", "logprobs", "images", "multimodal_fields"),
    ),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_prepare_inputs": ("generation_batch",),
    "_get_train_sampler": ("dataset",),
    "get_train_dataloader": (),
    "_save_checkpoint": ("model", "trial"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_best_model": (),
    "evaluation_loop": ("dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"),
    "_remove_unused_columns": ("dataset", "description"),
    "_get_collator_with_removed_columns": ("data_collator", "description"),
    "log": ("logs", "start_time"),
}


@functools.cache
def check_trl() -> None:
    """
    Compare the signatures that this package relies on with those of the installed TRL, once per process.

    Raises:
        `RuntimeError`: If one differs, because a step would then fail later, or do something else.
    """
    for name, expected in SIGNATURES.items():
        method = getattr(GRPOTrainer, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)[1:]
        if found != expected:
            state = "does not exist" if found is None else f"has the parameters ({', '.join(found)})"
            raise RuntimeError(
                f"GRPOTrainer.{name} {state} in TRL {trl.__version__}, but ada_trl expects ({', '.join(expected)}): "
                f"it was tested with TRL {OLDEST} to {NEWEST_TESTED}. Install `trl=={NEWEST_TESTED}.*`, or a newer "
                "ada_trl."
            )
    if Version(trl.__version__).release[:2] > Version(NEWEST_TESTED).release[:2]:
        logger.warning(
            f"TRL {trl.__version__} is newer than the newest version that ada_trl was tested with ({NEWEST_TESTED}). "
            "All methods that it overrides have the expected signatures."
        )
