r"""The prompt of the paper's runs: a problem as a conversation that asks for a `\boxed{}` answer."""

SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."


def to_prompt(problem: str) -> list[dict[str, str]]:
    """
    The conversation that the authors of [Reinforce-Ada](https://huggingface.co/papers/2510.04996) train every model on.

    Args:
        problem (`str`):
            Text of the problem.

    Returns:
        `list[dict[str, str]]`:
            The system prompt, and the problem followed by a space and the instruction, to be rendered by the model's
            own chat template.
    """
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"{problem} {INSTRUCTION}"},
    ]
