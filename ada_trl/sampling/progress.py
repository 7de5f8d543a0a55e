"""Signs of life during a long step."""

from tqdm.auto import tqdm


class StepProgress:
    """
    A bar of the prompts that are done with sampling in this step, with the rollouts drawn and the time elapsed. It
    appears after two seconds, so quick steps show nothing, and disappears with the step.

    Args:
        total (`int`):
            Prompts to sample: this process's own for a vLLM server, all of them otherwise.
        step (`int`):
            Training step, for the label.
        disable (`bool`):
            Show nothing.
    """

    def __init__(self, total: int, step: int, disable: bool):
        self._bar = tqdm(
            total=total,
            desc=f"Sampling for step {step}",
            unit="prompt",
            delay=2,
            miniters=0,
            leave=False,
            dynamic_ncols=True,
            disable=disable,
        )

    def __call__(self, active: int, rollouts: int) -> None:
        self._bar.set_postfix(active=active, rollouts=rollouts, refresh=False)
        self._bar.update(self._bar.total - active - self._bar.n)

    def tick(self) -> None:
        """Nothing has happened, but time has passed."""
        self._bar.update(0)

    def __enter__(self) -> "StepProgress":
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()
