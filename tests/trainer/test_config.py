"""Invalid configurations raise a ValueError at construction that states the value, the constraint and a fix."""

import copy
import inspect
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer
from ada_trl.trainer.mode import Mode

from ..helpers import QUICK, even_reward, prompt_dataset, tiny_model, tiny_tokenizer, weights_of
from ..helpers import build as build_trainer
from ..helpers import config as build_config


def config(**overrides):
    return build_config("unused", **QUICK | overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, (1, 1)),
        ({"min_positives": 1, "min_negatives": 3}, (1, 3)),
        ({"adaptive_sampling": "seq-pos"}, (1, 0)),
        ({"adaptive_sampling": "seq-pos", "min_positives": 32}, (32, 0)),
        ({"baseline": "batch", "retries": 3}, (1, 0)),
    ],
)
def test_exit_conditions(overrides, expected):
    rule = Mode.of(config(**overrides)).slot_rule
    assert (rule.min_positives, rule.min_negatives) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, (4, 8)),  # 32 rollouts at most, as in the paper
        ({"num_generations": 8}, (8, 8)),
        ({"adaptive_sampling": "seq-pos"}, (4, 8)),
        ({"adaptive_sampling": "uniform", "zero_variance_groups": "resample"}, (None, 4)),
        ({"adaptive_sampling": "uniform"}, (None, None)),
    ],
)
def test_default_rounds(overrides, expected):
    args = config(**overrides)
    assert (args.samples_per_round, args.max_rounds) == expected


