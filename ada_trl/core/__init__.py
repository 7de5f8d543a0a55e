"""
The algorithm, on NumPy arrays, without torch and TRL. Start with `advantages.py`.

| [Reinforce-Ada](https://huggingface.co/papers/2510.04996) | here |
|---|---|
| Algorithm 2, successive elimination | [`sample_slots`] |
| exit conditions *pos* and *balance* | [`needs_more`] |
| downsampling to a balanced group | [`select_groups`] |
| advantages with global statistics | [`pool_advantages`] |
| weight of the power objective | [`prompt_weights`] |
| Est, step 1: pass rates from an EMA of counts, or a value head | `ada_trl.pass_rates` |
| Est, step 2: allocation | [`allocate`] |

Not in the paper: [`batch_advantages`].
"""

from .advantages import batch_advantages, normalize_each_reward, pool_advantages, prompt_weights
from .allocation import allocate
from .metrics import completion_metrics, detailed_metrics, first_round_metrics, round_metrics, sampling_metrics
from .pass_at_k import pass_at_k, pass_at_k_metrics
from .rollouts import Rollouts, Scoring, column_array
from .selection import select_groups
from .sequential import (
    Candidate,
    SampledPrompt,
    Slot,
    SlotRule,
    collect_rollouts,
    needs_more,
    sample_slots,
    sampled_prompts,
)
