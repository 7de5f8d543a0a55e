"""Prompts from a stream of the data set, for the modes in which a step asks other ones than the loader's next."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..core import Pool, Rollout, prompt_weight
from ..sampling.lanes import Candidate, Lane
from ..sampling.queue import Beliefs, PromptQueue, Schedule
from ..sampling.stream import PromptStream
from ..utils.files import atomic_write
from ..utils.notices import get_logger
from .replay import select_groups
from .with_engine import WithEngine


logger = get_logger(__name__)

STATE_FILE = "ada_state.json"  # what is small: the queue of prompts, the scale of rewards


@dataclass
class Asked:
    """
    The prompts that the lanes of a step have asked; one entry each, lane by lane.

    Args:
        pools (`list[Pool]`):
            What each has drawn in this step.
        groups (`list[list[Rollout]]`):
            What is trained on; nothing of a prompt that was replaced.
        indices (`list[int]`):
            Its position among the candidates of all lanes.
        representative (`list[bool]`):
            Whether it stands for the data set: asked for the first time, in the data's order, and not in the place of
            another one.
    """

    pools: list[Pool]
    groups: list[list[Rollout]]
    indices: list[int]
    representative: list[bool]


class FromStream(WithEngine):
    """
    Takes the prompts of a step from a [`PromptQueue`]. The parent's loader only counts steps then: it has as many as for
    [`~trl.GRPOTrainer`], and reads no data.
    """

    _queue: PromptQueue | None = None
    _estimated: list[int] = []  # positions of the prompts that were estimated to be chosen from, in this step

    def _build_queue(self) -> None:
        args = self.args
        stream = PromptStream(self.train_dataset, shuffle=self.shuffle_dataset, seed=args.seed)
        schedule = Schedule(
            lanes=self._prompts_per_step,
            candidates_per_lane=args.max_rounds if args.unresolved == "replace" else 1,
            exit_condition=args.exit_condition,
            max_rounds=args.max_rounds if args.samples_in_rounds else 1,
            fixed_budget=args.has_fixed_budget,
            positive_threshold=args.positive_threshold,
            choices_per_prompt=args.prompt_candidates,
        )
        self._queue = PromptQueue(stream, schedule)

    @property
    def _prompts_per_step(self) -> int:
        return self.args.generation_batch_size // self.args.num_generations

    def get_train_dataloader(self):
        if self._queue is None:
            return super().get_train_dataloader()
        if isinstance(self.train_dataset, IterableDataset):
            micro_steps = self.args.max_steps * self.args.gradient_accumulation_steps
            rows = self._prompts_per_step * -(-micro_steps // (self.args.steps_per_generation * self.num_iterations))
        else:
            rows = len(self.train_dataset)
        with self._having(train_dataset=Dataset.from_dict({"prompt": [""] * rows})):
            return super().get_train_dataloader()

    # A step

    def _open_lanes(self) -> list[list[Candidate]]:
        self._estimated = []
        return self._queue.open(self._beliefs if self.args.prompt_candidates > 1 else None)

    def _keep_candidates(self, lanes: Sequence[Sequence[Candidate]]) -> bool:
        """Whether all prompts that may be asked have been estimated when they were chosen: then only those are kept."""
        index = {position: i for i, position in enumerate(self._estimated)}
        asked = [candidate.position for candidates in lanes for candidate in candidates]
        if not index.keys() >= set(asked):
            return False
        self.pass_rates.keep([index[position] for position in asked])
        return True

    def _beliefs(self, positions: list[int]) -> Beliefs:
        """What is expected of the rows at `positions`. Collective."""
        self._estimated = list(positions)
        share = -(-len(positions) // self.accelerator.num_processes)
        start = self.accelerator.process_index * share
        self._identify([self._queue.stream.row(position) for position in positions[start : start + share]])
        self._predict()
        rates, weighting = self.pass_rates.shared_estimates(), self.args.prompt_weighting
        gains = [prompt_weight(p, self.args.max_samples, weighting) * p * (1 - p) for p in rates]
        known = self.pass_rates.predicts
        return Beliefs(self.pass_rates.visit.keys, gains if known else None, sum(rates) / len(rates))

    def _own_candidates(self, lanes: Sequence[Sequence[Candidate]]) -> tuple[list[dict], list[int]]:
        """The data set rows of this process's candidates, and by candidate of all processes, whose it is."""
        by_lane = self._owners_of_lanes()
        owners = [owner for owner, candidates in zip(by_lane, lanes, strict=True) for _ in candidates]
        mine = [
            candidate.position
            for owner, candidates in zip(by_lane, lanes, strict=True)
            if owner == self.accelerator.process_index
            for candidate in candidates
        ]
        return [self._queue.stream.row(position) for position in mine], owners

    def _owners_of_lanes(self) -> list[int]:
        number = self._queue.schedule.lanes
        return [lane * self.accelerator.num_processes // number for lane in range(number)]

    def _asked(self, lanes: Sequence[Lane], seed: tuple[int, ...]) -> Asked:
        before = 0
        asked = Asked([], [], [], [])
        for number, lane in enumerate(lanes):
            pools = [lane.pools[i] for i in lane.asked]
            groups = select_groups(pools, self.args, (*seed, number))
            asked.pools += pools
            asked.groups += [[] for _ in groups[:-1]] + groups[-1:]  # the last one that was asked is trained on
            asked.indices += [before + i for i in lane.asked]
            candidates = [lane.candidates[i] for i in lane.asked]
            asked.representative += [
                candidate.in_order and not candidate.rounds and not i for i, candidate in enumerate(candidates)
            ]
            before += len(lane.candidates)
        return asked

    def _close_lanes(self, lanes: Sequence[Lane]) -> dict[str, float]:
        asked = [(lane, i) for lane in lanes for i in lane.asked]
        metrics = {"stream/asked": float(len(asked))} | self._queue.close(lanes)
        if self.args.has_fixed_budget:  # with what earlier steps have drawn
            metrics["resolved"] = sum(lane.resolved(i) for lane, i in asked) / len(asked)
        return metrics

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._queue.withdraw()
        super()._drop_ahead()

    # Checkpoints

    def _small_state(self) -> dict[str, Any]:
        """What is saved beside the record of the prompts."""
        if self._queue is None:
            return {}
        # A generation that is still being trained on is made again after a resume, and so is one that is asked ahead.
        under_way = self._step % (self.args.steps_per_generation * self.num_iterations) > 0
        return {"queue": self._queue.state_dict(steps_back=under_way + (self._ahead is not None))}

    def _load_small_state(self, state: dict[str, Any]) -> None:
        if self._queue is not None and "queue" in state:
            self._build_queue()
            self._queue.load_state_dict(state["queue"])

    def _save_state(self, trial) -> None:
        state = self._small_state()
        if not state or not self.args.should_save:
            return
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with atomic_write(os.path.join(self._get_output_dir(trial=trial), name, STATE_FILE)) as temporary:
            temporary.write_text(json.dumps(state))

    def _load_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._small_state():
            return
        path = os.path.join(checkpoint, STATE_FILE)
        try:
            with open(path) as file:
                state = json.load(file)
        except FileNotFoundError:
            logger.warning(
                f"{path} does not exist, so the data set is asked from its start again. That is right for a checkpoint of a "
                "run that took its prompts from the loader; otherwise restore the file."
            )
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON ({error}). Restore it, or delete it to start anew.") from error
        else:
            self._load_small_state(state)
