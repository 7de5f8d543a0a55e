"""A warning, with cause and remedy, when most prompts stay without signal."""

from accelerate.logging import get_logger
from transformers import TrainerCallback


logger = get_logger(__name__)

CAUSES = {
    "all_positive": (
        "only positive rollouts",
        "The prompts are too easy for the model, positive_threshold is too low, or the reward function accepts "
        "everything. Train on harder prompts, or look at the completions (log_completions=True).",
    ),
    "all_negative": (
        "only negative rollouts",
        "The prompts are too hard for the model, positive_threshold is above what the rewards can reach, completions are "
        "cut off (completions/clipped_ratio), or the reward function is broken. Look at the completions "
        "(log_completions=True); train on easier prompts or raise max_rounds or max_completion_length.",
    ),
    "unscored": (
        "no rollout that any reward function scored",
        "The reward functions return None or NaN: check that they understand the completions and the data set's columns.",
    ),
}


class SignalWarning(TrainerCallback):
    """
    Warns, once per cause, when more than `share` of the prompts have been unresolved for the same reason in everything
    that was logged for `steps` steps.

    Args:
        share (`float`, *optional*, defaults to `0.5`):
            Share of the prompts, between 0 and 1.
        steps (`int`, *optional*, defaults to `20`):
            Training steps.
    """

    def __init__(self, share: float = 0.5, steps: int = 20):
        self.share = share
        self.steps = steps
        self._last_good = dict.fromkeys(CAUSES, 0)  # the last step at which it was not so
        self._warned: set[str] = set()

    def on_train_begin(self, args, state, control, **kwargs):
        self._last_good = dict.fromkeys(CAUSES, state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        for cause, (found, remedy) in CAUSES.items():
            share = (logs or {}).get(f"ada/unresolved/{cause}")
            if share is None:
                continue
            if share <= self.share:
                self._last_good[cause] = state.global_step
            elif state.global_step - self._last_good[cause] >= self.steps and cause not in self._warned:
                self._warned.add(cause)
                logger.warning(
                    f"For {state.global_step - self._last_good[cause]} steps, more than {self.share:.0%} of the prompts "
                    f"have found {found} (ada/unresolved/{cause} is {share:.0%} now) and taught nothing. {remedy}"
                )
