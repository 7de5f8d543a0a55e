"""Configuration of the AdaGRPOTrainer."""

from dataclasses import dataclass, field

from trl import GRPOConfig

from ..core import ExitCondition
from ..utils.fields import optional_field
from .config_checks import (
    CHOICES,
    check_config,
    check_types,
    placeholder_group_size,
    resolve_defaults,
    resolve_sampling,
)
from ..sampling.strategies import SamplingStrategy, build_strategy, strategy_class


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

        adaptive_sampling (`str`, *optional*):
            Which rollouts to draw. If `None`, `"seq-balance"`; with `baseline="posterior"` or `"batch"`, `"uniform"`.
            Possible values are:

                - `"seq-balance"`: rounds of `samples_per_round` rollouts until a prompt has `min_positives` positives
                  and `min_negatives` negatives.
                - `"seq-pos"`: rounds until a prompt has `min_positives` positives.
                - `"est"`: one round, of more rollouts for prompts with a lower estimated pass rate, at GRPO's cost
                  exactly; `pass_rate_estimator` says where the estimate comes from. `"est-ema"` and `"est-value"` are
                  the paper's names for it with `"ema"` and with `"value"`.
                - `"uniform"`: exactly `num_generations` per prompt. With `baseline="pool"` it has GRPO's advantages: the
                  same weights as [`~trl.GRPOTrainer`], bit for bit. `positive_threshold` and `success_reward` are used for
                  the `ada/` metrics only then, and what is for other modes is refused.

        samples_per_round (`int`, *optional*):
            M, the rollouts drawn in each round for every prompt that is still active. At least `num_generations`. If
            `None`, twice `num_generations`, the paper's ratio. With `baseline="posterior"` it is `num_generations`.
        max_rounds (`int`, *optional*, defaults to `4`):
            N, the number of rounds after which a prompt is unresolved. A prompt never draws more than
            `samples_per_round * max_rounds` rollouts. With `zero_variance_groups="resample"` also how many prompts are asked, one after
            another, for one place in the batch. With `baseline="posterior"` or `"batch"`, which train on everything and
            draw exactly the rows of the update batch, a prompt has one round per step: what has not passed returns in
            the next one.
        min_positives (`int`, *optional*):
            K_pos, the positives that resolve a prompt. If `None`, 1 for `"seq-pos"` and `num_generations // 2` for
            `"seq-balance"`.
        min_negatives (`int`, *optional*):
            K_neg, the negatives that resolve a prompt, for `"seq-balance"` only. If `None`, `num_generations` minus
            `num_generations // 2`.
        positive_threshold (`float`, *optional*, defaults to `0.7`):
            A rollout is positive when its signal is strictly greater. For continuous rewards set it to what counts as a
            success, or to about the mean that the run logs as `ada/success_reward/mean`.
        success_reward (`str`, *optional*):
            Name of the reward function whose unweighted value is the signal, so that shaping terms cannot fake
            diversity. If `None`, the signal is the weighted total reward.

        > Parameters that control which prompts are asked

        prompt_oversampling (`int`, *optional*, defaults to `1`):
            Of how many prompts of the data set one is asked: those that are expected to teach most, w(p̂) · p̂(1 − p̂); a
            quarter is taken in the data's order, and who was passed over 8 times comes first. 1 asks all, in the data's
            order; so does the trainer while its estimates (see `pass_rate_estimator`) predict nothing.

        > Parameters that control the budgets of `"est"`: `num_generations` rollouts per prompt on average

        min_samples (`int`, *optional*, defaults to `2`):
            N_min, the fewest rollouts that a prompt gets.
        max_samples (`int`, *optional*, defaults to `32`):
            N_max, the most rollouts that a prompt gets.
        allocation_rule (`str` or `float`, *optional*, defaults to `"power"`):
            `"power"` allocates N_x ∝ (p̂ + ε)^(−1/2), a number a (p̂ + ε)^(−a), where 0 is uniform, `"variance"`
            N_x ∝ √((1 − p̂ + ε) / (p̂ + ε)), the least gradient variance of the log objective at a fixed total (the paper's appendix B). ε is 0.01. The
            variance rule belongs with `prompt_weighting="none"` and `scale_rewards="group"`: only then the update is the
            log objective's. `"reward_std"` N_x ∝ √((p̂ + ε)(1 − p̂ + ε)), most for prompts that pass half of the time.

        > Parameters that control the estimates of pass rates

        pass_rate_estimator (`str`, *optional*):
            What a prompt is expected to pass, for `"est"`, `baseline="posterior"` and `prompt_oversampling`. Possible values
            are:

                - `"ema"`: what the prompt has shown before, discounted, on top of a Beta prior.
                - `"value"`: a small value head on the policy's hidden state at the last prompt token, trained as it
                  goes, or a `value_model`. It knows something about prompts never seen.
                - `"ema+value"`: the value network as the prior mean of the counts, its worth in rollouts fitted to the
                  run.

            If `None`, `"ema+value"` (`"ema"` and `"value"` in `"est-ema"` and `"est-value"`). Where nothing depends on it,
            `"ema"` keeps a record of every prompt's pass rate. The record is saved beside each checkpoint, as
            `ada_pass_rates.parquet`.
        ema_decay (`float`, *optional*, defaults to `0.9`):
            λ, the weight of earlier counts at each new visit of a prompt; 1 never forgets.
        pass_rate_prior (`list[float]`, *optional*):
            α and β of a fixed Beta prior: the positives and negatives that it is worth. If `None`, the prior is fitted to
            the run's own recent data (empirical Bayes), from about 32 prompts on; until then, and with fewer than 4
            prompts per step always, it is the paper's `[1.0, 16.0]`.
        value_model (`str`, *optional*):
            Sequence-classification model, by name or local path, that estimates the pass rates in place of the small
            head on the policy's hidden state. It is trained along with the policy, reads
            prompts with its own tokenizer (through its chat template, if it has one), and every process holds all of
            it, in float32 with AdamW's moments. Its learning rate is 1e-5. Its state is saved in checkpoints.

        > Parameters that control the advantages

        baseline (`str`, *optional*, defaults to `"pool"`):
            What a rollout's reward is compared with. Possible values are:

                - `"pool"`: the mean of everything that the prompt drew in this step, as in the paper. A prompt whose
                  rollouts all score the same teaches nothing.
                - `"posterior"`: what was expected of the prompt (see `pass_rate_estimator`), joined with its other
                  rollouts and the level of the other prompts. Every rollout teaches, so that `num_generations` may be 1, and
                  all of them are trained on.
                - `"batch"`: the mean of all other rollouts of the generation. It knows nothing of the prompt, and needs no
                  record; for the rest as `"posterior"`.
        prompt_weighting (`str` or `float`, *optional*):
            Factor on the advantages of a prompt with pass rate p̂: `"inverse_sqrt"` (p̂^(−1/2)), `"inverse"` (1/p̂),
            `"none"` (1), or a number α from 0 to 1 for p̂^(α−1), the weight of the objective E[p^α / α]: the three names
            are 0.5, 0 and 1. p̂ is that of the pool; with `baseline="posterior"` what was expected before the draw. If
            `None`, `"inverse_sqrt"`, and `"none"` in `"uniform"`. With `baseline="posterior"`, `"seq-pos"` and
            `"seq-balance"` have `"none"` too, since hard prompts draw more there already: without a weight it is the
            gradient of Σ pass@k / k up to `max_rounds`.
        selection_correction (`bool`, *optional*):
            Whether to reweight the selected positives and negatives by the pool's pass rate, so that the balanced
            selection does not change the prompt's weight. If `None`, `True` where a group is selected (Seq modes with
            `baseline="pool"`). The paper's form (`False`) follows [(1−p)² + p²] / (2p(1−p)) · ∇p times the weight. The
            correction is exact for the selection; early stopping and the cap leave a factor between 0.9 and 1.2
            (Seq-balance with weight 1).
        zero_variance_groups (`str`, *optional*, defaults to `"keep"`):
            What happens to a prompt without any contrast (all its advantages are 0), whether or not it met its exit
            condition. `"keep"` leaves it in the batch as GRPO does, where it dilutes the mean over tokens or rows;
            `"mask"` makes the loss what it would be without the prompt, in every mode and for every `loss_type` (a KL
            term is not rescaled where the mean is over rows). `"resample"` asks another prompt in its place, up to
            `max_rounds - 1` times: with `"uniform"` the dynamic sampling of
            [DAPO](https://huggingface.co/papers/2503.14476).

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
        max_staleness (`int`, *optional*, defaults to `0`):
            With a vLLM server and 1, the next step's rollouts are asked for before this one's are trained on, so that server
            and trainer work at the same time. They come from the weights before the update, which TRL's
            importance-sampling correction makes up for. For modes with one round of rollouts.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`], following the paper:
    > - `num_generations`: Defaults to `4` instead of `8`; with `baseline="posterior"` or `"batch"` and `"uniform"` sampling
    >   to `1`.
    > - `scale_rewards`: Defaults to `"none"` instead of `"group"`. `"group"` divides by the standard deviation of the
    >   prompt's whole pool, `"batch"` by that of all pools; with `baseline="posterior"` or `"batch"` by a running one of
    >   earlier generations.
    > - `epsilon_high`: Defaults to `0.28` instead of `None`.
    """

    # Parameters whose default values are overridden from GRPOConfig
    num_generations: int = optional_field(
        help="Number of rollouts per prompt that are trained on (n). If `None`, 4; 1 where `baseline` is `'posterior'` "
        "or `'batch'` and the sampling uniform."
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
    adaptive_sampling: str = optional_field(
        help="Which rollouts to draw (if `None`, `'seq-balance'`; with `baseline='posterior'` or `'batch'`, "
        "`'uniform'`): `'seq-balance'` (rounds until a prompt has both positives and negatives), "
        "`'seq-pos'` (rounds until it has positives), `'est'` (one round with budgets from estimated pass rates; "
        "`'est-ema'` and `'est-value'` name the estimator too) or `'uniform'` (plain GRPO, bit for bit).",
        choices=list(CHOICES["adaptive_sampling"]),
    )
    samples_per_round: int = optional_field(
        help="Rollouts drawn per round for every prompt still active (M), at least `num_generations`. If "
        "`None`, twice `num_generations`."
    )
    max_rounds: int = field(
        default=4,
        metadata={
            "help": "Rounds after which a prompt is unresolved (N); with `zero_variance_groups='resample'` also prompts for one place."
        },
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
    success_reward: str | None = field(
        default=None,
        metadata={
            "help": "Name of the reward function whose unweighted value is the signal. If `None`, the weighted total "
            "reward."
        },
    )

    # Parameters that control which prompts are asked
    prompt_oversampling: int = field(
        default=1,
        metadata={
            "help": "Of how many prompts the one is asked that is expected to teach most; 1 asks all, in the data's order."
        },
    )

    # Parameters that control the budgets of "est"
    min_samples: int = field(default=2, metadata={"help": "Fewest rollouts of a prompt, for `'est'`."})
    max_samples: int = field(default=32, metadata={"help": "Most rollouts of a prompt, for `'est'`."})
    allocation_rule: str = field(
        default="power",
        metadata={
            "help": "Rollouts by estimated pass rate p: `'power'` (p^-0.5), a number a (p^-a), `'variance'` (sqrt((1 - p) / p)) "
            "or `'reward_std'` (sqrt(p * (1 - p))), for `'est'`."
        },
    )

    # Parameters that control the estimates of pass rates
    pass_rate_estimator: str | None = field(
        default=None,
        metadata={
            "help": "What a prompt is expected to pass: `'ema'` (what it has shown), `'value'` (a value head on the "
            "policy, or a `value_model`) or `'ema+value'` (the one as prior of the other; the default). `'ema'` where "
            "nothing depends on it keeps a record.",
            "choices": list(CHOICES["pass_rate_estimator"]),
        },
    )
    ema_decay: float = field(
        default=0.9, metadata={"help": "Weight of a prompt's earlier counts at each new visit, at most 1."}
    )
    pass_rate_prior: list[float] | None = field(
        default=None,
        metadata={
            "help": "Positives and negatives that a fixed Beta prior of a pass rate is worth (the paper: 1 16). If "
            "`None`, fitted to the run's own recent data."
        },
    )
    value_model: str | None = field(
        default=None,
        metadata={
            "help": "Sequence-classification model (name or path) that estimates the pass rates in place of the head on "
            "the policy's hidden state."
        },
    )

    # Parameters that control the advantages
    baseline: str = field(
        default="pool",
        metadata={
            "help": "What a reward is compared with: `'pool'` (the mean of the prompt's rollouts, as in the paper) or "
            "`'posterior'` (what was expected of the prompt, joined with its other rollouts: every rollout teaches).",
            "choices": list(CHOICES["baseline"]),
        },
    )
    prompt_weighting: str = optional_field(
        help="Factor on a prompt's advantages: `'inverse_sqrt'` (pass rate^-0.5), `'inverse'` (1 / pass rate), "
        "`'none'`, or a number alpha from 0 to 1 (pass rate^(alpha - 1)). If `None`, `'inverse_sqrt'`, and `'none'` "
        "with `adaptive_sampling='uniform'`."
    )
    selection_correction: bool | None = field(
        default=None,
        metadata={
            "help": "Whether to correct the advantages for the balanced selection of the group. If `None`, yes where "
            "one is selected; `False` is the paper's form."
        },
    )
    zero_variance_groups: str = field(
        default="keep",
        metadata={
            "help": "Prompts without any contrast stay in the loss with advantage 0 (`'keep'`), leave the loss and its "
            "token count (`'mask'`), or are replaced by other prompts (`'resample'`, DAPO's dynamic sampling).",
            "choices": list(CHOICES["zero_variance_groups"]),
        },
    )

    # Parameters that control a vLLM server
    vllm_weight_sync: str = field(
        default="nccl",
        metadata={
            "help": "How a vLLM server gets the weights: `'nccl'` (as in TRL), `'lora'` (hot-loads the adapter) or "
            "`'disk'` (reloads from a shared directory).",
            "choices": list(CHOICES["vllm_weight_sync"]),
        },
    )
    vllm_weight_sync_dir: str = optional_field(
        help="Directory for `vllm_weight_sync='lora'` and `'disk'`, under the same path for trainer and server. "
        "If `None`, `vllm_weight_sync` in `output_dir`."
    )
    vllm_request_timeout: float = field(
        default=300.0,
        metadata={"help": "Deadline in seconds of each request to a vLLM server, retries included."},
    )
    max_staleness: int = field(
        default=0,
        metadata={
            "help": "1: a vLLM server generates the next step's rollouts, from the weights before the update, while this "
            "step is trained on. 0: one after the other."
        },
    )

    def __post_init__(self):
        check_types(self, AdaGRPOConfig.__annotations__)
        resolve_sampling(self)
        # GRPOConfig rejects a single rollout per prompt, for which GRPO's group mean is undefined. Other baselines do not
        # need a group: everything else is validated with a number of rollouts that GRPOConfig accepts for this batch.
        num_generations, num_generations_eval = self.num_generations, self.num_generations_eval
        if num_generations == 1:
            self.num_generations = placeholder_group_size(self)
            self.num_generations_eval = num_generations_eval or 1
        super().__post_init__()
        self.num_generations, self.num_generations_eval = num_generations, num_generations_eval
        resolve_defaults(self)
        check_config(self)

    estimator_is_explicit = True  # False where `pass_rate_estimator` was left unset

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
    def prompts_per_step(self) -> int:
        """Prompts in the batch that is generated at once, of all processes."""
        return self.generation_batch_size // self.num_generations

    @property
    def is_vanilla_grpo(self) -> bool:
        """Whether nothing but what is logged differs from [`~trl.GRPOTrainer`]."""
        return self.adaptive_sampling == "uniform" and self.baseline == "pool" and not self.uses_prompt_queue

    @property
    def is_multi_round(self) -> bool:
        """Whether a step samples in several rounds, and selects what it trains on from all of them."""
        return self.max_rounds_per_step > 1 or self.selects_groups

    @property
    def selects_groups(self) -> bool:
        """Whether a group is selected from a larger pool (Seq modes with `baseline="pool"`)."""
        return self._strategy_class.is_sequential and not self._strategy_class.retries_across_steps

    @property
    def resamples_prompts(self) -> bool:
        """Whether a step samples other prompts than the next ones of the data set."""
        retries = self._strategy_class.retries_across_steps
        return retries or self.zero_variance_groups == "resample" or self.prompt_oversampling > 1

    @property
    def uses_prompt_queue(self) -> bool:
        """Whether prompts come from the prompt queue, because they are other ones, or needed before the data loader yields them."""
        return self.resamples_prompts or self.max_staleness > 0

    @property
    def max_rounds_per_step(self) -> int:
        """Maximum number of rounds of a prompt, or of a batch slot, in one step."""
        of_prompt = self.max_rounds if self.selects_groups else 1
        prompts_per_slot = self.max_rounds if self.zero_variance_groups == "resample" else 1
        return of_prompt * prompts_per_slot

    @property
    def needs_pass_rate_estimates(self) -> bool:
        """Whether sampling or the baseline uses what a prompt is predicted to earn."""
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