UNIFORM, EST, SEQ_POS = ({"adaptive_sampling": mode} for mode in ("uniform", "est-ema", "seq-pos"))
BATCH = UNIFORM | {"baseline": "batch"}
REPLACE = UNIFORM | {"zero_variance_groups": "resample"}
RETRIES = {"baseline": "batch", "retries": 3}
AHEAD = UNIFORM | {"use_vllm": True, "vllm_mode": "server", "max_staleness": 1}
BATCH_OF_ONE = {"num_generations": 1, "per_device_train_batch_size": 1}
INVALID = [
    # types, as YAML files, sweeps and tables give them
    (BATCH | {"retries": None}, r"retries \(None\) must be an integer\. Leave it unset"),
    (BATCH | {"retries": "2"}, r"retries \('2'\) must be an integer"),
    (BATCH | {"retries": 1.5}, r"retries \(1.5\) must be an integer"),
    ({"max_rounds": float("nan")}, r"max_rounds \(nan\) must be an integer"),
    ({"num_generations": "4"}, r"num_generations \('4'\) must be an integer"),
    ({"samples_per_round": [4]}, r"samples_per_round \(\[4\]\) must be an integer"),
    # `no` of YAML is no number: the weight would be 1/p
    ({"prompt_weighting": False}, r"prompt_weighting \(False\) must be a name or a number"),
    (BATCH | {"retries": np.bool_(True)}, r"retries \(True\) must be an integer"),
    ({"epsilon_high": False}, r"epsilon_high \(False\) must be a number"),
    (EST | {"allocation_rule": False}, r"allocation_rule \(False\) must be a name or a number"),
    # a missing value of pandas has no truth value
    ({"baseline": pd.NA}, r"baseline \(<NA>\) must be one of 'pool'"),
    ({"scale_rewards": pd.NA}, r"scale_rewards \(<NA>\) must be a name"),
    ({"success_reward": ["accuracy"]}, r"success_reward \(\['accuracy'\]\) must be a name"),
    ({"positive_threshold": None}, r"positive_threshold \(None\) must be a number"),
    ({"positive_threshold": "0.5"}, r"positive_threshold \('0.5'\) must be a number"),
    ({"vllm_request_timeout": "300"}, r"vllm_request_timeout \('300'\) must be a number"),
    ({"epsilon_high": "0.28"}, r"epsilon_high \('0.28'\) must be a number"),
    ({"baseline": None}, r"baseline \(None\) must be one of 'pool', 'batch'"),
    ({"vllm_weight_sync": None}, r"vllm_weight_sync \(None\) must be one of 'nccl'"),
    ({"scale_rewards": None}, r"scale_rewards \(None\) must be one of 'none'"),
    (EST | {"allocation_rule": None}, r"allocation_rule \(None\) must be one of 'power'"),
    # choices and numbers
    ({"baseline": "oracle"}, r"baseline \('oracle'\) must be one of 'pool', 'batch'"),
    ({"adaptive_sampling": "seq"}, r"adaptive_sampling \('seq'\) must be one of 'seq-balance'.*'uniform'"),
    (EST | {"pass_rate_estimator": "oracle"}, r"pass_rate_estimator \('oracle'\) must be one of 'ema', 'value'"),
    ({"zero_variance_groups": "drop"}, r"zero_variance_groups \('drop'\) must be one of 'keep', 'mask'"),
    ({"scale_rewards": "std"}, r"scale_rewards \('std'\) must be one of"),
    ({"vllm_weight_sync": "gloo"}, r"vllm_weight_sync \('gloo'\) must be one of 'nccl', 'lora', 'disk'"),
    ({"prompt_weighting": "sqrt"}, r"prompt_weighting \('sqrt'\) must be one of 'inverse_sqrt'"),
    ({"prompt_weighting": 1.5}, r"prompt_weighting \(1.5\) must be .* a number alpha from 0 to 1"),
    ({"prompt_weighting": "-0.5"}, r"prompt_weighting \('-0.5'\) must be .* a number alpha from 0 to 1"),
    ({"prompt_weighting": float("nan")}, r"prompt_weighting \(nan\) must be"),
    ({"num_generations": 3}, r"generation_batch_size \(8\) must be divisible by num_generations \(3\)"),
    ({"num_generations": 1}, r"num_generations \(1\) requires baseline='batch'.*>= 2"),
    # rounds
    ({"samples_per_round": 2}, r"samples_per_round \(2\) must be at least num_generations \(4\).*Raise"),
    ({"max_rounds": 0}, r"max_rounds \(0\) must be at least 1"),
    ({"min_positives": 0}, r"min_positives \(0\) must be at least 1"),
    ({"min_negatives": -1}, r"min_negatives \(-1\) must be at least 1"),
    (
        {"min_positives": 30, "min_negatives": 3},
        r"min_positives \(30\) and min_negatives \(3\) can never .*\(4\) \* max_rounds \(8\)",
    ),
    (SEQ_POS | {"min_negatives": 2}, r"min_negatives \(2\) is only used with .*seq-balance"),
    (SEQ_POS | {"min_samples": 3}, r"min_samples \(3\) is only used with .*'est'.*but .*'seq-pos'.*Unset"),
    (UNIFORM | {"max_rounds": 9}, r"max_rounds \(9\) is only used with .*'seq-balance'.*but .*'uniform'"),
    # budgets
    (EST | {"min_samples": 5}, r"4 rollouts cannot give 1 prompts min_samples \(5\).*num_generations \(4\)"),
    (EST | {"max_samples": 3}, r"4 rollouts does not fit .*max_samples \(3\).*num_generations \(4\)"),
    *(
        (EST | options, r"min_samples \(\d\) and max_samples \(\d+\) give every prompt the same number")
        for options in ({"num_generations": 2}, {"max_samples": 4})
    ),
    (EST | {"min_samples": 0}, r"min_samples \(0\) must be at least 1"),
    (EST | {"min_samples": 4, "max_samples": 2}, r"min_samples \(4\) must be between 0 and max_samples \(2\)"),
    (EST | {"samples_per_round": 8}, r"samples_per_round \(8\) is only used with .*'seq-balance'.*but .*'est"),
    (EST | {"min_positives": 2}, r"min_positives \(2\) is only used with"),
    (EST | {"allocation_rule": "optimal"}, r"allocation_rule \('optimal'\) must be one of 'power', 'variance'"),
    (EST | {"allocation_rule": -1.0}, r"allocation_rule \(-1.0\) must be one of .* or a number of at least 0"),
    # other baselines
    (BATCH | {"zero_variance_groups": "mask"}, r"zero_variance_groups \('mask'\) is only used with baseline='pool'"),
    (BATCH | {"accelerator_config": {"split_batches": True}}, r"accelerator_config \(.*must not have split_batches"),
    (BATCH | {"samples_per_round": 4}, r"samples_per_round \(4\) is only used with .*but .*baseline='batch'"),
    (
        BATCH | {"multi_objective_aggregation": "normalize_then_sum"},
        r"\('normalize_then_sum'\) requires baseline='pool'",
    ),
    (BATCH | {"scale_rewards": "group"}, r"scale_rewards \('group'\) .*requires baseline='pool'.*'none' .*or 'batch'"),
    (BATCH | {"prompt_weighting": "inverse"}, r"prompt_weighting \('inverse'\) requires baseline='pool'"),
    (BATCH | {"pass_rate_estimator": "value"}, r"pass_rate_estimator \('value'\) .*baseline='batch'"),
    # selection of prompts
    ({"retries": 3}, r"retries \(3\) is only used with baseline='batch'.*Unset"),
    (RETRIES | {"retries": -1}, r"retries \(-1\) must be at least 0"),
    (RETRIES | {"max_rounds": 3}, r"max_rounds \(3\) is only used with .*'uniform' and baseline='batch'"),
    (RETRIES | EST, r"retries \(3\) are not supported with adaptive_sampling='est'"),
    (
        SEQ_POS | {"baseline": "batch"},
        r"adaptive_sampling \('seq-pos'\) requires baseline='pool' .*Use retries=2 instead",
    ),
    (
        {"baseline": "batch", "adaptive_sampling": "seq-balance"},
        r"\('seq-balance'\) requires baseline='pool' .*retries=2",
    ),
    (
        RETRIES | {"zero_variance_groups": "resample"},
        r"zero_variance_groups \('resample'\) .* baseline='pool', but .*'batch'",
    ),
    (REPLACE | {"max_rounds": 1}, r"\('resample'\) requires max_rounds >= 2 .*got 1.*Raise"),
    (
        {"zero_variance_groups": "mask", "beta": 0.1, "loss_type": "dr_grpo"},
        r"zero_variance_groups \('mask'\) with beta \(0.1\) is not supported with loss_type='dr_grpo'.*'dapo'",
    ),
    (EST | {"zero_variance_groups": "resample"}, r"\('resample'\) samples another .*'est' gives every prompt"),
    (BATCH_OF_ONE | {"baseline": "batch"}, "baseline='batch' requires .* at least 2 rollouts, got 1.*per_device"),
    # the vLLM server
    (
        {"vllm_weight_sync": "disk"},
        r"vllm_weight_sync \('disk'\) is only used .*'server', but use_vllm=False and vllm_mode='colocate'\. Unset it",
    ),
    ({"positive_threshold": float("nan")}, r"positive_threshold \(nan\) must be finite"),
    (AHEAD | {"max_staleness": 2}, r"max_staleness \(2\) must be one of 0, 1"),
    (AHEAD | {"generation_kwargs": {"seed": 1}}, r"'seed': 1\}\) must not contain 'seed' with vLLM.*Remove it"),
    ({"max_staleness": 1}, r"max_staleness \(1\) is only used with use_vllm=True .*, but use_vllm=False and"),
    (AHEAD | {"vllm_mode": "colocate"}, r"max_staleness \(1\) is only used with .*vllm_mode='server'"),
    (AHEAD | {"vllm_importance_sampling_correction": False}, "requires vllm_importance_sampling_correction=True"),
    (AHEAD | {"adaptive_sampling": "seq-balance"}, "only modes with one sampling round per step"),
    (AHEAD | {"zero_variance_groups": "resample"}, "only modes with one sampling round per step"),
]


