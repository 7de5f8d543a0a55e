"""What `ada-trl data` and `ada-trl evaluate` are told; nothing here takes long to import."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..utils.fields import optional_field
from .accuracy import difficulty_bins


# The paper's: MATH-500, Minerva Math, OlympiadBench, and 230 problems of AIME, HMMT, BRUMO, CMIMC and AMC.
DATASETS = (
    "weqweasdas/math500",
    "weqweasdas/minerva_math",
    "weqweasdas/olympiadbench",
    "weqweasdas/aime_hmmt_brumo_cmimc_amc23",
)


@dataclass(kw_only=True)
class SamplingArguments:
    """
    How completions are sampled. The defaults are those of the paper's evaluation.

    Args:
        num_samples (`int`):
            Completions per problem.
        temperature (`float`, *optional*, defaults to `1.0`), top_p (`float`, *optional*, defaults to `1.0`):
            Of the sampling; temperature 0 is greedy.
        max_new_tokens (`int`, *optional*, defaults to `4096`):
            Most tokens of a completion.
        reward_func (`str`, *optional*):
            Import path of a reward function as [`~trl.GRPOTrainer`] takes it, which decides what is right. By default
            math-verify compares the answers.
        positive_threshold (`float`, *optional*, defaults to `0.7`):
            A completion is right where `reward_func` gives more.
        prompt_format (`str`, *optional*):
            `"chat"`: the paper's system prompt and instruction in the model's chat template. `"plain"`: the problem as it
            is. By default `"chat"`, and `"plain"` with a `reward_func`. A conversation stays as it is.
        chat_template_kwargs (`str` or `dict`, *optional*):
            Variables of the chat template, on the command line as JSON. Llama-3.2's writes the current day unless it gets
            a `date_string`: give the one of the training, or an evaluation cannot be resumed the next day.
        seed (`int`, *optional*, defaults to `42`):
            Each problem has a seed of its own, derived from it and the problem's position.
        backend (`str`, *optional*, defaults to `"vllm"`):
            `"vllm"`: in this process. `"server"`: a running vLLM server. `"transformers"`: works everywhere; slow.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Of the weights; not with a server.
        batch_size (`int`, *optional*, defaults to `16`):
            transformers: completions of one problem that are generated together.
        vllm_server_base_url (`str`, *optional*, defaults to `"http://127.0.0.1:8000"`):
            Server: its address. It must serve the model under its name or path.
        vllm_server_timeout (`float`, *optional*, defaults to `240.0`):
            Server: seconds to wait for it to come up.
        vllm_request_timeout (`float`, *optional*, defaults to `3600.0`):
            Server: deadline in seconds of a request, which is for all completions of a problem.
        vllm_max_concurrent_requests (`int`, *optional*, defaults to `64`):
            vLLM: problems under way at a time.
        vllm_gpu_memory_utilization (`float`, *optional*, defaults to `0.9`), vllm_tensor_parallel_size (`int`,
        *optional*, defaults to `1`), vllm_max_model_length (`int`, *optional*):
            vLLM in this process: as in [`~trl.GRPOConfig`].
    """

    num_samples: int = field(metadata={"help": "Completions per problem."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature; 0 is greedy."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus of the sampling; 1 is all of it."})
    max_new_tokens: int = field(default=4096, metadata={"help": "Most tokens of a completion."})
    reward_func: str | None = field(
        default=None,
        metadata={
            "help": "Import path of a reward function, such as `my_rewards.right`, that decides what is right; default: "
            "math-verify compares the answers."
        },
    )
    positive_threshold: float = field(
        default=0.7, metadata={"help": "A completion is right where reward_func gives more."}
    )
    prompt_format: str = optional_field(
        help="'chat': the paper's system prompt and instruction in the model's chat template; 'plain': the "
        "problem as it is. Default: 'chat', with a reward_func 'plain'. A conversation stays as it is.",
        choices=["chat", "plain"],
    )
    chat_template_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": 'JSON with variables of the chat template, such as \'{"date_string": "26 Jul 2024"}\' for Llama-3.2, '
            "whose template otherwise writes the current day."
        },
    )
    seed: int = field(default=42, metadata={"help": "Each problem gets a seed of its own, derived from this one."})
    backend: str = field(
        default="vllm",
        metadata={
            "help": "'vllm': in this process; 'server': a running vLLM server; 'transformers': works everywhere, slow.",
            "choices": ["vllm", "server", "transformers"],
        },
    )
    dtype: str = field(default="auto", metadata={"help": "Of the weights (not with a server)."})
    batch_size: int = field(
        default=16, metadata={"help": "transformers: completions of one problem that are generated together."}
    )
    vllm_server_base_url: str = field(
        default="http://127.0.0.1:8000",
        metadata={"help": "server: its address. It must serve the model under its name or path."},
    )
    vllm_server_timeout: float = field(default=240.0, metadata={"help": "server: seconds to wait for it to come up."})
    vllm_request_timeout: float = field(
        default=3600.0, metadata={"help": "server: deadline in seconds of a request for all completions of a problem."}
    )
    vllm_max_concurrent_requests: int = field(default=64, metadata={"help": "vLLM: problems under way at a time."})
    vllm_gpu_memory_utilization: float = field(default=0.9, metadata={"help": "vllm: share of the GPU's memory."})
    vllm_tensor_parallel_size: int = field(default=1, metadata={"help": "vllm: GPUs that share the model."})
    vllm_max_model_length: int | None = field(
        default=None, metadata={"help": "vllm: most tokens of prompt and completion; default: the model's."}
    )

    def __post_init__(self) -> None:
        if self.prompt_format is None:
            self.prompt_format = "chat" if self.reward_func is None else "plain"
        if isinstance(self.chat_template_kwargs, str):
            self.chat_template_kwargs = _read_json(self.chat_template_kwargs)
        for name in ("num_samples", "max_new_tokens", "batch_size", "vllm_max_concurrent_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1.")
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature ({self.temperature}) must be at least 0 and top_p ({self.top_p}) in (0, 1]."
            )

    @property
    def scored_by(self) -> str:
        """What decides, in words."""
        if self.reward_func is None:
            return "answers compared by math-verify"
        return f"right where `{self.reward_func}` gives more than {self.positive_threshold:g}"


def _read_json(text: str) -> dict:
    try:
        variables = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f'chat_template_kwargs ({text}) is no valid JSON ({error}). Write it as \'{{"name": "value"}}\'.'
        ) from error
    if not isinstance(variables, dict):
        raise ValueError(f'chat_template_kwargs ({text}) must be a JSON object, as \'{{"name": "value"}}\'.')
    return variables


@dataclass(kw_only=True)
class SelectionArguments(SamplingArguments):
    """
    Arguments of `ada_trl.data`, on top of [`~measurement.samplers.SamplingArguments`].

    Args:
        model_name_or_path (`str`):
            Model whose pass rates decide; also whose tokenizer counts a problem's tokens.
        output_dir (`str`):
            Where the data set, its card and a histogram go.
        samples_dir (`str`, *optional*):
            Where the samples are kept, `output_dir` by default. Give the one of an earlier selection to make another
            from the same samples.
        dataset_name (`str`, *optional*, defaults to `"open-r1/OpenR1-Math-220k"`):
            Name on the hub, file (JSON, JSON Lines, Parquet, CSV) or directory.
        dataset_config (`str`, *optional*), dataset_split (`str`, *optional*, defaults to `"train"`):
            Part of it.
        problem_column, answer_column (`str`, *optional*):
            By default found by name, see [`~problems.load_problems`].
        max_problem_tokens (`int`, *optional*, defaults to `700`):
            Longer problems are dropped.
        strict (`bool`, *optional*, defaults to `False`):
            Drop a problem when its references *or* its annotated solution cannot be verified, and not only when both
            cannot, see [`~cleaning.clean`].
        max_problems (`int`, *optional*):
            Only the first problems that pass the filters, for a trial.
        min_pass_rate (`float`, *optional*, defaults to `0.0`), max_pass_rate (`float`, *optional*, defaults to `0.375`):
            Problems with min < pass rate ≤ max are kept. The paper, of 16 samples: 0.375 in section 4.1, 1 or 2 of 16
            (0.125) for the hard sets in appendix C.1; the authors' script has 0.313 for the easy ones.
        num_samples (`int`, *optional*, defaults to `16`):
            Completions per problem.
    """

    model_name_or_path: str = field(metadata={"help": "Model whose pass rates decide."})
    output_dir: str = field(metadata={"help": "Where the data set, its card and a histogram go."})
    samples_dir: str | None = field(
        default=None,
        metadata={
            "help": "Where the samples are kept; default: output_dir. Give the one of an earlier selection to make "
            "another from the same samples."
        },
    )
    dataset_name: str = field(
        default="open-r1/OpenR1-Math-220k",
        metadata={"help": "Name on the hub, file (JSON, JSON Lines, Parquet, CSV) or directory."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split of the data set."})
    problem_column: str | None = field(default=None, metadata={"help": "Default: found by name, and logged."})
    answer_column: str | None = field(default=None, metadata={"help": "Default: found by name, and logged."})
    max_problem_tokens: int = field(default=700, metadata={"help": "Longer problems are dropped."})
    strict: bool = field(
        default=False,
        metadata={"help": "Drop a problem when its references or its annotated solution fail, not only when both do."},
    )
    max_problems: int | None = field(
        default=None, metadata={"help": "Only the first problems that pass the filters, for a trial."}
    )
    min_pass_rate: float = field(default=0.0, metadata={"help": "Kept: min < pass rate <= max."})
    max_pass_rate: float = field(
        default=0.375,
        metadata={"help": "Kept: min < pass rate <= max. The paper: 0.125 (hard), 0.313 (easy), 0.375 (text), of 16."},
    )
    num_samples: int = field(default=16, metadata={"help": "Completions per problem."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.min_pass_rate < self.max_pass_rate <= 1:
            raise ValueError(
                f"min_pass_rate ({self.min_pass_rate}) must be less than max_pass_rate ({self.max_pass_rate}), which is at "
                "most 1: problems with min < pass rate <= max are kept."
            )


@dataclass(kw_only=True)
class EvaluationArguments(SamplingArguments):
    """
    Arguments of `ada-trl evaluate`, on top of [`~measurement.samplers.SamplingArguments`].

    Args:
        models (`list[str]`):
            Names on the hub or paths of models and LoRA adapters. The others are compared with the first.
        labels (`list[str]`, *optional*):
            What to call them; by default the last part of their names, or all of it where that is not distinct.
        output_dir (`str`):
            Where samples and reports go.
        datasets (`list[str]`, *optional*):
            Names on the hub, files (JSON, JSON Lines, Parquet, CSV) or directories. By default the paper's four.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split of each.
        problem_column, answer_column (`str`, *optional*):
            By default found by name, see [`~problems.load_problems`].
        max_problems (`int`, *optional*):
            Only the first problems of each data set, for a trial.
        num_samples (`int`, *optional*, defaults to `32`):
            Completions per problem: the k of average@k and the largest k of pass@k.
        pass_at (`list[int]`, *optional*):
            The k of pass@k; by default the powers of two up to `num_samples`.
        difficulty_edges (`list[float]`, *optional*, defaults to `[0, 0.2, 0.5, 1]`):
            Edges of the difficulty bins, see [`~measurement.accuracy.difficulty_bins`]. By default those of the paper's table 5:
            {0}, (0, 0.2], (0.2, 0.5], (0.5, 1].
    """

    models: list[str] = field(
        metadata={"help": "Names or paths of models and LoRA adapters. The others are compared with the first."}
    )
    labels: list[str] = optional_field(help="What to call the models in the report.")
    output_dir: str = field(metadata={"help": "Where samples and reports go."})
    datasets: list[str] = field(
        default_factory=lambda: list(DATASETS),
        metadata={"help": "Names on the hub, files (JSON, JSON Lines, Parquet, CSV) or directories."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of each data set."})
    problem_column: str | None = field(default=None, metadata={"help": "Default: found by name, and logged."})
    answer_column: str | None = field(default=None, metadata={"help": "Default: found by name, and logged."})
    max_problems: int | None = field(default=None, metadata={"help": "Only the first of each data set, for a trial."})
    num_samples: int = field(default=32, metadata={"help": "Completions per problem."})
    pass_at: list[int] = optional_field(help="The k of pass@k; default: powers of two up to num_samples.")
    difficulty_edges: list[float] = field(
        default_factory=lambda: [0.0, 0.2, 0.5, 1.0], metadata={"help": "Edges of the difficulty bins."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels is None:
            self.labels = short_names(self.models)
        if len(self.labels) != len(self.models) or len(set(self.labels)) < len(self.labels):
            raise ValueError(
                f"labels ({self.labels}) must be distinct, one for each of the {len(self.models)} models ({self.models})."
            )
        if self.pass_at is None:
            self.pass_at = [2**i for i in range(self.num_samples.bit_length())]
        if not all(1 <= k <= self.num_samples for k in self.pass_at):
            raise ValueError(f"pass_at ({self.pass_at}) must lie between 1 and num_samples ({self.num_samples}).")
        difficulty_bins([], self.difficulty_edges)  # refuses bad edges before anything is sampled


def short_names(names: list[str]) -> list[str]:
    """The last part of each name or path without a data file's ending, or the whole where that is not distinct."""
    short = [re.sub(r"\.(jsonl?|parquet|csv)$", "", Path(name).name) or name for name in names]
    return [last if short.count(last) == 1 else name for name, last in zip(names, short, strict=True)]
