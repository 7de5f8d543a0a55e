"""
One of several processes that run scripted trainings one after another. `run` returns the outcome of one of them; as a
module, all outcomes are written to `<output_dir>/rank<i>.json`.
"""

import gc
import json
import os
import pickle
import random
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.distributed.tensor import DTensor

from ada_trl import AdaGRPOTrainer
from ada_trl.trainer import step
from ada_trl.trainer.rounds import RoundGenerator

from ..conversations import Counting, ToolUser
from ..helpers import QUICK, chat_tokenizer, config, tiny_chat_model, tiny_model, tiny_tokenizer


class RecordedRounds(RoundGenerator):
    """Records which rows are generated on each rank, what it holds, and how much it sends to all."""

    def build_sampler(self, plan, slots, **options):
        trainer, owners = self.trainer, plan.row_ranks
        sampler = super().build_sampler(plan, slots, **options)
        generated, local = set(), []
        sample_round, generate = sampler._sample_round, sampler.generate_and_score

        def remember_requests():
            rollouts = [(slot, first + i) for slot, first in sampler._requests for i in range(slots[slot].round_size)]
            per_rank = -(-len(rollouts) // sampler.num_processes)
            rollouts += [rollouts[-1]] * (per_rank * sampler.num_processes)
            local[:] = rollouts[sampler.process_index * per_rank :][:per_rank]
            generated.update(sampler.dataset_row_index(*rollout) for rollout in local)
            return sample_round()

        def remember_rows(rows, is_first_round):
            trainer.rows = [(row["prompt"], draw) for row, (_, draw) in zip(rows, local, strict=True)]
            return generate(rows, is_first_round)

        sampler._sample_round, sampler.generate_and_score = remember_requests, remember_rows
        own = {prompt for prompt, owner in enumerate(owners) if owner == trainer.accelerator.process_index}
        traffic = {"generated": generated, "own": own, "owners": owners, "gathered": trainer.gathered}
        trainer.traffic.append(traffic)

        def counted(call):
            def method(*args):
                with counted_gathers() as sizes:
                    result = call(*args)
                traffic["gathered"] += sum(sizes)
                return result

            return method

        sampler.sample, fetch = counted(sampler.sample), counted(sampler.fetch)

        def remember_fetched(selected):
            completions = fetch(selected)
            traffic["blobs"] = [len(completion.extras.get("blob", "")) for completion in completions]
            traffic["held"] = set(sampler._data)
            return completions

        sampler.fetch = remember_fetched
        return sampler


def plan_step(trainer, inputs):
    with counted_gathers() as sizes:
        plan = step.plan_step(trainer, inputs)
    trainer.gathered = sum(sizes)
    if plan.rows:  # one round
        draws = [draw for size in plan.sizes for draw in range(size)]
        start = trainer.accelerator.process_index * len(plan.rows)
        local = draws[start : start + len(plan.rows)]
        trainer.rows = [(row["prompt"], draw) for row, draw in zip(plan.rows, local, strict=True)]
    return plan


def log_step(trainer, plan, batch, output):
    trainer.rollouts = batch.rollouts
    step.log_step(trainer, plan, batch, output)


class Scripted(AdaGRPOTrainer):
    """Completions depend on the prompt and the draw, not on the process that generates them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._round_generator = RecordedRounds(self)

    def _generate_single_turn(self, *args):
        generated = super()._generate_single_turn(*args)  # under FSDP, a collective
        if self.model.training and self.args.scripted_generation and not self.is_vanilla_grpo:
            rngs = [random.Random(f"{prompt} {draw}") for prompt, draw in self.rows]
            texts = ["".join(rng.choices("0123456789", k=rng.randint(1, 4))) for rng in rngs]
            return self.processing_class(texts)["input_ids"], None
        return generated

    def _generate_and_score_completions(self, inputs):
        with mock.patch.multiple("ada_trl.trainer.ada_grpo_trainer", plan_step=plan_step, log_step=log_step):
            output = super()._generate_and_score_completions(inputs)
        if self.is_vanilla_grpo or not self.model.training:
            return output
        texts = self.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
        prompts = self.processing_class.batch_decode(output["prompt_ids"], skip_special_tokens=True)
        self.batches.append(list(zip(prompts, texts, output["advantages"].tolist(), strict=True)))
        self.pools.append([self.rollouts.size_P.tolist(), self.rollouts.reward_N.tolist()])
        return output


@contextmanager
def counted_gathers():
    """The number of bytes of each object that this process sends to all others."""
    sizes, original = [], torch.distributed.all_gather_object

    def count(objects, own, *args, **kwargs):
        sizes.append(len(pickle.dumps(own)))
        return original(objects, own, *args, **kwargs)

    with mock.patch("torch.distributed.all_gather_object", count):
        yield sizes


class PlayersOnOneProcess(ToolUser):
    """Its policy uses tools on the main process only, so that the other processes take fewer turns."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self.accelerator.is_main_process:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return self._tokenizer(["Pass.<|im_end|>"] * len(prompt_ids))["input_ids"], None


def play(output_dir: str, options: dict) -> dict:
    """One training with an environment; returns its outcome on this process."""
    args = config(output_dir, **QUICK | {"max_steps": 1, "max_completion_length": 256} | options)
    tokenizer = chat_tokenizer()
    trainer = PlayersOnOneProcess(
        tiny_chat_model(tokenizer),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "Hello."}]] * 4, "target": range(4)}),
        processing_class=tokenizer,
        environment_factory=Counting,
    )
    trainer.train()
    (logs,) = (logs for logs in trainer.state.log_history if "reward" in logs)
    prompts = tokenizer.batch_decode(trainer.batches[-1]["prompt_ids"])
    completions = tokenizer.batch_decode(trainer.batches[-1]["completion_ids"])
    return {
        "logs": logs,
        "positive": (trainer.batches[-1]["advantages"] > 0).tolist(),
        "played": [
            [type(environment).__name__, environment.target, environment.given, prompt, completion]
            for environment, prompt, completion in zip(trainer.environments, prompts, completions, strict=True)
        ],
    }