@pytest.mark.parametrize(("overrides", "message"), INVALID)
def test_invalid_values_raise_an_error_with_a_fix(overrides, message):
    with pytest.raises(ValueError, match=message):
        config(**overrides)


@pytest.mark.parametrize("number", [np.int64, np.float64, torch.tensor, float], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "options",
    [
        {"num_generations": 2, "samples_per_round": 4, "max_rounds": 3, "min_positives": 2, "min_negatives": 2},
        {
            "adaptive_sampling": "est",
            "min_samples": 1,
            "max_samples": 8,
            "allocation_rule": 1,
            "positive_threshold": 1,
        },
        {"baseline": "batch", "retries": 2, "vllm_request_timeout": 60, "scale_rewards": np.str_("batch")},
        {"adaptive_sampling": "uniform", "max_staleness": 0, "prompt_weighting": 1, "scale_rewards": np.True_},
    ],
    ids=lambda options: ", ".join(options),
)
def test_numbers_of_sweeps(options, number):
    """Numbers of NumPy, tensors, and floats in place of integers are the same options as numbers of Python."""
    converted = {name: number(value) if type(value) is int else value for name, value in options.items()}
    values = fields_of(config(**converted))
    assert values == fields_of(config(**options))
    assert {type(value) for value in values.values()} <= {int, float, str, type(None)}
    mode = {name: value for name, value in options.items() if name in ("adaptive_sampling", "baseline")}
    set_later = set_options(config(**mode), converted)
    set_later.resolve()
    assert fields_of(set_later) == values


