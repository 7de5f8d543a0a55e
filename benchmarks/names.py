"""Names of the methods in tables, figures and stored results."""

GRPO_4, GRPO_8, GRPO_16 = "GRPO n=4", "GRPO n=8", "GRPO n=16"
DAPO = "dynamic sampling (DAPO) n=4"

BATCH = "batch baseline, n=1"
BATCH_2_ITERATIONS = f"{BATCH}, 2 iterations"
BATCH_HALF_STEPS = f"{BATCH}, 32 rows per step"
BATCH_2, BATCH_4 = "batch baseline, n=2", "batch baseline, n=4"
POSTERIOR = "posterior baseline, n=1"
POSTERIOR_2_ITERATIONS = f"{POSTERIOR}, 2 iterations"
OVERSAMPLING = f"{POSTERIOR}, + prompt oversampling ×3"
RETRIES = f"{POSTERIOR}, + retries"
RETRIES_OVERSAMPLING = f"{RETRIES} + prompt oversampling ×3"
ORACLE = f"{POSTERIOR}, oracle pass rates"
OVERSAMPLING_ORACLE = f"{OVERSAMPLING}, oracle pass rates"

# In brackets: the prompt weight, and whether the selection is corrected. Algorithm 2 of the paper has neither.
SEQ_POS, SEQ_BALANCE, EST = "Reinforce-Ada Seq-pos", "Reinforce-Ada Seq-balance", "Reinforce-Ada Est"
ALGORITHM_2 = f"{SEQ_BALANCE} (Algorithm 2)"
SEQ_POS_2 = f"{SEQ_POS} (Algorithm 2)"
HYBRID = f"{SEQ_BALANCE} (1/√p)"  # the default of `AdaGRPOConfig`
CORRECTED = f"{SEQ_BALANCE} (1/√p, corrected)"


def batch_retries(max_rounds: int) -> str:
    """Batch baseline with one rollout per prompt, which is sampled in up to `max_rounds` steps until it has succeeded."""
    return f"{BATCH}, retries N={max_rounds}"


def short(method: str) -> str:
    """The name in a figure's legend."""
    return method.removeprefix("Reinforce-Ada ").replace(f"{POSTERIOR}, + ", "posterior + ")
