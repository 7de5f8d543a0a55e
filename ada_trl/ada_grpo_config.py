"""Configuration of the AdaGRPOTrainer."""

import os
from dataclasses import dataclass, field

from trl import GRPOConfig

from .core import ExitCondition


_CHOICES = {
    "adaptive_sampling": ("seq-balance", "seq-pos", "uniform"),
    "prompt_weighting": ("inverse_sqrt", "inverse", "none"),
    "unresolved": ("keep", "mask"),
    "vllm_weight_sync": ("nccl", "lora", "disk"),
}


@dataclass
class AdaGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`AdaGRPOTrainer`].

    This class includes only the parameters that are specific to
    [Reinforce-Ada](https://huggingface.co/papers/2510.04996). For everything else please refer to the
    [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`] documentation. Note that default values in this class
    may differ from those in [`~trl.GRPOConfig`].

    Parameters:
        > Parameters that control the sampling

        adaptive_sampling (`str`, *optional*, defaults to `"seq-balance"`):
            Which rollouts to draw. Possible values are:

                - `"seq-balance"`: rounds of `samples_per_round` rollouts until a prompt has `min_positives` positives
                  and `min_negatives` negatives.
                - `"seq-pos"`: rounds until a prompt has `min_positives` positives.
                - `"uniform"`: exactly `num_generations` per prompt and GRPO's advantages: the same weights as
                  [`~trl.GRPOTrainer`], bit for bit. None of the parameters below changes anything then, except that
                  `positive_threshold` and `exit_reward` are used for the `ada/` metrics.

        samples_per_round (`int`, *optional*):
            M, the rollouts drawn in each round for every prompt that is still active. At least `num_generations`. If
            `None`, twice `num_generations`, the paper's ratio.
        max_rounds (`int`, *optional*, defaults to `4`):
            N, the number of rounds after which a prompt is unresolved. A prompt never draws more than
            `samples_per_round * max_rounds` rollouts.
        min_positives (`int`, *optional*):
            K_pos, the positives that resolve a prompt. If `None`, 1 for `"seq-pos"` and `num_generations // 2` for
            `"seq-balance"`.
        min_negatives (`int`, *optional*):
            K_neg, the negatives that resolve a prompt, for `"seq-balance"` only. If `None`, `num_generations` minus
            `num_generations // 2`.
        positive_threshold (`float`, *optional*, defaults to `0.7`):
            A rollout is positive when its signal is strictly greater.
        exit_reward (`str`, *optional*):
            Name of the reward function whose unweighted value is the signal, so that shaping terms cannot fake
            diversity. If `None`, the signal is the weighted total reward.

        > Parameters that control the advantages

        prompt_weighting (`str`, *optional*, defaults to `"inverse_sqrt"`):
            Factor on the advantages of a prompt with pass rate p̂: `"inverse_sqrt"` (p̂^(−1/2)), `"inverse"` (1/p̂) or
            `"none"` (1). The pass rate is clamped below at 1 / pool size.
        selection_correction (`bool`, *optional*, defaults to `False`):
            Whether to reweight the selected positives and negatives by the pool's pass rate, so that the expected
            gradient is the weight times ∇p. The paper's form (`False`) follows [(1−p)² + p²] / (2p(1−p)) · ∇p times the
            weight.
        unresolved (`str`, *optional*, defaults to `"keep"`):
            What happens to an unresolved prompt without any contrast (all its advantages are 0). `"keep"` leaves it in
            the batch as GRPO does, where it dilutes a token-mean loss; `"mask"` takes it out of the loss and out of
            its token count.

        > Parameters that control a vLLM server (`use_vllm=True`, `vllm_mode="server"`)

        vllm_weight_sync (`str`, *optional*, defaults to `"nccl"`):
            How the server gets the weights. Possible values are:

                - `"nccl"`: as in TRL, through an NCCL group; the server needs other GPUs than the trainer.
                - `"lora"`: only the adapter, which the server hot-loads; needs a `peft_config`. Trainer and server may
                  share a GPU, or have none.
                - `"disk"`: all weights through `vllm_weight_sync_dir`; works wherever both see the same directory.
        vllm_weight_sync_dir (`str`, *optional*):
            Directory for `"lora"` and `"disk"`, under the same path for trainer and server. If `None`,
            `vllm_weight_sync` in `output_dir`. Old versions are removed.
        vllm_request_timeout (`float`, *optional*, defaults to `300.0`):
            Deadline in seconds of each request, retries included. Must leave room for the longest completion. When it
            passes, every process raises the same error.
        vllm_max_concurrent_requests (`int`, *optional*, defaults to `64`):
            Requests that one process has under way at once; each asks for `samples_per_round` completions.
        vllm_speculative_rounds (`float`, *optional*, defaults to `0.25`):
            When fewer requests are under way than this share of a process's prompts, the server has capacity to spare:
            the next rounds of the prompts still active are then asked for ahead of time, and thrown away if they are
            not needed. Shortens a step's tail for a few more generated tokens and does not change the distribution of
            pools. 0 never does, 1 always.
        vllm_round_barrier (`bool`, *optional*, defaults to `False`):
            Whether to complete each round for all of a process's prompts before the next begins. Slower; gives the
            same distribution of pools. For comparison.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`], following the paper:
    > - `num_generations`: Defaults to `4` instead of `8`.
    > - `scale_rewards`: Defaults to `"none"` instead of `"group"`. `"group"` divides by the standard deviation of the
    >   prompt's whole pool, `"batch"` by that of all pools.
    > - `epsilon_high`: Defaults to `0.28` instead of `None`.
    """

    # Parameters whose default values are overridden from GRPOConfig
    num_generations: int | None = field(
        default=4,
        metadata={"help": "Number of rollouts per prompt that are trained on (n)."},
    )
    scale_rewards: str = field(
        default="none",
        metadata={
            "help": "Scaling of the advantages: `'none'`, `'group'` (standard deviation of the prompt's whole pool) or "
            "`'batch'` (standard deviation over all pools). With `adaptive_sampling='uniform'`, as in GRPO."
        },
    )
    epsilon_high: float | None = field(
        default=0.28,
        metadata={"help": "Upper-bound epsilon of the clipped ratio; the lower bound is `epsilon`."},
    )

    # Parameters that control the sampling
    adaptive_sampling: str = field(
        default="seq-balance",
        metadata={
            "help": "Which rollouts to draw: `'seq-balance'` (rounds until a prompt has both positives and negatives), "
            "`'seq-pos'` (rounds until it has positives) or `'uniform'` (plain GRPO, bit for bit).",
            "choices": list(_CHOICES["adaptive_sampling"]),
        },
    )
    samples_per_round: int | None = field(
        default=None,
        metadata={
            "help": "Rollouts drawn per round for every prompt still active (M), at least `num_generations`. If "
            "`None`, twice `num_generations`."
        },
    )
    max_rounds: int = field(
        default=4,
        metadata={"help": "Rounds after which a prompt is unresolved (N)."},
    )
    min_positives: int | None = field(
        default=None,
        metadata={
            "help": "Positives that resolve a prompt. If `None`, 1 for `'seq-pos'`, `num_generations // 2` for "
            "`'seq-balance'`."
        },
    )
    min_negatives: int | None = field(
        default=None,
        metadata={
            "help": "Negatives that resolve a prompt, for `'seq-balance'` only. If `None`, `num_generations` minus "
            "`num_generations // 2`."
        },
    )
    positive_threshold: float = field(
        default=0.7,
        metadata={"help": "A rollout is positive when its signal is strictly greater."},
    )
    exit_reward: str | None = field(
        default=None,
        metadata={
            "help": "Name of the reward function whose unweighted value is the signal. If `None`, the weighted total "
            "reward."
        },
    )

    # Parameters that control the advantages
    prompt_weighting: str = field(
        default="inverse_sqrt",
        metadata={
            "help": "Factor on a prompt's advantages: `'inverse_sqrt'` (pass rate^-0.5), `'inverse'` (1 / pass rate) "
            "or `'none'`.",
            "choices": list(_CHOICES["prompt_weighting"]),
        },
    )
    selection_correction: bool = field(
        default=False,
        metadata={"help": "Whether to correct the advantages for the balanced selection of the group."},
    )
    unresolved: str = field(
        default="keep",
        metadata={
            "help": "Unresolved prompts without any contrast stay in the loss with advantage 0 (`'keep'`) or leave the "
            "loss and its token count (`'mask'`).",
            "choices": list(_CHOICES["unresolved"]),
        },
    )

    # Parameters that control a vLLM server
    vllm_weight_sync: str = field(
        default="nccl",
        metadata={
            "help": "How a vLLM server gets the weights: `'nccl'` (as in TRL), `'lora'` (hot-loads the adapter) or "
            "`'disk'` (reloads from a shared directory).",
            "choices": list(_CHOICES["vllm_weight_sync"]),
        },
    )
    vllm_weight_sync_dir: str | None = field(
        default=None,
        metadata={
            "help": "Directory for `vllm_weight_sync='lora'` and `'disk'`, under the same path for trainer and server. "
            "If `None`, `vllm_weight_sync` in `output_dir`."
        },
    )
    vllm_request_timeout: float = field(
        default=300.0,
        metadata={"help": "Deadline in seconds of each request to a vLLM server, retries included."},
    )
    vllm_max_concurrent_requests: int = field(
        default=64,
        metadata={"help": "Requests to a vLLM server that one process has under way at once."},
    )
    vllm_speculative_rounds: float = field(
        default=0.25,
        metadata={
            "help": "Ask a vLLM server for rounds ahead of time when fewer requests are under way than this share of a "
            "process's prompts; 0 never does."
        },
    )
    vllm_round_barrier: bool = field(
        default=False,
        metadata={"help": "Whether to complete each round on a vLLM server before the next, for comparison."},
    )

    def __post_init__(self):
        super().__post_init__()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} ({getattr(self, name)!r}) must be one of {', '.join(map(repr, choices))}.")
        if self.scale_rewards not in ("none", "group", "batch"):
            raise ValueError(f"scale_rewards ({self.scale_rewards!r}) must be one of 'none', 'group', 'batch'.")
        self._check_vllm()
        if self.adaptive_sampling == "uniform":
            return
        self._refuse_unsupported()
        if self.samples_per_round is None:
            self.samples_per_round = 2 * self.num_generations
        if self.samples_per_round < self.num_generations:
            raise ValueError(
                f"samples_per_round ({self.samples_per_round}) must be at least num_generations "
                f"({self.num_generations}), because the first round alone must fill a group. Raise samples_per_round, "
                "lower num_generations, or leave samples_per_round unset for twice num_generations."
            )
        if self.max_rounds < 1:
            raise ValueError(f"max_rounds ({self.max_rounds}) must be at least 1.")
        self._check_quotas()

    def _check_quotas(self):
        if self.adaptive_sampling == "seq-pos" and self.min_negatives is not None:
            raise ValueError(
                f"min_negatives ({self.min_negatives}) has no effect with adaptive_sampling='seq-pos', which counts "
                "positives only. Use adaptive_sampling='seq-balance' or leave min_negatives unset."
            )
        for name in ("min_positives", "min_negatives"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1.")
        exit_condition = self.exit_condition
        quota, cap = exit_condition.min_positives + exit_condition.min_negatives, self.max_samples_per_prompt
        if quota > cap:
            raise ValueError(
                f"min_positives ({exit_condition.min_positives}) + min_negatives ({exit_condition.min_negatives}) can "
                f"never be reached within samples_per_round ({self.samples_per_round}) * max_rounds "
                f"({self.max_rounds}) = {cap} rollouts. Lower the quotas or raise max_rounds."
            )

    def _check_vllm(self):
        if self.vllm_weight_sync_dir is None:
            self.vllm_weight_sync_dir = os.path.join(self.output_dir, "vllm_weight_sync")
        for name in ("vllm_request_timeout", "vllm_max_concurrent_requests"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be positive.")
        if not 0 <= self.vllm_speculative_rounds <= 1:
            raise ValueError(f"vllm_speculative_rounds ({self.vllm_speculative_rounds}) must be between 0 and 1.")
        if not (self.use_vllm and self.vllm_mode == "server"):
            for name, default in (("vllm_weight_sync", "nccl"), ("vllm_round_barrier", False)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} is for a vLLM server, but use_vllm={self.use_vllm} and "
                        f"vllm_mode={self.vllm_mode!r}. Set use_vllm=True and vllm_mode='server', or leave {name} unset."
                    )

    def _refuse_unsupported(self):
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"multi_objective_aggregation={self.multi_objective_aggregation!r} is not supported with "
                f"adaptive_sampling={self.adaptive_sampling!r} yet. Use 'sum_then_normalize', or "
                "adaptive_sampling='uniform'."
            )

    @property
    def exit_condition(self) -> ExitCondition:
        """What resolves a prompt. For `"uniform"`: one positive and one negative (used for metrics only)."""
        half = self.num_generations // 2
        if self.adaptive_sampling == "uniform":
            return ExitCondition(1, 1)
        if self.adaptive_sampling == "seq-pos":
            return ExitCondition(1 if self.min_positives is None else self.min_positives)
        return ExitCondition(
            half if self.min_positives is None else self.min_positives,
            self.num_generations - half if self.min_negatives is None else self.min_negatives,
        )

    @property
    def max_samples_per_prompt(self) -> int:
        """Hard cap on the rollouts of a prompt in one step."""
        return self.samples_per_round * self.max_rounds