def test_integers_of_numpy_for_options_of_trl():
    args = config(baseline="batch", num_iterations=np.int64(2), num_generations_eval=np.int64(2))
    assert type(args.num_iterations) is type(args.num_generations_eval) is int


@pytest.mark.parametrize(
    ("given", "kept"), [("inverse", "inverse"), ("0.25", 0.25), (0.25, 0.25), (1, 1.0), ("0", 0.0)]
)
def test_weights_are_names_or_powers(given, kept):
    assert config(prompt_weighting=given).prompt_weighting == kept
    if kept == 1:  # is no weight
        assert config(**BATCH, prompt_weighting=given).prompt_weighting == kept


def build(args):
    return AdaGRPOTrainer(tiny_model(), even_reward, args, prompt_dataset(), processing_class=tiny_tokenizer())


# Options that are set on the configuration before the trainer is built, as sweeps do

CHANGES = [
    {"num_generations": 8},
    {"num_generations": 2, "samples_per_round": 6},
    {"baseline": "batch"},
    {"baseline": "batch", "retries": 2},
    {"adaptive_sampling": "est"},
    {"adaptive_sampling": "uniform"},
    {"prompt_weighting": "0.25"},
    {"scale_rewards": "group"},
    {"scale_rewards": True},
    {"zero_variance_groups": "resample"},
    {"output_dir": "elsewhere"},
]


def fields_of(args):
    return {name: getattr(args, name) for name in (*AdaGRPOConfig.__annotations__, "num_generations_eval")}


def set_options(args, options):
    for name, value in options.items():
        setattr(args, name, value)
    return args


