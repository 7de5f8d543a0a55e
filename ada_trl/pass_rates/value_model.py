"""Value model: a separate sequence-classification model that predicts the pass rate of a prompt."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ..core.prompt_id import prompt_text
from .network import ValueNetwork, outcome_tensor


VALUE_MODEL_FILE = "ada_value_model.safetensors"

_MAX_GRAD_NORM = 1.0


class ValueModel(ValueNetwork):
    """
    p̂ = σ(s(x) + b), where s is a sequence-classification model with one label and b a scalar: a
    [`~pass_rates.network.ValueNetwork`] with a separate model and tokenizer. With `of_rewards` the prediction is
    ẑ = s(x) + b itself, by least squares, for [`~core.RewardEstimator`].

    If the model on disk has no classification layer for one label, s starts at 0 and b such that every prediction is the prior
    mean. A model that has one is used as it is: b starts at 0.

    Every rank holds a whole copy outside of the policy's wrapper (DDP, FSDP, DeepSpeed), so that it may have any size and
    be updated at any time. The prompts are divided evenly over the ranks; predictions and gradients are summed, and every rank
    makes the same AdamW step. Without communication every rank would have to train on the whole batch, which for a model of the
    policy's size costs as much as training the policy itself on a few completions each. Sums over ranks are the same on all of
    them, so the copies stay equal; between different numbers of ranks they differ by rounding.

    Parameters are float32, and forward passes bfloat16 if the run is (float16 would need a separate gradient scaler).
    Dropout stays off, so that predictions are reproducible and no random numbers are used. The learning rate is constant,
    without weight decay, and gradients are clipped to norm 1.

    Args:
        name (`str`):
            Name of the model and its tokenizer on the hub, or a local path.
        accelerator (`Accelerator`):
            The run's accelerator: device, ranks, mixed precision.
        of_rewards (`bool`, *optional*, defaults to `False`):
            Whether to predict rewards, in standard deviations from their mean, instead of pass rates.
        prior_mean (`float`, *optional*, defaults to `1/17`):
            Initial prediction of a pass rate by a model without a classification layer.
        batch_size (`int`, *optional*, defaults to `8`):
            Prompts per forward pass on each rank; limits memory and changes nothing else.

    Raises:
        `ValueError`: if the tokenizer has no token to pad with.
    """

    kind = "value model"
    filename = VALUE_MODEL_FILE
    learning_rate = 1e-5
    gradient_steps = 1

    def __init__(
        self,
        name: str,
        accelerator: Accelerator,
        *,
        of_rewards: bool = False,
        prior_mean: float = 1 / 17,
        batch_size: int = 8,
    ) -> None:
        self.accelerator = accelerator
        self.of_rewards = of_rewards
        self.batch_size = batch_size
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.tokenizer.pad_token is None:
            raise ValueError(f"The tokenizer of value_model ({name!r}) has neither pad_token nor eos_token. Set one.")
        self.model, is_new = _load(name, accelerator)
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        bias = math.log(prior_mean / (1 - prior_mean)) if is_new and not of_rewards else 0.0
        self.bias = nn.Parameter(torch.tensor(bias, dtype=torch.float32, device=accelerator.device))
        parameters = {f"model.{name}": parameter for name, parameter in self.model.named_parameters()}
        parameters["bias"] = self.bias
        super().__init__(parameters, lr=self.learning_rate, weight_decay=0.0)

    def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Tokenize prompts: text as it is, conversations by the chat template if the tokenizer has one."""
        token_ids = []
        for prompt in prompts:
            is_chat = self.tokenizer.chat_template is not None and not isinstance(prompt, str)
            if is_chat:  # the template adds the special tokens
                text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            else:
                text = prompt_text(prompt)
            token_ids.append(self.tokenizer(text, truncation=True, add_special_tokens=not is_chat)["input_ids"])
        return token_ids

    @torch.no_grad()
    def predict(self, inputs: list[list[int]]) -> list[float]:
        """Return p̂ (or ẑ), one per prompt of [`encode`]. Collective."""
        predictions = torch.zeros(len(inputs), dtype=torch.float32, device=self.accelerator.device)
        for rows in self._local_batches(len(inputs)):
            values = self._values(inputs[rows])
            predictions[rows] = values if self.of_rewards else values.sigmoid()
        return self.accelerator.reduce(predictions, reduction="sum").tolist()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def observe(self, inputs: list[list[int]], sums: Sequence[float], num_rollouts: Sequence[int]) -> None:
        """Train on one step, as in the base class. Collective."""
        outcomes, scored = outcome_tensor(sums, num_rollouts)
        if not scored.any():
            return
        inputs = [row for row, is_scored in zip(inputs, scored.tolist(), strict=True) if is_scored]
        outcomes = outcomes[scored].to(self.accelerator.device)  # (P, 2)
        for _ in range(self.gradient_steps):
            self.optimizer.zero_grad(set_to_none=False)
            for rows in self._local_batches(len(inputs)):
                k, n = outcomes[rows].T
                values = self._values(inputs[rows])
                if self.of_rewards:
                    loss = (n * (values - k / n).square()).sum()
                else:
                    loss = nn.functional.binary_cross_entropy_with_logits(values, k / n, weight=n, reduction="sum")
                (loss / outcomes[:, 1].sum()).backward()
            self._step()

    def _step(self) -> None:
        parameters = list(self._trained.values())
        for parameter in parameters:
            # A rank without a prompt has no gradient, and takes part in the sum nevertheless.
            local = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.accelerator.reduce(local, reduction="sum")
        nn.utils.clip_grad_norm_(parameters, _MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _local_batches(self, num_prompts: int) -> Iterator[slice]:
        """Yield this rank's even part of `num_prompts` prompts, in batches."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        first, end = num_prompts * rank // ranks, num_prompts * (rank + 1) // ranks
        for start in range(first, end, self.batch_size):
            yield slice(start, min(start + self.batch_size, end))

    def _values(self, ids: list[list[int]]) -> torch.Tensor:
        # To the right: models that compute positions themselves number them from the left.
        padded = self.tokenizer.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
        device = self.accelerator.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.accelerator.mixed_precision == "bf16"):
            logits = self.model(**padded.to(device)).logits
        return logits.squeeze(1).float() + self.bias


def _load(name: str, accelerator: Accelerator) -> tuple[nn.Module, bool]:
    """Return the model, the same on all ranks, and whether its last layer is new (then it is set to zero)."""
    plugin = accelerator.state.deepspeed_plugin
    # ZeRO-3 would otherwise shard the model while it is loaded.
    unsharded = contextlib.nullcontext() if plugin is None else plugin.zero3_init_context_manager(enable=False)
    with unsharded, torch.random.fork_rng(devices=[]):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=1, dtype=torch.float32, output_loading_info=True
        )
    new_parameters = [p for key, p in model.named_parameters() if key in info["missing_keys"]]
    last_layer = [parameter for parameter in new_parameters if len(parameter) == 1]  # of one label
    with torch.no_grad():
        for parameter in last_layer:
            parameter.zero_()
        model.to(accelerator.device).eval()
        # New layers are random, and if FSDP loads weights on one rank only, the others have none.
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(broadcast(tensor.data))
    return model, bool(last_layer)
