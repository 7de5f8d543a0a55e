"""Tools, environments and images: rollouts that are more than one prompt and one completion."""

import gc
from collections import Counter

import pytest
from datasets import Dataset
from PIL import Image

from ada_trl import AdaGRPOTrainer

from ..conversations import TINY, Counting, ToolUser, add, build, image_dataset, picture, says_the_sum
from ..helpers import chat_tokenizer, config, tiny_chat_model, tiny_vision_language_model


def test_tools_are_called_in_every_round_and_their_results_are_not_trained_on(tmp_path):
    calls = []

    def reward(prompts, completions, **kwargs):
        rewards = says_the_sum(prompts, completions)
        calls.append(rewards)
        return [0.0] * len(rewards) if len(calls) == 1 else rewards  # so that there is a second round

    trainer = build(ToolUser, tmp_path, reward, tools=[add])
    trainer.train()
    logs, output = trainer.state.log_history[0], trainer.batches[-1]
    assert [len(rewards) for rewards in calls] == [16, 16]
    assert all(rewards == [0.0, 1.0] * 8 for rewards in calls), "The tool was called and its answer was used."
    assert logs["ada/samples_per_prompt/mean"] == 8 and logs["reward"] == 0
    assert logs["tools/call_frequency"] == 0.5 and logs["tools/failure_frequency"] == 0
    for ids, mask, advantage in zip(output["completion_ids"], output["tool_mask"], output["advantages"], strict=True):
        text = trainer._tokenizer.decode(ids[mask.bool()])
        assert "tool_response" not in text
        assert ("<tool_call>" in text) or advantage < 0, "Whoever did not call the tool was wrong."
    assert (output["advantages"] > 0).sum() == 8, "Half of each group is positive."
    trained = (output["completion_mask"] * output["tool_mask"]).sum().item()
    assert output["num_items_in_batch"] == trained
    assert logs["ada/tokens/discarded"] == logs["ada/tokens/generated"] - trained
    assert logs["ada/tokens/generated"] < logs["num_tokens"]


def test_masked_groups_are_excluded_from_the_token_count_with_tools(tmp_path):
    trainer = build(
        ToolUser, tmp_path, lambda completions, **_: [0.0] * len(completions), tools=[add], zero_variance_groups="mask"
    )
    trainer.train()
    assert trainer.batches[-1]["num_items_in_batch"] == 0


class Doubling(Counting):
    def get_reward(self):
        return 2 * super().get_reward()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adaptive_sampling": "est", "num_generations": 4, "max_samples": 8},
        {"baseline": "batch", "num_generations": 4},
    ],
)
def test_an_environment_is_reset_for_every_rollout_and_gives_its_reward(options, tmp_path):
    Counting.resets.clear()
    trainer = build(ToolUser, tmp_path, [], factory=Counting, **options)
    assert trainer.pass_rates is None or trainer.pass_rates.head is None, "It cannot see the observation."
    trainer.train()
    logs = trainer.state.log_history[0]
    rollouts = logs["ada/samples_per_prompt/mean"] * 4
    assert sum(Counting.resets.values()) == rollouts, "Once per rollout, and not for the update batch again."
    assert logs["rewards/Counting/mean"] == logs["reward"] == 0.5
    prompts = [prompt[-1]["content"] for prompt in trainer._logs["prompt"]]
    decoded = trainer._tokenizer.batch_decode(trainer.batches[-1]["prompt_ids"])
    assert len(prompts) == len(decoded) and len(set(prompts)) == 4
    assert all(content in text for content, text in zip(prompts, decoded, strict=True)), "Logged with the observation."


def always_right(completions, **kwargs):
    return [1.0] * len(completions)


@pytest.mark.parametrize("weights", [None, [1.0]], ids=str)
def test_the_reward_of_an_environment_counts_as_a_weighted_function(weights, tmp_path):
    """TRL adds its weight to `reward_weights`. Without `success_reward`, the sum of both would define a success."""
    with pytest.raises(ValueError, match=r"success_reward \(None\) must be 'always_right' or 'Counting'"):
        build(ToolUser, tmp_path, [always_right], factory=Counting, reward_weights=weights)


