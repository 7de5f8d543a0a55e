import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
)

from benchmarks.learning import cut_vocabulary
from benchmarks.learning.cut_vocabulary import cut


TEXTS = ["the other mother", "12 + 34 = 46", "12 * 12 = 144"]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]


@pytest.fixture
def gemma():
    """A tokenizer with the pipeline of Gemma's, with merges that `TEXTS` do not need, and a model of its size."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer, backend.decoder = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL + [f"<0x{i:02X}>" for i in range(256)])
    backend.train_from_iterator([*TEXTS, "weather and feather", "some others gathered there 567 89"] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    names = {f"{token.strip('<>')}_token": token for token in SPECIAL}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    )
    return model, tokenizer


@torch.no_grad()
def test_remaining_tokens_have_the_same_logits(gemma, tmp_path):
    model, tokenizer = gemma
    before = tokenizer(TEXTS)["input_ids"]
    logits = [model(torch.tensor([ids])).logits[0] for ids in before]
    small = cut(model, tokenizer, TEXTS)
    assert len(small) < len(tokenizer)
    model.save_pretrained(tmp_path)
    small.save_pretrained(tmp_path)
    model, small = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == len(small)
    kept = tokenizer.convert_tokens_to_ids(small.convert_ids_to_tokens(range(len(small))))
    for text, ids, old in zip(TEXTS, before, logits, strict=True):
        new = small(text)["input_ids"]
        assert [kept[i] for i in new] == ids and small.decode(new, skip_special_tokens=True) == text
        torch.testing.assert_close(model(torch.tensor([new])).logits[0], old[:, kept])
    assert small("Öther")["input_ids"].count(small.unk_token_id) == 0, "bytes take the place of other tokens"
    assert [small.pad_token, small.eos_token, small.bos_token, small.unk_token] == SPECIAL


def test_texts_that_are_split_differently_are_refused(gemma, monkeypatch):
    monkeypatch.setattr(cut_vocabulary, "parts_of", lambda token, ranks: {token})
    with pytest.raises(ValueError, match="split differently"):
        cut(*gemma, TEXTS)
