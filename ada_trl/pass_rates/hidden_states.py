"""Hidden states of the policy at the last token of its prompts, the input of a value head."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel, is_peft_model
from torch import nn


def backbone_of(model: nn.Module) -> nn.Module:
    """
    Return the module whose output the policy's LM head receives.

    It is the decoder and not the base model, because some models (OPT, BART) never call the forward of their base
    model: their LM class calls the decoder inside of it, so that a hook on the base model would not run.
    """
    policy = extract_model_from_parallel(model)
    policy = policy.get_base_model() if is_peft_model(policy) else policy
    decoder = policy.get_decoder() if hasattr(policy, "get_decoder") else None
    return policy.base_model if decoder is None or decoder is policy else decoder


@torch.no_grad()
def last_hidden_states(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, *, batch_size: int
) -> torch.Tensor:
    """
    Compute the policy's last hidden state at the last prompt token, from which the LM head predicts the first
    completion token.

    The forward of the model is called as it is given, so that FSDP, DeepSpeed and DDP gather their shards. Logits are
    computed for one position per prompt, and unlike with `output_hidden_states=True` no other layer's states are
    stored. The hook is on the backbone, since TRL's fused head does not call the head's module. Dropout is off, no
    random numbers are used and the mode of every module is restored.

    Args:
        model (`nn.Module`):
            A causal language model, plain, PEFT-wrapped or prepared by `accelerate`. If it is sharded, every rank must
            call this with the same number of prompts and the same `batch_size`.
        input_ids (`torch.Tensor`):
            Prompts, `(P, T)`, padded on either side.
        attention_mask (`torch.Tensor`):
            1 for tokens and 0 for padding, `(P, T)`; at least one token per prompt.
        batch_size (`int`):
            Prompts per forward pass.

    Returns:
        `torch.Tensor`: `(P, H)`, float32, on the device of the model's output.
    """
    # Move all padding to the left, so that the last position is the last prompt token of every row.
    order = attention_mask.argsort(dim=1, stable=True)
    input_ids, attention_mask = input_ids.gather(1, order), attention_mask.gather(1, order)
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    modes = [(module, module.training) for module in model.modules()]
    captured: list[torch.Tensor] = []

    def capture(module: nn.Module, args: tuple, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output.last_hidden_state  # (B, T, H)
        captured.append(states[:, -1].float())

    hook = backbone_of(model).register_forward_hook(capture)
    model.eval()
    try:
        for start in range(0, len(input_ids), batch_size):
            rows = slice(start, start + batch_size)
            model(
                input_ids=input_ids[rows],
                attention_mask=attention_mask[rows],
                position_ids=position_ids[rows],
                logits_to_keep=1,
                use_cache=False,
            )
    finally:
        hook.remove()
        for module, training in modes:
            module.training = training
    return torch.cat(captured)


class HiddenStateExtractor:
    """
    Reads the policy's hidden states for the prompts of all ranks.

    Args:
        policy (`Callable[[], nn.Module]`):
            Returns the current model, see [`last_hidden_states`].
        accelerator (`Accelerator`):
            The run's accelerator.
        tokenize (`Callable[[list], list[list[int]]]`):
            Converts prompts to token ids.
        pad_token_id (`int`):
            Padding token of the tokenizer.
        batch_size (`int`):
            Prompts per forward pass.
    """

    def __init__(
        self,
        policy: Callable[[], nn.Module],
        accelerator: Accelerator,
        tokenize: Callable[[list], list[list[int]]],
        *,
        pad_token_id: int,
        batch_size: int,
    ):
        self.policy, self.accelerator, self.tokenize = policy, accelerator, tokenize
        self.pad_token_id, self.batch_size = pad_token_id, batch_size

    @property
    def size(self) -> int:
        """H, also known if the weights are sharded."""
        return self.policy().get_output_embeddings().in_features

    def read(self, prompts: Sequence[Any]) -> torch.Tensor:
        """
        Compute [`last_hidden_states`] of all prompts, divided evenly over the ranks. Collective.

        If the prompts do not divide evenly, the last one is repeated, so that every rank of a sharded model makes the
        same number of forward passes. Mixed precision is that of the model's forward, which `accelerate` has prepared.

        Returns:
            `torch.Tensor`: `(P, H)` on the CPU, the same on every rank.
        """
        ranks, device = self.accelerator.num_processes, self.accelerator.device
        per_rank = -(-len(prompts) // ranks)
        padded = [*prompts, *[prompts[-1]] * (per_rank * ranks - len(prompts))]
        ids = self.tokenize(padded[self.accelerator.process_index * per_rank :][:per_rank])
        padding = [max(map(len, ids)) - len(row) for row in ids]
        # (per_rank, T)
        input_ids = torch.tensor([[self.pad_token_id] * p + row for p, row in zip(padding, ids, strict=True)])
        mask = (torch.arange(input_ids.size(1)) >= torch.tensor(padding)[:, None]).long()
        states = last_hidden_states(self.policy(), input_ids.to(device), mask.to(device), batch_size=self.batch_size)
        return self.accelerator.gather(states.contiguous())[: len(prompts)].cpu()
