"""Progress bar of the sampling within one step."""

from tqdm.auto import tqdm


class StepProgress:
    """
    A bar of the prompts whose sampling is finished in this step, with the number of rollouts and the elapsed time. It appears
    after two seconds, so that quick steps show nothing, and disappears at the end of the step.

    Args:
        total (`int`):
            Number of prompts to sample: those of this rank with a vLLM server, of all ranks otherwise.
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
        """Refresh the elapsed time while nothing else has changed."""
        self._bar.update(0)

    def __enter__(self) -> "StepProgress":
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()
