"""`zero_variance_groups="skip"`: the update is the same without computing rows with advantage 0."""

import pytest
import torch

from ada_trl import AdaGRPOTrainer

from ..helpers import build, even_reward


LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def cases():
    for i, loss_type in enumerate(LOSSES):
        for j, mode in enumerate(("uniform", "seq-balance")):
            yield pytest.param(loss_type, mode, marks=[pytest.mark.slow] * (i % 2 == j))


@pytest.mark.parametrize(("loss_type", "mode"), cases())
def test_the_update_is_that_of_all_rows(loss_type, mode, tmp_path):
    def run(zero_variance_groups):
        options = {"num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        options |= {"num_iterations": 2, "max_steps": 4, "adaptive_sampling": mode, "loss_type": loss_type}
        options |= {"samples_per_round": 2, "max_rounds": 2} if mode == "seq-balance" else {}
        if loss_type == "luspo":
            options["importance_sampling_level"] = "sequence"
        trainer = build(tmp_path, even_reward, zero_variance_groups=zero_variance_groups, **options)
        rows, forward = [], trainer.model.forward
        trainer.model.forward = lambda *args, **kwargs: (
            rows.append(len(kwargs["input_ids"])) if torch.is_grad_enabled() else None,
            forward(*args, **kwargs),
        )[1]
        trainer.train()
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), rows

    kept, all_rows = run("keep")
    skipped, some_rows = run("skip")
    torch.testing.assert_close(skipped, kept, rtol=0, atol=1e-5)
    assert len(some_rows) == len(all_rows) and 0 < sum(some_rows) < sum(all_rows)


def test_advantages_may_differ_by_token(tmp_path):
    """TRL accepts advantages of shape (B, T) from an override."""

    class OfTokens(AdaGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["advantages"] = output["advantages"].unsqueeze(1) * output["completion_mask"]
            return output

    weights = []
    for zero_variance_groups in ("keep", "skip"):
        trainer = build(tmp_path, trainer_class=OfTokens, zero_variance_groups=zero_variance_groups, max_steps=3)
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("option", [{"beta": 0.1}, {"entropy_coef": 0.01}, {"top_entropy_quantile": 0.5}])
def test_options_that_act_on_rows_with_advantage_0_are_rejected(option, tmp_path):
    with pytest.raises(ValueError, match=f"zero_variance_groups='skip' requires {next(iter(option))}"):
        build(tmp_path, zero_variance_groups="skip", **option)