COPIES = {
    "same": lambda args: args,
    "copied": copy.deepcopy,
    "saved and loaded": lambda args: pickle.loads(pickle.dumps(args)),
    "used before": lambda args: build(args).args,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("options", CHANGES, ids=str)
def test_options_set_on_the_configuration_are_as_in_the_constructor(options, way):
    trainer = build(set_options(COPIES[way](config()), options))
    expected = build_config(**{"output_dir": "unused"} | QUICK | options)
    assert fields_of(trainer.args) == fields_of(expected)


def test_options_set_on_a_copy_do_not_count_as_set_on_the_original():
    original = config()
    set_options(copy.copy(original), {"num_generations": 4})  # the derived value
    assert build(set_options(original, {"baseline": "batch"})).args.num_generations == 1


def test_a_rejected_configuration_can_be_corrected():
    args = set_options(config(), {"num_generations": 1})
    with pytest.raises(ValueError, match="requires baseline='batch'"):
        build(args)
    assert fields_of(build(set_options(args, {"baseline": "batch"})).args) == fields_of(
        config(num_generations=1, baseline="batch")
    )
    assert build(set_options(args, {"baseline": "pool", "num_generations": None})).args.samples_per_round == 4


def test_values_that_were_set_stay_when_other_options_change():
    args = set_options(config(num_generations=2, samples_per_round=6), {"max_rounds": 2})
    assert (build(args).args.num_generations, args.samples_per_round) == (2, 6)
    explicit = set_options(config(num_generations=4, prompt_weighting="none"), {"baseline": "batch"})
    assert build(explicit).args.num_generations == 4
    assert build(set_options(explicit, {"baseline": "pool"})).args.prompt_weighting == "none"


@pytest.mark.parametrize(
    "options",
    [{"num_generations": 3}, {"max_staleness": 1}, {"baseline": "batch", "zero_variance_groups": "resample"}],
    ids=str,
)
def test_invalid_options_set_on_the_configuration_are_rejected_when_the_trainer_is_built(options):
    with pytest.raises(ValueError, match=list(options)[-1]):
        build(set_options(config(), options))


def test_plain_grpo_config_is_rejected():
    with pytest.raises(TypeError, match=r"needs an AdaGRPOConfig .* got GRPOConfig. Replace GRPOConfig\(…\)"):
        build(GRPOConfig("unused", **QUICK))


@pytest.mark.parametrize("options", [{"baseline": "batch"}, {}, {"adaptive_sampling": "uniform"}])
def test_another_trainer_is_rejected(options):
    """It would ignore the options. A configuration that an AdaGRPOTrainer has used is not accepted either."""
    args = config(**options)
    build(args)
    with pytest.raises(TypeError, match=r"needs an AdaGRPOTrainer.*Replace GRPOTrainer\(…\) by AdaGRPOTrainer\(…\)"):
        GRPOTrainer(tiny_model(), even_reward, args, prompt_dataset(), processing_class=tiny_tokenizer())


@pytest.mark.parametrize("options", [{"baseline": "batch"}, {}])
@pytest.mark.parametrize("is_used", [False, True])
def test_other_trainers_and_inspectors_read_a_configuration(is_used, options):
    """Such as a callback that saves the final model with a trainer of the arguments."""
    args = config(**options)
    if is_used:
        build(args)
    fields = args.to_dict()
    del fields["generation_batch_size"]  # GRPOConfig does not take it together with steps_per_generation
    for given in (args, copy.deepcopy(args), pickle.loads(pickle.dumps(args)), AdaGRPOConfig(**fields)):
        assert {"baseline", "place_model_on_device"} <= dict(inspect.getmembers(given)).keys()
        trainer = Trainer(tiny_model(), given, processing_class=tiny_tokenizer(), eval_dataset=["none"])
        assert trainer.args is given and trainer.place_model_on_device


def test_default_args_are_adaptive(monkeypatch):
    class OnCPU(AdaGRPOConfig):
        def __init__(self, output_dir):
            super().__init__(output_dir, **QUICK)

    monkeypatch.setattr("ada_trl.trainer.ada_grpo_trainer.AdaGRPOConfig", OnCPU)
    model = tiny_model()
    model.config._name_or_path = "org/tiny"
    trainer = AdaGRPOTrainer(model, even_reward, train_dataset=prompt_dataset(), processing_class=tiny_tokenizer())
    assert trainer.args.output_dir == "tiny-AdaGRPO"


@pytest.mark.parametrize("mode", [{}, {"adaptive_sampling": "seq-pos"}, {"adaptive_sampling": "est"}], ids=str)
def test_a_division_by_the_deviation_of_the_group_is_the_only_weight(mode):
    """A script that keeps `scale_rewards="group"` would otherwise multiply both weights of hard prompts."""
    assert config(**mode, scale_rewards="group").prompt_weighting == "none"
    assert config(**mode, multi_objective_aggregation="normalize_then_sum").prompt_weighting == "none"
    assert config(**mode, scale_rewards="group", prompt_weighting="inverse").prompt_weighting == "inverse"
    assert config(**mode).prompt_weighting == "inverse_sqrt"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"baseline": "batch", "per_device_eval_batch_size": 16}, 8),
        ({"baseline": "batch", "per_device_eval_batch_size": 12}, 6),
        ({"baseline": "batch", "per_device_eval_batch_size": 1}, 1),
        ({"baseline": "batch", "per_device_eval_batch_size": 8, "num_generations_eval": 2}, 2),
        ({"baseline": "batch", "per_device_eval_batch_size": 8, "num_generations": 4}, None),
        ({"per_device_eval_batch_size": 8}, None),
    ],
)
def test_evaluations_sample_up_to_eight_completions_where_a_step_samples_one(options, expected):
    """`None` is TRL's default, `num_generations`."""
    assert config(**options).num_generations_eval == expected


# Options that are set between the construction of a trainer and `train()`, or during training


class Schedule(TrainerCallback):
    """Sets options after the first step."""

    def __init__(self, **options):
        self.options = options

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            set_options(args, self.options)


RETRIES_OF_TWO = {"baseline": "batch", "retries": 2}


