"""The policy's hidden states at the last token of its prompts: what a value head reads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel, is_peft_model
from torch import nn


@contextmanager
def capture_hidden_states(
    model: nn.Module, position: int, *, first_only: bool = False
) -> Iterator[list[torch.Tensor]]:
    """
    While the block runs, catch the policy's last hidden state at one position of every sequence in its forward passes: with
    the last prompt token's position, what its LM head predicts the first completion token from. It is caught where the
    backbone hands it on, since TRL's fused head does not call the head's module.

    Args:
        model (`nn.Module`):
            A causal language model, plain, PEFT-wrapped or prepared by `accelerate`.
        position (`int`):
            Of each sequence, such as -1.
        first_only (`bool`, *optional*, defaults to `False`):
            Only of the first forward pass: the prefill of a generation. It is watched no longer, so that what is compiled
            for the decoding does not see it.

    Yields:
        `list[torch.Tensor]`: `(B, H)` of each forward pass, float32, on the device of the backbone's output.
    """
    caught: list[torch.Tensor] = []

    def keep(module: nn.Module, given: tuple, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output.last_hidden_state  # (B, T, H)
        caught.append(states[:, position].detach().float())
        if first_only:
            hook.remove()

    policy = extract_model_from_parallel(model)
    policy = policy.get_base_model() if is_peft_model(policy) else policy
    hook = policy.base_model.register_forward_hook(keep)
    try:
        yield caught
    finally:
        hook.remove()


@torch.no_grad()
def last_hidden_states(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, *, batch_size: int | None = None
) -> torch.Tensor:
    """
    The policy's last hidden state at the last prompt token, by a forward pass of its own.

    The prompts go through the forward of the model as it is given, so that FSDP, DeepSpeed and DDP gather what they
    must. With one position kept, the head costs one row of logits per prompt; unlike `output_hidden_states=True`, no other
    layer's states are held. Dropout is off, no random number is drawn and the mode of every module is restored.

    Args:
        model (`nn.Module`):
            See [`capture_hidden_states`]. If it is sharded, every process must call this with the same number of prompts and the
            same `batch_size`.
        input_ids (`torch.Tensor`):
            Prompts, `(P, T)`, padded on either side.
        attention_mask (`torch.Tensor`):
            1 for tokens and 0 for padding, `(P, T)`; at least one token per prompt.
        batch_size (`int`, *optional*):
            Prompts per forward pass; all at once if `None`.

    Returns:
        `torch.Tensor`: `(P, H)`, float32, on the device of the model's output.
    """
    # Padding to the left, wherever it was: then the last position is the last prompt token of every row.
    order = attention_mask.argsort(dim=1, stable=True)
    input_ids, attention_mask = input_ids.gather(1, order), attention_mask.gather(1, order)
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with capture_hidden_states(model, -1) as caught:
            for start in range(0, len(input_ids), batch_size or len(input_ids)):
                rows = slice(start, start + (batch_size or len(input_ids)))
                model(
                    input_ids=input_ids[rows],
                    attention_mask=attention_mask[rows],
                    position_ids=position_ids[rows],
                    logits_to_keep=1,
                    use_cache=False,
                )
    finally:
        for module, training in modes:
            module.training = training
    return torch.cat(caught)


class HiddenStateExtractor:
    """
    The policy's hidden states of the prompts of all processes.

    Args:
        policy (`Callable[[], nn.Module]`):
            Gives the model as it is at the time, see [`capture_hidden_states`].
        accelerator (`Accelerator`):
            This process and the others.
        tokenize (`Callable[[list], list[list[int]]]`):
            Prompts to token ids.
        pad_token_id (`int`):
            Of the tokenizer.
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
        """H, which is known even where the weights are sharded away."""
        return self.policy().get_output_embeddings().in_features

    def read(self, prompts: Sequence[Any]) -> torch.Tensor:
        """
        [`last_hidden_states`] of all prompts, the forward passes shared evenly by all processes. Collective.

        Where the prompts do not divide, the last one is repeated, so that every process of a sharded model makes the same
        number of forward passes. Mixed precision is that of the model's forward, which `accelerate` has prepared.

        Returns:
            `torch.Tensor`: `(P, H)` on the CPU, the same on every process.
        """
        processes, device = self.accelerator.num_processes, self.accelerator.device
        share = -(-len(prompts) // processes)
        padded = [*prompts, *[prompts[-1]] * (share * processes - len(prompts))]
        ids = self.tokenize(padded[self.accelerator.process_index * share :][:share])
        padding = [max(map(len, ids)) - len(row) for row in ids]
        input_ids = torch.tensor(
            [[self.pad_token_id] * p + row for p, row in zip(padding, ids, strict=True)]
        )  # (share, T)
        mask = (torch.arange(input_ids.size(1)) >= torch.tensor(padding)[:, None]).long()
        states = last_hidden_states(self.policy(), input_ids.to(device), mask.to(device), batch_size=self.batch_size)
        return self.accelerator.gather(states.contiguous())[: len(prompts)].cpu()

    def all_gather_states(self, local: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """
        Combine the states that each rank holds (`None` for prompts of other ranks) into those of all prompts, `(P, H)`;
        `None` if the state of any prompt is missing on every rank. Collective.
        """
        states = torch.zeros(len(local), self.size + 1, device=self.accelerator.device)
        for row, state in zip(states, local, strict=True):
            if state is not None:
                row[:-1], row[-1] = state, 1
        states = self.accelerator.reduce(states, reduction="sum").cpu()
        return states[:, :-1] if (states[:, -1] == 1).all() else None
