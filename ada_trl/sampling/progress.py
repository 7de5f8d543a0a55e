"""Progress bar of the sampling within one step."""

from tqdm.auto import tqdm


class StepProgress(tqdm):
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
        label, look = f"Sampling for step {step}", {"miniters": 0, "leave": False, "dynamic_ncols": True}
        super().__init__(total=total, desc=label, unit="prompt", delay=2, disable=disable, **look)

    def __call__(self, active: int, rollouts: int) -> None:
        self.set_postfix(active=active, rollouts=rollouts, refresh=False)
        self.update(self.total - active - self.n)

    def tick(self) -> None:
        """Refresh the elapsed time while nothing else has changed."""
        self.update(0)