def test_several_environments(tmp_path):
    dataset = Dataset.from_dict(
        {"environment": ["plain", "double", "plain", "double"], "target": [1, 2, 3, 4]}
    )  # no column `prompt`
    trainer = build(
        ToolUser,
        tmp_path,
        [],
        dataset,
        factory={"plain": Counting, "double": Doubling},
        baseline="batch",
        num_generations=4,
    )
    trainer.train()
    logs = trainer.state.log_history[0]
    assert (logs["rewards/Counting/mean"], logs["rewards/Doubling/mean"]) == (0.5, 1.0)
    assert sorted(set(trainer.batches[-1]["advantages"].gt(0).tolist())) == [False, True]


class Board(Counting):
    """Plays on the list that its dataset row holds."""

    def reset(self, target, board, **row):
        self.board, self.target, self.given = board, target, None
        self.untouched = board == [0, 0]
        return f" Please give {target}+0"

    def _play(self):
        self.board[0] += 1

    def get_reward(self):
        return float(self.untouched and self.board[0] <= 1)


def test_rollouts_of_a_prompt_do_not_share_mutable_columns(tmp_path):
    """A data loader makes every copy of a row anew."""
    seen = []

    def reward(completions, board, notes, **kwargs):
        seen.extend(map(tuple, notes))
        for note in notes:
            note.append("seen")
        return [0.0] * len(completions)  # so that there are more rounds

    boards = {"target": [1, 2, 3, 4], "board": [[0, 0]] * 4, "notes": [["new"]] * 4}
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Hello."}]] * 4} | boards)
    trainer = build(ToolUser, tmp_path, reward, dataset, factory=Board, success_reward="reward", max_rounds=2)
    trainer.train()
    assert set(seen) == {("new",)} and trainer.state.log_history[0]["rewards/Board/mean"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_variance_groups": "resample"}, r"zero_variance_groups \('resample'\) requires .*'keep'"),
        (
            {"baseline": "batch", "retries": 3},
            r"retries \(3\) requires a train_dataset.*retries=0",
        ),
    ],
)
def test_options_that_choose_between_prompts_are_rejected_without_a_dataset(options, message, tmp_path):
    """With an environment alone every reset is another problem, which cannot be sampled again."""
    args = config(tmp_path, **TINY | {"adaptive_sampling": "uniform"} | options)
    with pytest.raises(ValueError, match=message):
        AdaGRPOTrainer(tiny_chat_model(chat_tokenizer()), args=args, environment_factory=Counting)


def test_images_reach_generation_rewards_and_the_loss(tmp_path):
    tokenizer = chat_tokenizer()
    model, processor = tiny_vision_language_model(tokenizer)
    colors = ["red", "green", "blue", "white"]
    rows = {"prompt": [[{"role": "user", "content": "Which color?"}]] * 4, "image": list(map(picture, colors))}
    seen = Counter()

    def reward(prompts, completions, image, **kwargs):
        for prompt, pixels in zip(prompts, image, strict=True):
            assert prompt[-1]["content"][0] == {"type": "image", "image": pixels}
            seen[pixels.getpixel((0, 0))] += 1
        return [float(len(completion[0]["content"]) % 2) for completion in completions]

    options = {"max_completion_length": 8, "learning_rate": 1e-3, "pass_rate_estimator": "ema", "max_steps": 2}
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer = build(AdaGRPOTrainer, tmp_path, reward, Dataset.from_dict(rows), model, processor, **options)
    trainer.train()
    assert len(seen) == 4 and set(seen.values()) != {4}
    unmoved = [name for name, parameter in model.named_parameters() if (parameter == before[name]).all()]
    assert not [name for name in unmoved if "vision_tower.embeddings" in name or "projector" in name], unmoved
    assert len(trainer.pass_rates.counts.counts) == 4, "Pictures tell prompts apart."


@pytest.mark.parametrize("zero_variance_groups", ["keep", "resample"])
def test_decoded_images_are_shared_between_rollouts(zero_variance_groups, tmp_path):
    model, processor = tiny_vision_language_model(chat_tokenizer())
    held = []

    def images():
        gc.collect()
        return sum(isinstance(one, Image.Image) for one in gc.get_objects())

    def reward(completions, **kwargs):
        held.append(images() - before)
        return [0.0] * len(completions)

    options = {"max_rounds": 4, "max_completion_length": 5, "zero_variance_groups": zero_variance_groups}
    options |= {"per_device_train_batch_size": 8}
    trainer = build(AdaGRPOTrainer, tmp_path, reward, image_dataset(), model, processor, **options)
    before = images()
    trainer.train()
    assert len(held) > 1 and max(held) <= held[0] <= 16, f"Images by round: {held}"
