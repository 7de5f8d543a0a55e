"""
The probability of a zero gradient and the expected rollouts by pass rate, in closed form.

`python -m benchmarks.analyses.signal_loss` writes its table into `benchmarks/README.md`.
"""

import numpy as np

from ada_trl.core import allocate

from .. import names
from ..common import BALANCE, DEFAULT, POS, fill, markdown
from .outcomes import Outcome, refill_outcome, sequential_outcome, single_round_outcome


METHODS = {  # name: sampling; the rollouts of Est depend on the pass rate
    names.GRPO_4: {"samples_per_round": 4},
    names.GRPO_16: {"samples_per_round": 16},
    names.DAPO: {"samples_per_round": 4},
    names.SEQ_POS: POS,
    names.SEQ_BALANCE: BALANCE,
    f"{names.SEQ_BALANCE} (M=4, K=1+1)": DEFAULT,
    names.EST: {},
}
DAPO_ROUNDS = 10
TABLE_RATES = (0.02, 0.1, 0.5, 0.9)


def est_budgets(pass_rates: np.ndarray) -> np.ndarray:
    """N_x of Est with exact pass rates, at 4 rollouts per prompt on average over uniformly distributed pass rates."""
    others = (np.arange(1000) + 0.5) / 1000
    budgets = allocate(others, 4000, min_samples=2, max_samples=32)
    return np.array(budgets)[np.clip((pass_rates * 1000).astype(int), 0, 999)]


def expected(method: str, p: float) -> Outcome:
    """Probability of a zero gradient, expected rollouts and rounds at one pass rate, `(1,)` each."""
    rates = np.array([p])
    if method == names.EST:
        return single_round_outcome(rates, est_budgets(rates))
    if method == names.DAPO:  # for a dataset in which all prompts have this pass rate
        return refill_outcome(rates, [1.0], METHODS[method]["samples_per_round"], max_rounds=DAPO_ROUNDS)
    return sequential_outcome(rates, **METHODS[method])


def table() -> str:
    """P(zero gradient) and rollouts at a few pass rates."""

    def show(method: str, p: float) -> str:
        outcome = expected(method, p)
        return f"{outcome.zero_gradient.item():.1%}, {outcome.rollouts.item():.1f}"

    columns = {"P(zero gradient), rollouts": lambda method: method}
    columns |= {f"p = {p}": lambda method, p=p: show(method, p) for p in TABLE_RATES}
    return markdown(list(METHODS), columns)


def main() -> None:
    fill("signal-loss", table())


if __name__ == "__main__":
    main()
