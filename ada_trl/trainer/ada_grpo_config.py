"""Configuration of the AdaGRPOTrainer."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from trl import GRPOConfig

from ..core import ExitCondition
from ..sampling.strategies import SamplingStrategy, build_strategy, strategy_class
from .config_validation import (
    CHOICES,
    check_config,
    check_types,
    placeholder_group_size,
    resolve_defaults,
    resolve_sampling,
)


def optional_field(**metadata: Any) -> Any:
    """Field that is never `None` after `__post_init__`, which derives its default from other fields."""
    return field(default=None, metadata=metadata)


@dataclass
class AdaGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`AdaGRPOTrainer`].

    This class includes only the parameters that are specific to
    [Reinforce-Ada](https://huggingface.co/papers/2510.04996). For everything else please refer to the
    [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`] documentation. Note that default values in this class
    may differ from those in [`~trl.GRPOConfig`].

    Parameters:
        > Parameters that control sampling

        adaptive_sampling (`str`, *optional*):
            Number of rollouts per prompt. If `None`, `"seq-balance"` with `baseline="pool"` and `"uniform"` with
            `baseline="batch"` or `"posterior"`. Possible values are:

                - `"seq-balance"`: rounds of `samples_per_round` rollouts until the prompt has `min_positives` positive
                  and `min_negatives` negative rollouts.
                - `"seq-pos"`: rounds until the prompt has `min_positives` positive rollouts.
                - `"est"`: one round in which prompts with a lower estimated pass rate get more rollouts. The total is
                  the same as in GRPO. `pass_rate_estimator` selects the estimator.
                - `"uniform"`: exactly `num_generations` rollouts per prompt. With `baseline="pool"` and the defaults of
                  `prompt_weighting`, `zero_variance_groups`, `prompt_oversampling` and `max_staleness` it trains the same
                  weights as [`~trl.GRPOTrainer`] with the same options, bit for bit; `positive_threshold` and
                  `success_reward` then affect metrics only.

        samples_per_round (`int`, *optional*):
            Number of rollouts per round and active prompt (M in the paper), at least `num_generations`. If `None`,
            `2 * num_generations`, the ratio of the paper. With `baseline="posterior"` or
            `"batch"` it must equal `num_generations`.
        max_rounds (`int`, *optional*, defaults to `4`):
            Maximum number of rounds per prompt (N in the paper). A prompt never gets more than
            `samples_per_round * max_rounds` rollouts. With `zero_variance_groups="resample"`, also the maximum number
            of prompts that are sampled one after another for one slot of the batch. With `baseline="posterior"` or
            `"batch"` a prompt gets one round per step, and prompts that do not meet their exit condition are sampled
            again in later steps, up to `max_rounds` times.
        min_positives (`int`, *optional*):
            Number of positive rollouts of the exit condition (K_pos). If `None`, 1 for `"seq-pos"` and
            `num_generations // 2` for `"seq-balance"`; with `baseline="posterior"` or `"batch"` 1 for both.
        min_negatives (`int`, *optional*):
            Number of negative rollouts of the exit condition (K_neg), for `"seq-balance"` only. If `None`,
            `num_generations - num_generations // 2`; with `baseline="posterior"` or `"batch"` 1.
        positive_threshold (`float`, *optional*, defaults to `0.7`):
            A rollout is positive if its success reward is strictly greater than this. For continuous rewards, set it to
            the value that counts as a success, or to about the mean that is logged as `ada/success_reward/mean`.
        success_reward (`str`, *optional*):
            Name of the reward function whose unweighted value is compared with `positive_threshold`, so that shaping
            terms do not affect the exit conditions. If `None`, the weighted sum of all rewards.

        > Parameters that control prompt selection

        prompt_oversampling (`int`, *optional*, defaults to `1`):
            Number of candidate prompts for each slot of the batch. Of the candidates, the prompts with the highest
            w(p̂) · p̂(1 − p̂), to which the expected gradient is proportional, are sampled (w: prompt weight). A quarter of the
            new prompts is taken in the order of the dataset, and a prompt that has been skipped 8 times is sampled when it is a candidate again. With 1, all prompts are sampled in
            the order of the dataset. Selection starts once the pass-rate estimates (see `pass_rate_estimator`) are
            better than the batch mean.

        > Parameters that control rollout allocation in `"est"` (`num_generations` per prompt on average)

        min_samples (`int`, *optional*, defaults to `2`):
            Minimum number of rollouts per prompt (N_min in the paper), for `"est"`.
        max_samples (`int`, *optional*, defaults to `32`):
            Maximum number of rollouts per prompt (N_max in the paper), for `"est"`.
        allocation_rule (`str` or `float`, *optional*, defaults to `"power"`):
            Number of rollouts N_x as a function of the estimated pass rate, for `"est"`. `"power"`: N_x ∝
            (p̂ + ε)^(−1/2). A number a: N_x ∝ (p̂ + ε)^(−a); 0 is uniform. `"variance"`: N_x ∝
            √((1 − p̂ + ε) / (p̂ + ε)), which minimizes the gradient variance of the log objective at a fixed total
            (appendix B of the paper); use it with `prompt_weighting="none"` and `scale_rewards="group"`, because only
            then the update is the gradient of the log objective. `"reward_std"`: N_x ∝ √((p̂ + ε)(1 − p̂ + ε)), highest
            at a pass rate of 0.5. ε is 0.01.

        > Parameters that control pass-rate estimation

        pass_rate_estimator (`str`, *optional*):
            Source of the pass-rate estimates that `"est"`, `baseline="posterior"` and `prompt_oversampling` use.
            Possible values are:

                - `"ema"`: exponentially discounted success counts per prompt, with a Beta prior.
                - `"value"`: a small value head on the policy's hidden state at the last prompt token, trained during the
                  run, or a `value_model`. It also predicts prompts that have not been sampled yet.
                - `"ema+value"`: the success counts, with the prediction of the value head as the mean of the prior. Its
                  pseudo-count is fitted during the run.

            If `None`, `"ema+value"` in modes that use the estimates (`"ema"` in `"est"` and with `prompt_oversampling`
            if there are environments or images). In all other modes nothing is estimated unless `"ema"` is set, which
            records the pass rate of every prompt. The estimates are saved in each checkpoint as
            `ada_pass_rates.parquet`.
        ema_decay (`float`, *optional*, defaults to `0.9`):
            Factor (λ) on the earlier counts of a prompt each time it is sampled, above 0 and at most 1 (no
            discounting).
        pass_rate_prior (`list[float]`, *optional*):
            α and β of a fixed Beta prior, as pseudo-counts of positives and negatives. If `None`, the prior is fitted
            to recent data of the run (empirical Bayes) once about 32 prompts have been sampled. Until then, and always
            with fewer than 4 prompts per step, it is `[1.0, 16.0]` as in the paper.
        value_model (`str`, *optional*):
            Sequence-classification model (name or local path) that estimates pass rates instead of the value head on
            the policy's hidden state. It is trained during the run with a learning rate of 1e-5, reads prompts with its
            own tokenizer (and its chat template, if it has one), and every rank holds a full copy in float32 with the
            state of AdamW. Its state is saved in checkpoints.

        > Parameters that control advantages

        baseline (`str`, *optional*, defaults to `"pool"`):
            Value that is subtracted from the reward. Possible values are:

                - `"pool"`: the mean reward of all rollouts of the prompt in this step, as in the paper. Groups with zero
                  reward variance have no gradient.
                - `"batch"`: the mean reward of all other rollouts of the generation batch (leave-one-out). Needs no
                  estimates, and `num_generations` may be 1. All rollouts are trained on.
                - `"posterior"`: the predicted mean reward of the prompt (see `pass_rate_estimator`), combined by
                  pseudo-counts with the other rollouts of the prompt and the mean of the batch (empirical Bayes).
                  `num_generations` may be 1. All rollouts are trained on.
        prompt_weighting (`str` or `float`, *optional*):
            Factor on the advantages of a prompt with pass rate p̂: `"inverse_sqrt"` (p̂^(−1/2)), `"inverse"` (1/p̂),
            `"none"` (1), or a number α from 0 to 1 for p̂^(α−1), the weight of the objective E[p^α / α]; the three names
            correspond to α = 0.5, 0 and 1. p̂ is the pass rate of the pool, at least one over its number of rollouts; with
            `baseline="posterior"` it is the estimate from before sampling, at least 1/32. If `None`, `"inverse_sqrt"` in
            `"est"`, and in Seq modes with `baseline="pool"`; `"none"` otherwise.
        selection_correction (`bool`, *optional*, defaults to `False`):
            Whether to weight the selected positives and negatives by their share of the pool (importance correction),
            so that the balanced selection does not change the weight of the prompt; for modes that select a group (Seq
            modes with `baseline="pool"`). With `False`, as in the paper, the balanced selection gives the expected
            gradient of hard and easy prompts an additional weight: with the default prompt weight and pools of at most 32
            rollouts, 4.8 at p = 0.02, 3.9 at 0.1, 1 at 0.5 and 4.0 at 0.9. With the correction, a factor between 0.7 and 1.3
            remains (early stopping and the cap).
        zero_variance_groups (`str`, *optional*, defaults to `"keep"`):
            Treatment of groups in which all advantages are 0, with `baseline="pool"`. `"keep"`: they stay in the batch,
            as in GRPO, and count in the denominator of the loss. `"mask"`: they are excluded from the loss and its
            denominator, for every `loss_type` (a KL term is not rescaled if the mean is over rows; with `"bnpo"`, the mean over
            micro-batches and processes, those whose rows are all masked count as 0). `"skip"`: the same update
            as with `"keep"`, up to rounding, but no forward and backward pass over these rows (not with images; requires
            `beta=0`, no entropy bonus and `top_entropy_quantile=1`; `entropy` and `clip_ratio/*` then describe the other rows). `"resample"`: other
            prompts are sampled for these slots, up to `max_rounds - 1` times; with `"uniform"` sampling this is the
            dynamic sampling of [DAPO](https://huggingface.co/papers/2503.14476).

        > Parameters that control a vLLM server (`use_vllm=True`, `vllm_mode="server"`)

        vllm_weight_sync (`str`, *optional*, defaults to `"nccl"`):
            Method that sends the weights to the server. Possible values are:

                - `"nccl"`: an NCCL group, as in TRL. The server needs other GPUs than the trainer.
                - `"lora"`: the server loads the adapter from `vllm_weight_sync_dir`. Requires a `peft_config`. Trainer
                  and server may share a GPU or run without one.
                - `"disk"`: the server reloads all weights from `vllm_weight_sync_dir`, a directory that trainer and
                  server share.
        vllm_weight_sync_dir (`str`, *optional*):
            Directory for `"lora"` and `"disk"`, with the same path for trainer and server. If `None`,
            `vllm_weight_sync` in `output_dir`. Old versions are deleted.
        vllm_request_timeout (`float`, *optional*, defaults to `300.0`):
            Seconds without any response to any rollout request after which the server is considered stalled and every
            rank raises the same error. It must be longer than the longest completion takes; time in the server's queue
            does not count. For other requests (weights, checks) it is the deadline.
        max_staleness (`int`, *optional*, defaults to `0`):
            0 or 1. With 1, a vLLM server generates the rollouts of the next step while the current step is trained on.
            They come from the weights before the update; TRL's importance-sampling correction accounts for this. Only
            for modes with one sampling round per step.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`], following the paper:
    > - `num_generations`: Defaults to `4` instead of `8`, and to `1` with `baseline="posterior"` or `"batch"` and
    >   `"uniform"` sampling.
    > - `scale_rewards`: Defaults to `"none"` instead of `"group"`. `"group"` divides by the standard deviation of all
    >   rewards of the prompt in this step, `"batch"` by that of all pools; with `baseline="posterior"` or `"batch"`,
    >   `"batch"` divides by a running standard deviation of earlier generation batches.
    > - `epsilon_high`: Defaults to `0.28` instead of `None`.
    """

    # Parameters whose default values are overridden from GRPOConfig
    num_generations: int = optional_field(
        help="Number of rollouts per prompt that are trained on (n). If `None`, 4, and 1 with `baseline='posterior'` or "
        "`'batch'` and `adaptive_sampling='uniform'`."
    )
    scale_rewards: str = field(
        default="none",
        metadata={
            "help": "Divisor of the advantages: `'none'`, `'group'` (standard deviation of all rewards of the prompt in "
            "this step) or `'batch'` (of all pools; a running one of earlier generation batches with `baseline='posterior'` or "
            "`'batch'`)."
        },
    )
    epsilon_high: float | None = field(
        default=0.28,
        metadata={"help": "Upper-bound epsilon of the clipped ratio; the lower bound is `epsilon`."},
    )

    # Parameters that control sampling
    adaptive_sampling: str = optional_field(
        help="Number of rollouts per prompt: `'seq-balance'` (rounds until a prompt has both positives and negatives), "
        "`'seq-pos'` (rounds until it has positives), `'est'` (one round, more rollouts for prompts with a lower estimated "
        "pass rate) or `'uniform'` (`num_generations`, as in GRPO). If `None`, `'seq-balance'` with `baseline='pool'`, "
        "else `'uniform'`.",
        choices=list(CHOICES["adaptive_sampling"]),
    )
    samples_per_round: int = optional_field(
        help="Number of rollouts per round and active prompt (M), at least `num_generations`. If `None`, twice "
        "`num_generations`; with `baseline='posterior'` or `'batch'`, `num_generations`."
    )
    max_rounds: int = field(
        default=4,
        metadata={
            "help": "Maximum number of rounds per prompt (N). With `zero_variance_groups='resample'`, also of prompts per "
            "batch slot. With `baseline='posterior'` or `'batch'`, a prompt is sampled in up to so many steps."
        },
    )
    min_positives: int | None = field(
        default=None,
        metadata={
            "help": "Number of positive rollouts of the exit condition. If `None`, 1 for `'seq-pos'` and "
            "`num_generations // 2` for `'seq-balance'`; with `baseline='posterior'` or `'batch'`, 1."
        },
    )
    min_negatives: int | None = field(
        default=None,
        metadata={
            "help": "Number of negative rollouts of the exit condition, for `'seq-balance'` only. If `None`, "
            "`num_generations - num_generations // 2`; with `baseline='posterior'` or `'batch'`, 1."
        },
    )
    positive_threshold: float = field(
        default=0.7,
        metadata={"help": "A rollout is positive if its success reward is strictly greater than this."},
    )
    success_reward: str | None = field(
        default=None,
        metadata={
            "help": "Name of the reward function whose unweighted value is compared with `positive_threshold`. If `None`, "
            "the weighted sum of all rewards."
        },
    )

    # Parameters that control prompt selection
    prompt_oversampling: int = field(
        default=1,
        metadata={
            "help": "Number of candidate prompts per batch slot; those with the highest expected gradient are sampled. "
            "1 samples all prompts in the order of the dataset."
        },
    )

    # Parameters that control rollout allocation in "est"
    min_samples: int = field(default=2, metadata={"help": "Minimum number of rollouts per prompt, for `'est'`."})
    max_samples: int = field(default=32, metadata={"help": "Maximum number of rollouts per prompt, for `'est'`."})
    allocation_rule: str = field(
        default="power",
        metadata={
            "help": "Number of rollouts as a function of the estimated pass rate p, for `'est'`: `'power'` (p^-0.5), a "
            "number a (p^-a), `'variance'` (sqrt((1 - p) / p)) or `'reward_std'` (sqrt(p * (1 - p)))."
        },
    )

    # Parameters that control pass-rate estimation
    pass_rate_estimator: str | None = field(
        default=None,
        metadata={
            "help": "Source of the pass-rate estimates: `'ema'` (discounted success counts per prompt), `'value'` (a "
            "value head on the policy, or a `value_model`) or `'ema+value'` (the counts, with the value head as prior). "
            "If `None`, `'ema+value'` in modes that use estimates. In other modes `'ema'` only records pass rates.",
            "choices": list(CHOICES["pass_rate_estimator"]),
        },
    )
    ema_decay: float = field(
        default=0.9,
        metadata={"help": "Factor on the earlier counts of a prompt each time it is sampled, above 0 and at most 1."},
    )
    pass_rate_prior: list[float] | None = field(
        default=None,
        metadata={
            "help": "Alpha and beta of a fixed Beta prior of the pass rates (the paper: 1 16). If `None`, fitted to recent "
            "data of the run."
        },
    )
    value_model: str | None = field(
        default=None,
        metadata={
            "help": "Sequence-classification model (name or path) that estimates pass rates instead of the value head on "
            "the policy's hidden state."
        },
    )

    # Parameters that control advantages
    baseline: str = field(
        default="pool",
        metadata={
            "help": "Value that is subtracted from the reward: `'pool'` (mean of the prompt's rollouts, as in the paper), "
            "`'batch'` (recommended; leave-one-out mean of all rollouts of the generation batch) or `'posterior'` "
            "(empirical-Bayes estimate of the prompt's mean reward).",
            "choices": list(CHOICES["baseline"]),
        },
    )
    prompt_weighting: str = optional_field(
        help="Factor on the advantages of a prompt: `'inverse_sqrt'` (pass rate^-0.5), `'inverse'` (1 / pass rate), "
        "`'none'`, or a number alpha from 0 to 1 (pass rate^(alpha - 1)). If `None`, `'inverse_sqrt'`, and `'none'` "
        "with `adaptive_sampling='uniform'` or in Seq modes with another baseline than `'pool'`."
    )
    selection_correction: bool = field(
        default=False,
        metadata={
            "help": "Importance correction of the advantages for the balanced selection of the group; `False` as in the paper."
        },
    )
    zero_variance_groups: str = field(
        default="keep",
        metadata={
            "help": "Treatment of groups in which all advantages are 0: `'keep'` (as in GRPO), `'mask'` (excluded from the "
            "loss and its denominator), `'skip'` (as `'keep'`, without computing their rows) or `'resample'` (other prompts are sampled instead, as in "
            "DAPO's dynamic sampling).",
            "choices": list(CHOICES["zero_variance_groups"]),
        },
    )

    # Parameters that control a vLLM server
    vllm_weight_sync: str = field(
        default="nccl",
        metadata={
            "help": "Method that sends the weights to a vLLM server: `'nccl'` (as in TRL), `'lora'` (the server loads the "
            "adapter) or `'disk'` (the server reloads from a shared directory).",
            "choices": list(CHOICES["vllm_weight_sync"]),
        },
    )
    vllm_weight_sync_dir: str = optional_field(
        help="Directory for `vllm_weight_sync='lora'` and `'disk'`, with the same path for trainer and server. "
        "If `None`, `vllm_weight_sync` in `output_dir`."
    )
    vllm_request_timeout: float = field(
        default=300.0,
        metadata={
            "help": "Seconds without any response to any rollout request after which a vLLM server is considered stalled."
        },
    )
    max_staleness: int = field(
        default=0,
        metadata={
            "help": "With 1, a vLLM server generates the rollouts of the next step, from the weights before the update, "
            "while the current step is trained on. With 0, generation and training alternate."
        },
    )

    def __post_init__(self):
        check_types(self, AdaGRPOConfig.__annotations__)
        self.group_size_is_explicit = self.num_generations is not None
        resolve_sampling(self)
        # GRPOConfig rejects a single rollout per prompt, for which GRPO's group mean is undefined. Other baselines do not
        # need a group: everything else is validated with a number of rollouts that GRPOConfig accepts for this batch.
        given = {name: getattr(self, name) for name in ("num_generations", "num_generations_eval")}
        if self.num_generations == 1:
            self.num_generations = placeholder_group_size(self)
            self.num_generations_eval = given["num_generations_eval"] or 1
        super().__post_init__()
        self.__dict__.update(given)
        resolve_defaults(self)
        check_config(self)

    # False where `pass_rate_estimator` and `num_generations` were left unset
    estimator_is_explicit = group_size_is_explicit = True

    @property
    def _strategy_class(self) -> type[SamplingStrategy]:
        return strategy_class(self.adaptive_sampling, self.baseline)

    @property
    def sampling_strategy(self) -> SamplingStrategy:
        """How many rollouts a prompt gets, and which of them are trained on."""
        return build_strategy(self)

    @property
    def exit_condition(self) -> ExitCondition:
        """When sampling of a prompt stops. In modes with one round: one success and one failure (for metrics only)."""
        return self.sampling_strategy.exit_condition

    @property
    def float32_threshold(self) -> float:
        """`positive_threshold` as TRL represents rewards, in float32: a reward that is equal to it is not above it."""
        return float(np.float32(self.positive_threshold))

    @property
    def prompts_per_step(self) -> int:
        """Prompts in the batch that is generated at once, of all processes."""
        return self.generation_batch_size // self.num_generations

    @property
    def is_vanilla_grpo(self) -> bool:
        """Whether training equals [`~trl.GRPOTrainer`], and only the logged metrics differ."""
        is_uniform = self.adaptive_sampling == "uniform" and self.prompt_weighting in ("none", 1.0)
        return is_uniform and self.baseline == "pool" and not self.uses_prompt_queue

    @property
    def is_multi_round(self) -> bool:
        """Whether a step samples in several rounds, and selects the rollouts to train on from all of them."""
        return self.max_rounds_per_slot > 1 or self.selects_groups

    @property
    def selects_groups(self) -> bool:
        """Whether a group is selected from a larger pool (Seq modes with `baseline="pool"`)."""
        return self._strategy_class.is_sequential and not self._strategy_class.retries_across_steps

    @property
    def resamples_prompts(self) -> bool:
        """Whether a step samples other prompts than the next ones of the dataset."""
        retries = self._strategy_class.retries_across_steps
        return retries or self.zero_variance_groups == "resample" or self.prompt_oversampling > 1

    @property
    def uses_prompt_queue(self) -> bool:
        """Whether prompts come from the prompt queue: a step samples other ones than the data loader's next, or needs them earlier."""
        return self.resamples_prompts or self.max_staleness > 0

    @property
    def max_rounds_per_slot(self) -> int:
        """Maximum number of rounds of a batch slot in one step: those of a prompt, times the prompts that are sampled for the slot."""
        of_prompt = self.max_rounds if self.selects_groups else 1
        prompts_per_slot = self.max_rounds if self.zero_variance_groups == "resample" else 1
        return of_prompt * prompts_per_slot

    @property
    def needs_pass_rate_estimates(self) -> bool:
        """Whether sampling or the baseline uses predicted pass rates or mean rewards."""
        budgets = self._strategy_class.uses_estimated_budgets
        return budgets or self.baseline == "posterior" or self.prompt_oversampling > 1

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether [`~trl.GRPOTrainer`] makes a forward pass over the completions before they are trained on."""
        misaligned = self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) != 0
        return misaligned or (self.use_vllm and self.vllm_importance_sampling_correction)

    @property
    def reuses_hidden_states(self) -> bool:
        """
        Whether the policy's hidden states of the prompts come from forward passes that are made anyway: the prefill of
        a generation, or the pass over completions that gives their log-probabilities. Budgets must be known earlier.
        """
        prefilled = not self.use_vllm and not self.use_transformers_continuous_batching
        needed_before = self._strategy_class.uses_estimated_budgets or self.prompt_oversampling > 1
        return (prefilled or self.recomputes_logprobs) and not needed_before

    @property
    def tracks_pass_rates(self) -> bool:
        """Whether per-prompt pass rates are recorded."""
        return self.pass_rate_estimator is not None

    @property
    def depends_on_pass_rates(self) -> bool:
        """Whether budgets, the choice of prompts or prompt weights use pass rates estimated before sampling."""
        weighted = self.baseline == "posterior" and self.prompt_weighting != "none"
        return self._strategy_class.uses_estimated_budgets or self.prompt_oversampling > 1 or weighted

    @property
    def uses_value_network(self) -> bool:
        """Whether a value head or a `value_model` takes part in the estimates."""
        return self.pass_rate_estimator in ("value", "ema+value")
