"""Names of the methods in tables, figures and stored results."""

GRPO_4, GRPO_8, GRPO_16 = "GRPO n=4", "GRPO n=8", "GRPO n=16"
DAPO = "dynamic sampling (DAPO) n=4"

BATCH = "batch baseline, n=1"
BATCH_SCALED = f"{BATCH}, scaled rewards"
WIN_RATES = f"{BATCH}, win rates"
BATCH_2_ITERATIONS = f"{BATCH}, 2 iterations"
BATCH_2, BATCH_4 = "batch baseline, n=2", "batch baseline, n=4"

# In brackets: the prompt weight. Algorithm 2 of the paper has none.
SEQ_POS, SEQ_BALANCE, EST = "Reinforce-Ada Seq-pos", "Reinforce-Ada Seq-balance", "Reinforce-Ada Est"
ALGORITHM_2 = f"{SEQ_BALANCE} (Algorithm 2)"
SEQ_POS_2 = f"{SEQ_POS} (Algorithm 2)"
SEQ_POS_HYBRID = f"{SEQ_POS} (1/√p)"
HYBRID = f"{SEQ_BALANCE} (1/√p)"
# The default of `AdaGRPOConfig`: rounds of 4 until one rollout is positive and one negative.
SMALL_ROUNDS = f"{SEQ_BALANCE} (1/√p, M=4, K=1+1)"


def batch_retries(retries: int) -> str:
    """
    Batch baseline with one rollout per prompt; an unsolved prompt is sampled again in up to `retries` later steps.
    """
    if not retries:
        return BATCH
    return f"{BATCH}, {retries} {'retry' if retries == 1 else 'retries'}"


def short(method: str) -> str:
    """The name in a figure's legend."""
    return method.removeprefix("Reinforce-Ada ")