@pytest.mark.parametrize(
    ("options", "change"),
    [
        (RETRIES_OF_TWO, {"retries": 0}),
        (BATCH, {"retries": 2}),
        (REPLACE, {"zero_variance_groups": "keep"}),
        (UNIFORM, {"zero_variance_groups": "resample"}),
        (REPLACE, {"max_rounds": 3}),  # the number of candidates, for which the queue was built
        ({}, {"adaptive_sampling": "uniform"}),
        ({}, {"baseline": "batch"}),
        (UNIFORM, {"pass_rate_estimator": "ema"}),
        ({}, {"num_generations": 8}),
    ],
    ids=str,
)
def test_an_option_that_is_fixed_during_training_is_named(options, change, tmp_path):
    trainer = build_trainer(tmp_path, callbacks=[Schedule(**change)], **options)
    ((name, value),) = change.items()
    when = "another trainer is built" if name == "num_generations" else r"the next call of `train\(\)`"
    with pytest.raises(
        ValueError, match=f"{name} was changed from .* to {value!r} during training.* takes effect .*{when}"
    ):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_schedule_of_rounds_takes_effect_in_the_next_step(tmp_path):
    trainer = build_trainer(tmp_path, lambda completions, **kwargs: [0.0] * len(completions))
    trainer.add_callback(Schedule(max_rounds=1, prompt_weighting="none"))
    trainer.train()
    assert [rollouts.size_P.tolist() for rollouts in trainer.rollouts] == [[32] * 2, [4] * 2]
    assert trainer.mode.prompt_weighting == "none"


def test_a_schedule_of_the_threshold_takes_effect_in_the_next_step(tmp_path):
    half = build_trainer(tmp_path, lambda completions, **kwargs: [0.5] * len(completions), **RETRIES_OF_TWO)
    half.add_callback(Schedule(positive_threshold=0.4))
    half.train()
    assert [rollouts.positives_P.sum() for rollouts in half.rollouts] == [0, 8]


def test_an_invalid_value_of_a_schedule_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"max_rounds \(0\) must be at least 1"):
        build_trainer(tmp_path, callbacks=[Schedule(max_rounds=0)]).train()
    with pytest.raises(ValueError, match=r"success_reward \('accuracy'\) must be"):
        build_trainer(tmp_path, callbacks=[Schedule(success_reward="accuracy")]).train()


@pytest.mark.parametrize(
    ("options", "change"),
    [
        (BATCH, {"retries": 2}),
        (RETRIES_OF_TWO, {"retries": 0}),
        ({}, {"adaptive_sampling": "uniform"}),
        ({}, {"adaptive_sampling": "est"}),
        ({}, {"zero_variance_groups": "resample"}),
    ],
    ids=str,
)
def test_options_set_before_a_training_are_those_of_a_trainer_built_with_them(options, change, tmp_path):
    changed = build_trainer(tmp_path, **options)
    set_options(changed.args, change)
    changed.train()
    expected = build_trainer(tmp_path, **options | change)
    expected.train()
    assert changed.mode == expected.mode and torch.equal(weights_of(changed), weights_of(expected))
    assert (changed.pass_rates is None) == (expected.pass_rates is None)


def test_options_set_before_a_training_are_checked(tmp_path):
    trainer = build_trainer(tmp_path, **UNIFORM)
    with pytest.raises(ValueError, match=r"retries \(2\) is only used with baseline='batch'"):
        set_options(trainer.args, {"retries": 2}) and trainer.train()
    # The number of rollouts follows from the baseline, and the trainer was built with another one.
    for _ in range(2):  # also if the training is tried again
        with pytest.raises(
            ValueError, match=r"num_generations \(1\) was 4 when this trainer was built.*another trainer"
        ):
            set_options(trainer.args, {"baseline": "batch"}) and trainer.train()
    set_options(trainer.args, {"num_generations": 4}) and trainer.train()


def test_an_option_that_trl_reads_at_construction_does_not_change_the_weights_of_prompts(tmp_path):
    trainer = build_trainer(tmp_path)
    set_options(trainer.args, {"scale_rewards": "group"})
    trainer.train()
    assert (trainer.scale_rewards, trainer.mode.prompt_weighting) == ("none", "inverse_sqrt")