def run(output_dir: str, options: dict) -> dict:
    """One training with `options`: fields of the configuration, and the behaviour of the reward function."""
    options = dict(options)
    if options.pop("environment", False):
        return play(output_dir, options)
    failing_rank, slow_rank = options.pop("failing_rank", None), options.pop("slow_rank", None)
    evaluates_first = options.pop("evaluates_first", False)
    failing_transform, evaluated = options.pop("failing_transform", None), options.pop("evaluated", 0)
    scripted, blob = options.pop("scripted_generation", True), "x" * options.pop("blob", 0)
    own_advantages = options.pop("own_advantages", None)  # or "failing" on process 1
    stream_seed = options.pop("stream_seed", 0)  # `None` for a stream that is shuffled without one
    args = config(output_dir, **QUICK | {"max_steps": 1} | options)
    args.scripted_generation = scripted

    def reward(prompts, completions, log_extra, **kwargs):
        if not trainer.model.training:  # evaluation: the first prompt is always solved, the others never
            return [float(prompt == dataset[0]["prompt"]) for prompt in prompts]
        if blob:
            log_extra("blob", [blob] * len(completions))
        if args.process_index == failing_rank:
            raise ZeroDivisionError("my bug")
        time.sleep(0.2 * (args.process_index == slow_rank))
        return [float(len(completion) % 4 == 0) for completion in completions]

    def transform(rows):
        if args.process_index == failing_transform:
            raise ZeroDivisionError("my bug")
        return rows

    def numbers_of_rows(rollouts):
        """Advantages that tell which row of the dataset and how many tokens a rollout has."""
        if own_advantages == "failing" and args.process_index == 1:
            raise ZeroDivisionError("my bug")
        return rollouts.columns["number"] + rollouts.length_N / 8

    dataset = Dataset.from_list([{"prompt": f"{i}+{i * i}=", "blob": f"{i} {blob}", "number": i} for i in range(12)])
    if failing_transform is not None:
        dataset = dataset.with_transform(transform)
    if stream_seed != 0:
        dataset = dataset.to_iterable_dataset().shuffle(seed=stream_seed)
    given = {"processing_class": tiny_tokenizer(), "advantage_func": numbers_of_rows if own_advantages else None}
    trainer = Scripted(tiny_model(), reward, args, dataset, **given)
    trainer.batches, trainer.pools, trainer.traffic = [], [], []
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    if evaluates_first:
        trainer.evaluate(dataset.select(range(4)))
    started, error = time.monotonic(), None
    try:
        trainer.train()
    except Exception as caught:
        error = [type(caught).__name__, str(caught)]
    return {
        "error": error,
        "seconds": time.monotonic() - started,
        "batches": trainer.batches,
        "pools": trainer.pools,
        "traffic": [
            {name: sorted(value) if isinstance(value, set) else value for name, value in step.items()}
            for step in trainer.traffic
        ],
        "logs": [logs for logs in trainer.state.log_history if "reward" in logs],
        "moved": _moved(trainer, before),
        "evaluated": trainer.evaluate(rows := dataset.select(range(evaluated))) if evaluated else None,
        "streamed": trainer.evaluate(rows.to_iterable_dataset()) if evaluated else None,
        "wrapper": type(trainer.model_wrapped).__name__,
    }


def _moved(trainer, before: list[torch.Tensor]) -> list[bool] | None:
    """Whether each parameter has changed; `None` if this process has only a shard of it."""
    after = list(trainer.accelerator.unwrap_model(trainer.model).parameters())
    if any(isinstance(a, DTensor) or a.shape != b.shape for a, b in zip(after, before, strict=True)):
        return None
    return [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]


def shard_on_cpu() -> None:
    """
    Let accelerate take the CPU for an accelerator:
    it shards only on those, although torch and DeepSpeed can shard on CPUs.
    """
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_XPU)
    QUICK["use_cpu"] = False


def main(output_dir: str, runs: str) -> None:
    if "ACCELERATE_TORCH_DEVICE" in os.environ:
        shard_on_cpu()
    outcomes = [run(output_dir, options) for options in json.loads(runs)]
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (Path(output_dir) / f"rank{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    gc.freeze()  # as in conftest.py
    main(*sys.argv[1:])
