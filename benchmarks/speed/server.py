"""A trainer whose rounds on a vLLM server are synchronous, for comparisons."""

from ada_trl import AdaGRPOTrainer
from ada_trl.sampling import asynchronous
from ada_trl.sampling.asynchronous import AsyncVLLMSampler
from ada_trl.sampling.sampler import RolloutSampler
from ada_trl.trainer.trl_private import override_attributes


class RoundByRoundSampler(AsyncVLLMSampler):
    """Requests a round when the round before is complete for all prompts of the rank."""

    rollouts_in_flight = 0

    def __init__(self, **options):
        super().__init__(**options)
        self._next_round: list[tuple] = []

    def _submit(self, *request) -> None:
        self._next_round.append(request)

    def _collect(self, *given) -> list:
        if not self._requests:
            requests, self._next_round = self._next_round, []
            for request in requests:
                super()._submit(*request)
        return super()._collect(*given)


class SynchronousTrainer(AdaGRPOTrainer):
    """Trainer that finishes a round of all prompts of its rank before the next one starts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        build_sampler = self._round_generator.build_sampler

        def build(*step, **options) -> RolloutSampler:
            with override_attributes(asynchronous, AsyncVLLMSampler=RoundByRoundSampler):
                return build_sampler(*step, **options)

        self._round_generator.build_sampler = build
