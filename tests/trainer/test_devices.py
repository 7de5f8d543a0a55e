"""Devices without float64, such as Apple's GPUs, where accelerate puts the model and the rewards of all ranks."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from ada_trl import AdaGRPOConfig, AdaGRPOTrainer

from ..helpers import QUICK, even_reward, prompt_dataset, tiny_model, tiny_tokenizer


class DeviceWithoutFloat64(TorchFunctionMode):
    """
    Tensors that are placed on a `torch.device`, and those that are computed from them, count as being on a device
    until `.cpu()` or `.to("cpu")` copies them. One of them in float64 is a `TypeError`, as on MPS.
    """

    def __init__(self):
        super().__init__()
        self.places = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name, given = getattr(function, "__name__", ""), [*args, *kwargs.values()]
        if name == "cpu" or (name == "to" and "cpu" in [word for word in given if isinstance(word, str)]):
            return result.clone()  # on the CPU, which returns the same tensor
        is_placed = any(isinstance(word, torch.device) for word in given)
        is_placed |= any(getattr(leaf, "is_on_device", False) for leaf in tree_flatten((args, kwargs))[0])
        if is_placed and name not in ("__set__", "__get__"):
            self.places += 1
            tree_map(self.place, result)
        return result

    def place(self, value):
        if isinstance(value, torch.Tensor):
            if value.dtype == torch.float64:
                raise TypeError(
                    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
                )
            value.is_on_device = True
        return value


@pytest.mark.parametrize("make", [lambda x: x.double(), lambda x: x.to(torch.float64), lambda x: x.type(torch.double)])
def test_the_device_has_no_float64(make):
    with DeviceWithoutFloat64():
        on_device = torch.zeros(2).to(torch.device("cpu")) + 1
        with pytest.raises(TypeError, match="float64"):
            make(on_device)
        with pytest.raises(TypeError, match="float64"):
            torch.tensor([1.0], dtype=torch.float64, device=torch.device("cpu"))
        assert on_device.cpu().double().dtype == on_device.to("cpu").to(torch.float64).dtype == torch.float64


UNIFORM = {"adaptive_sampling": "uniform", "num_generations": 4}
MODES = {
    "GRPO": UNIFORM | {"scale_rewards": "group"},
    "GDPO": UNIFORM | {"multi_objective_aggregation": "normalize_then_sum"},
    "weights": UNIFORM | {"prompt_weighting": "inverse"},
    "Seq-balance": {},
    "Seq-pos": {"adaptive_sampling": "seq-pos", "log_completions": True},
    "Est": {"adaptive_sampling": "est"},
    "Est with a value head": {"adaptive_sampling": "est", "pass_rate_estimator": "value"},
    "batch baseline": {"baseline": "batch", "scale_rewards": "batch"},
    "retries": {"baseline": "batch", "retries": 2},
    "mask": UNIFORM | {"zero_variance_groups": "mask", "loss_type": "grpo"},
    "skip": UNIFORM | {"zero_variance_groups": "skip", "loss_type": "bnpo"},
    "resample": UNIFORM | {"zero_variance_groups": "resample"},
    "masked truncations": {"mask_truncated_completions": True},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_no_tensor_on_a_device_is_in_float64(mode, tmp_path):
    """In training, evaluation and checkpoints."""
    options = QUICK | {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1} | mode
    model, device = tiny_model(), DeviceWithoutFloat64()
    for parameter in model.parameters():
        parameter.is_on_device = True
    args = AdaGRPOConfig(str(tmp_path), **options)
    advantages = None if mode else lambda rollouts: torch.tensor(rollouts.reward_N)
    with device:
        trainer = AdaGRPOTrainer(
            model,
            even_reward,
            args,
            prompt_dataset(),
            prompt_dataset(1),
            processing_class=tiny_tokenizer(),
            advantage_func=advantages,
        )
        trainer.train()
    assert device.places > 100, "Nothing was on the device."
