"""Configuration of the AdaGRPOTrainer."""

import inspect
import math
import os
import sys
import textwrap
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from trl import GRPOConfig

from ..core.advantages import POWERS
from ..core.allocation import check_rule
from .mode import SEQ_MODES, Mode


# Fields whose default depends on other fields. They are derived again when a trainer is built, unless they were set.
DERIVED = (
    *("adaptive_sampling", "num_generations", "num_generations_eval", "samples_per_round", "max_rounds"),
    *("prompt_weighting", "pass_rate_estimator", "vllm_weight_sync_dir"),
)
# Fields of which [`~trl.GRPOTrainer`] keeps the values, and the place of files.
TAKEN_BY_TRL = ("scale_rewards", "epsilon_high", "vllm_weight_sync_dir")
EVALUATED_GENERATIONS = 8  # completions per prompt in an evaluation, at most, where a training step samples one


def described(default: Any, meaning: str, **metadata: Any) -> Any:
    """Field with a description for the command line and the class's docstring; one that is `None` is derived."""
    return field(default=default, metadata={"help": meaning, **metadata})


@dataclass
class AdaGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`AdaGRPOTrainer`].

    This class includes only the parameters that are specific to
    [Reinforce-Ada](https://huggingface.co/papers/2510.04996). For everything else please refer to the
    [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`] documentation. `num_generations`, `scale_rewards` and
    `epsilon_high` have other default values than there, following the paper. A parameter that is `None` gets a value
    that depends on the others when the configuration is constructed, and again when a trainer is built from it.
    """

    # Types are those of a constructed configuration: what is always derived from `None` has a type without it.

    # Parameters whose default values are overridden from GRPOConfig
    num_generations: int = described(
        None,
        "Number of rollouts per prompt that are trained on (n). If `None`, 4 (in GRPOConfig 8), and 1 with "
        "`baseline='batch'` (except in `'est'`).",
    )
    scale_rewards: str = described(
        "none",
        "Divisor of the advantages: `'none'`, `'group'` (standard deviation of the prompt's rewards, GRPOConfig's "
        "default) or `'batch'` (of all rewards of the generation batch; with `baseline='batch'` of all others, and "
        "the result is clipped to ±1.5).",
    )
    epsilon_high: float | None = described(
        0.28,
        "Upper-bound epsilon of the clipped ratio; the lower bound is `epsilon`. In GRPOConfig `None` (equal to "
        "`epsilon`).",
    )

    # Parameters that control the baseline and the number of rollouts
    baseline: Literal["pool", "batch"] = described(
        "pool",
        "Value that is subtracted from the reward: `'pool'` (mean of all rollouts of the prompt in this step, as in "
        "the paper) or `'batch'` (recommended; mean of all other rollouts of the generation batch).",
    )
    retries: int = described(
        0,
        "With `baseline='batch'`: number of later steps in which a prompt without a positive rollout is sampled "
        "again (2 is recommended). Each step samples `num_generations` rollouts of each prompt.",
    )
    adaptive_sampling: Literal["seq-balance", "seq-pos", "est", "uniform"] = described(
        None,
        "Number of rollouts per prompt: `'seq-balance'` or `'seq-pos'` (rounds until the exit condition is met), "
        "`'est'` (more where the estimated pass rate is low) or `'uniform'` (`num_generations`, as in GRPO). If "
        "`None`, `'seq-balance'`, and with `baseline='batch'` `'uniform'`.",
    )

    # Parameters that control rounds (`adaptive_sampling="seq-balance"` and `"seq-pos"`, with `baseline="pool"`)
    samples_per_round: int | None = described(
        None,
        "Number of rollouts per round and active prompt (M in the paper), at least `num_generations`. If `None`, "
        "`num_generations`: the first round is the batch of GRPO. The paper has twice as many.",
    )
    max_rounds: int | None = described(
        None,
        "Maximum number of rounds of a prompt in a step (N in the paper), and with `zero_variance_groups='resample'` "
        "of prompts for one slot. If `None`, 8 in Seq modes, else 4.",
    )
    min_positives: int = described(
        1,
        "Number of positive rollouts of the exit condition (K_pos). In the paper's Seq-balance, half of "
        "`num_generations`.",
    )
    min_negatives: int = described(
        1,
        "Number of negative rollouts of the exit condition (K_neg), for `'seq-balance'` only. In the paper, half of "
        "`num_generations`.",
    )
    positive_threshold: float = described(
        0.7,
        "A rollout is positive if its success reward is strictly greater than this. For continuous rewards, set it "
        "to the value that counts as a success.",
    )
    success_reward: str | None = described(
        None,
        "Name of the reward function whose unweighted value is compared with `positive_threshold`, or `'sum'` for "
        "the weighted sum of all rewards. If `None`, the sum; with several weighted functions, modes that depend on "
        "successes require it. A prompt on which the function returns `None`, while others return a reward, is "
        "neither solved nor unsolved: it is not retried, and needs no further rounds.",
    )

    # Parameters that control allocation (`adaptive_sampling="est"`)
    min_samples: int = described(2, "Minimum number of rollouts per prompt (N_min in the paper), for `'est'`.")
    max_samples: int = described(32, "Maximum number of rollouts per prompt (N_max in the paper), for `'est'`.")
    allocation_rule: str = described(
        "power",
        "Number of rollouts as a function of the estimated pass rate p, for `'est'`: `'power'` (p^-0.5), a number a "
        "(p^-a), `'variance'` (sqrt((1 - p) / p), with `prompt_weighting='none'` and `scale_rewards='group'`) or "
        "`'reward_std'` (sqrt(p * (1 - p))).",
    )
    pass_rate_estimator: Literal["ema", "value"] | None = described(
        None,
        "Source of the pass rates for `'est'`: `'ema'` (discounted success counts of each prompt, the default) or "
        "`'value'` (a value head on the policy's hidden state). In other modes `'ema'` only records them. "
        "Checkpoints have them in `ada_pass_rates.parquet`.",
    )
    # Parameters that control weights and zero-variance groups
    prompt_weighting: str = described(
        None,
        "Factor on the advantages of a prompt with pass rate p: `'inverse_sqrt'` (p^-0.5), `'inverse'` (1/p), "
        "`'none'`, or alpha from 0 to 1 (p^(alpha - 1)). If `None`, `'inverse_sqrt'` in Seq modes and Est, unless "
        "`scale_rewards='group'`, `multi_objective_aggregation='normalize_then_sum'` or `baseline='batch'`.",
    )
    zero_variance_groups: Literal["keep", "mask", "skip", "resample"] = described(
        "keep",
        "Treatment of groups in which all advantages are 0, with `baseline='pool'`: `'keep'` (as in GRPO), `'mask'` "
        "(excluded from the loss), `'skip'` (as `'keep'`, without computing their rows) or `'resample'` (other "
        "prompts are sampled instead: dynamic sampling).",
    )

    # Parameters that control a vLLM server (`use_vllm=True`, `vllm_mode="server"`)
    vllm_weight_sync: Literal["nccl", "lora", "disk"] = described(
        "nccl",
        "Transfer of the weights to a vLLM server: `'nccl'` (as in TRL; the server needs other GPUs), `'lora'` (it "
        "loads the adapter from `vllm_weight_sync_dir`; requires a `peft_config`) or `'disk'` (it reloads all "
        "weights from there).",
    )
    vllm_weight_sync_dir: str = described(
        None,
        "Directory for `vllm_weight_sync='lora'` and `'disk'`, with the same path for trainer and server. If `None`, "
        "`vllm_weight_sync` in `output_dir`. Old versions are deleted.",
    )
    vllm_request_timeout: float = described(
        300.0,
        "Seconds without any response after which a vLLM server is considered stalled and every process raises the "
        "same error; time in its queue does not count. Without `/metrics`, it must be longer than the longest "
        "completion takes.",
    )
    max_staleness: Literal[0, 1] = described(
        0,
        "With 1, a vLLM server generates the next step's rollouts while the current one is trained on; TRL's "
        "importance-sampling correction accounts for the older weights. Only with one sampling round per step. With "
        "0, both alternate.",
    )

    # Names of the fields that were not set, whose values follow from the others. Without an annotation, which would
    # make it a field.
    _derived = frozenset[str]()

    def __post_init__(self):
        unset = [name for name in DERIVED if getattr(self, name) is None]
        self._check_choices()
        self._resolve_sampling()
        # GRPOConfig rejects a single rollout per prompt, for which GRPO's group mean is undefined. The batch baseline
        # does not need a group: everything else is validated with a number of rollouts that GRPOConfig accepts for
        # this batch.
        given = {name: getattr(self, name) for name in ("num_generations", "num_generations_eval")}
        if self.num_generations == 1:
            self.num_generations = self._placeholder_group_size()
            self.num_generations_eval = given["num_generations_eval"] or 1
        super().__post_init__()
        self.__dict__.update(given)
        self._resolve_defaults()
        Mode.of(self)
        self._derived = frozenset(unset)

    def resolve(self) -> Mode:
        """
        Derive and check everything again, because fields may have been set since the construction, as sweeps do. A
        field that was never set, or was set to `None`, is derived from the other fields' present values.

        Returns:
            [`~trainer.mode.Mode`]: of the present values.

        Raises:
            `ValueError`: as the constructor.
        """
        unset = [name for name in DERIVED if name in self._derived or getattr(self, name) is None]
        self.__dict__.update(dict.fromkeys(unset))
        try:
            self._check_choices()
            self._resolve_sampling()
            self._resolve_defaults()
            return Mode.of(self)
        finally:  # also if the present values are invalid, because they may be corrected
            self._derived = frozenset(unset)

    def __setattr__(self, name: str, value: Any) -> None:
        # A field that is set is not derived again, even if it is set to the derived value.
        if name in self._derived:
            self._derived = self._derived - {name}  # another set, because a copy of the configuration shares this one
        super().__setattr__(name, value)

    def _check_choices(self) -> None:
        """Check the value of each option first, because the rules and those of TRL compute with them."""
        # Not assignments, with which a derived option would count as set.
        for name, value in list(vars(self).items()):
            if name in AdaGRPOConfig.__annotations__:
                self.__dict__[name] = read_option(name, value, AdaGRPOConfig.__annotations__[name])
            elif isinstance(value, np.integer):  # num_iterations, num_generations_eval, … of TRL
                self.__dict__[name] = int(value)

    @property
    def place_model_on_device(self) -> bool | None:
        """
        As in [`~transformers.TrainingArguments`]. The constructor of every trainer reads this property: a
        [`~trl.GRPOTrainer`] would ignore these options, and all advantages of single rollouts would be 0. Other
        trainers do not depend on them, such as the one with which a tracker saves the final model.

        Raises:
            `TypeError`: if a [`~trl.GRPOTrainer`] is constructed that is no [`AdaGRPOTrainer`].
        """
        from trl import GRPOTrainer  # now, because importing it takes seconds

        # A trainer does not tell its arguments who it is: the caller is `Trainer.__init__`.
        reader = sys._getframe(1).f_locals.get("self")
        if isinstance(reader, GRPOTrainer) and not hasattr(reader, "compute_advantages"):
            raise TypeError(
                "AdaGRPOConfig needs an AdaGRPOTrainer, got another trainer. Replace GRPOTrainer(…) by "
                "AdaGRPOTrainer(…); it takes the same arguments."
            )
        return super().place_model_on_device

    def _resolve_sampling(self) -> None:
        if self.adaptive_sampling is None:
            self.adaptive_sampling = "uniform" if self.baseline == "batch" else "seq-balance"
        if self.num_generations is None:
            # The advantage of a rollout does not depend on other rollouts of its prompt with the batch baseline.
            self.num_generations = 1 if self.baseline == "batch" and self.adaptive_sampling != "est" else 4

    def _placeholder_group_size(self) -> int:
        """
        A group size of at least 2 that divides the generation batch, for the checks of [`~trl.GRPOConfig`].

        The generation batch is a multiple of each of these numbers, whichever of them are set.
        """
        per_generation = self.steps_per_generation or self.gradient_accumulation_steps
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        for size in (self.generation_batch_size, self.per_device_train_batch_size, per_generation, processes):
            if size is not None and size >= 2:
                return int(size)
        raise ValueError(
            f"num_generations=1 with baseline={self.baseline!r} requires a generation batch of at least 2 rollouts, "
            "got 1: raise per_device_train_batch_size."
        )

    def _resolve_defaults(self) -> None:
        # GRPOConfig takes booleans.
        self.scale_rewards = {"true": "group", "false": "none"}.get(
            str(self.scale_rewards).lower(), self.scale_rewards
        )
        is_sequential = self.adaptive_sampling in SEQ_MODES
        if self.max_rounds is None and (is_sequential or self.zero_variance_groups == "resample"):
            # At most 8 * num_generations rollouts of a prompt in a step, as with the paper's 4 rounds of
            # 2 * num_generations.
            self.max_rounds = 8 if is_sequential else 4
        if self.samples_per_round is None and is_sequential:
            self.samples_per_round = self.num_generations
        if self.prompt_weighting is None:
            is_weighted = self.adaptive_sampling != "uniform" and self.baseline == "pool"
            # The division by the standard deviation of the group is a prompt weight as well.
            is_divided = self.scale_rewards == "group" or self.multi_objective_aggregation == "normalize_then_sum"
            self.prompt_weighting = "inverse_sqrt" if is_weighted and not is_divided else "none"
        self.prompt_weighting = _read_weighting(self.prompt_weighting)
        if self.adaptive_sampling == "est":
            self.allocation_rule = check_rule(self.allocation_rule)  # type: ignore[assignment] # a name or a number
            self.pass_rate_estimator = self.pass_rate_estimator or "ema"
        if self.vllm_weight_sync_dir is None:
            self.vllm_weight_sync_dir = os.path.join(self.output_dir, "vllm_weight_sync")
        if self.num_generations_eval is None and self.num_generations == 1:
            rows = self.per_device_eval_batch_size * self.world_size
            self.num_generations_eval = next(n for n in range(EVALUATED_GENERATIONS, 0, -1) if rows % n == 0)

    def is_set(self, name: str) -> bool:
        """Whether the value of a field was given, and not derived from the other fields."""
        return name not in self._derived

    def own_options(self) -> dict[str, Any]:
        """Options that TRL does not know, and `num_generations`; not the directory, which follows `output_dir`."""
        return {name: getattr(self, name) for name in AdaGRPOConfig.__annotations__ if name not in TAKEN_BY_TRL}

    @property
    def prompts_per_step(self) -> int:
        """Prompts in the batch that is generated at once, of all processes."""
        return self.generation_batch_size // self.num_generations


def read_option(name: str, value: Any, hint: Any) -> Any:
    """
    Return the value of an option as the type of its annotation: a sweep passes numbers of NumPy, a table 4.0 for 4.

    Raises:
        `ValueError`: If it is not a number of that type, or not one of the choices of a `Literal`. The values of a
            `str` that is not a `Literal` are checked by rules, because numbers and booleans may be among them.
    """
    if getattr(value, "ndim", None) == 0:  # a scalar of NumPy, or a tensor without dimensions
        value = value.item()
    # The parts of `Literal[...]`, `Literal[...] | None`, `int | None` and `int`.
    parts = [part for kind in get_args(hint) or [hint] for part in get_args(kind) or [kind]]
    choices = [part for part in parts if isinstance(part, str | int)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)  # `no` in YAML does not mean 0
    if value is None and (name in DERIVED or {str, type(None)} & {*parts}):
        return None
    if str in parts:
        is_flag = name == "scale_rewards" and isinstance(value, bool)  # as in TRL
        is_valid, allowed = is_number or is_flag or isinstance(value, str | os.PathLike), "a name or a number"
    elif choices:
        is_valid, allowed = (
            isinstance(value, str | int | float) and value in choices,
            f"one of {', '.join(map(repr, choices))}",
        )
    elif int in parts:
        is_valid, allowed = is_number and value % 1 == 0, "an integer"
    else:
        is_valid, allowed = is_number, "a number"
    if not is_valid:
        raise ValueError(f"{name} ({value!r}) must be {allowed}. Leave it unset for the default.")
    return int(value) if int in parts else value


def _read_weighting(weighting: Any) -> Any:
    """
    Return a name of `prompt_weighting` as it is, and a number, which a command line passes as a string, as a float.

    Raises:
        `ValueError`: If it is neither a name nor a number from 0 to 1.
    """
    if weighting in POWERS:
        return weighting
    try:
        alpha = float(weighting)
    except (TypeError, ValueError):
        alpha = math.nan
    if not 0 <= alpha <= 1:
        raise ValueError(
            f"prompt_weighting ({weighting!r}) must be one of 'inverse_sqrt', 'inverse', 'none', or a number alpha "
            "from 0 to 1 for the weight p^(alpha - 1)."
        )
    return alpha


def _parameters() -> str:
    """The docstring's list of the parameters that this class adds or changes, from their descriptions."""
    entries = []
    for name in AdaGRPOConfig.__annotations__:
        parameter = AdaGRPOConfig.__dataclass_fields__[name]
        kind = getattr(parameter.type, "__name__", parameter.type)
        meaning = textwrap.indent(textwrap.fill(parameter.metadata["help"], 110, break_long_words=False), " " * 8)
        entries.append(f"    {name} (`{kind}`, *optional*, defaults to `{parameter.default!r}`):\n{meaning}")
    return "\n".join(["Parameters:", *entries])


AdaGRPOConfig.__doc__ = f"{inspect.cleandoc(AdaGRPOConfig.__doc__ or '')}\n\n{_parameters()}\n"
