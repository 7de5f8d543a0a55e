"""
Cut a model's vocabulary to the tokens of the reasoning recipe's problems.

Gemma 3 270M has 262,144 tokens, and on a CPU most of a step is spent on those that no problem contains. Without their
embeddings the probabilities of the other tokens are renormalized, and everything else is unchanged:
`python -m benchmarks.learning.cut_vocabulary --model gemma-3-270m --output_dir gemma-3-270m-cut --seed 4`.
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipes.reasoning.task import FAMILIES, NUM_START, NUM_TEST, NUM_TRAIN, load_pretrained, problems


def parts_of(token: str, ranks: dict[tuple[str, str], int]) -> set[str]:
    """The token and everything that byte-pair encoding merges on the way to it."""
    pieces, found = list(token), set(token)
    while pairs := [pair for pair in zip(pieces, pieces[1:], strict=False) if pair in ranks]:
        first = min(pairs, key=ranks.__getitem__)
        i = next(i for i in range(len(pieces)) if tuple(pieces[i : i + 2]) == first)
        pieces[i : i + 2] = ["".join(first)]
        found.add(pieces[i])
    return found


def cut(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> PreTrainedTokenizerFast:
    """
    Remove all tokens from the model that are neither special nor bytes nor needed for `texts`. Returns the tokenizer
    of the new token ids, which splits `texts` as before.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            With tied embeddings; changed in place, but for the token ids in its configurations (`load_pretrained`).
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            A fast one with byte-pair encoding and byte fallback.
        texts (`list[str]`):
            What is to be encoded.
    """
    encoded = tokenizer(texts)["input_ids"]
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    own, special = state["model"], set(tokenizer.all_special_tokens)
    merges = [tuple(pair) for pair in own["merges"]]
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    used = set(tokenizer.convert_ids_to_tokens(list({i for ids in encoded for i in ids}))) - special
    in_bytes = {token for token in own["vocab"] if token.startswith("<0x")}
    needed = special | in_bytes.union(*(parts_of(token, ranks) for token in used))
    kept = sorted((i, token) for token, i in own["vocab"].items() if token in needed)
    own["vocab"] = {token: new for new, (_, token) in enumerate(kept)}
    own["merges"] = [pair for pair in merges if needed.issuperset((*pair, "".join(pair)))]
    added = [token for token in state["added_tokens"] if token["content"] in needed]
    state["added_tokens"] = [token | {"id": own["vocab"][token["content"]]} for token in added]
    small = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), **tokenizer.special_tokens_map
    )

    rows = [i for i, _ in kept]
    new_id = {i: new for new, i in enumerate(rows)}
    if small(texts)["input_ids"] != [[new_id[i] for i in ids] for ids in encoded]:
        raise ValueError("The texts are split differently without the other tokens.")
    embeddings = model.get_input_embeddings().weight.data[rows]
    model.resize_token_embeddings(len(rows))
    model.get_input_embeddings().weight.data.copy_(embeddings)
    return small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True, help="Seed of the problems.")
    args = parser.parse_args()
    model, tokenizer = load_pretrained(args.model)
    rows = [row for family in FAMILIES for row in problems(family, NUM_TEST + NUM_START + NUM_TRAIN, args.seed)]
    # An answer continues its prompt, and is encoded apart from it
    small = cut(model, tokenizer, [text for row in rows for text in (row["prompt"], row["answer"])])
    print(f"{len(tokenizer):,} tokens before, {len(small):,} after")
    model.save_pretrained(args.output_dir)
    small.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
