"""Tools, environments and images for trainings on a handful of conversations, and a scripted policy that uses them."""

import json
import re
from collections import Counter

from datasets import Dataset
from PIL import Image

from .helpers import QUICK, Recorder, chat_tokenizer, tiny_chat_model
from .helpers import build as build_trainer


QUESTIONS = ["1+2", "31+4", "5+55", "7+8"]
CONVERSATIONS = [[{"role": "user", "content": question}] for question in QUESTIONS]
# For the environment below.
NUMBERS = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Hello."}]] * 4, "target": [1, 2, 3, 4]})
TINY = QUICK | {"max_completion_length": 256, "max_steps": 1, "per_device_train_batch_size": 16}


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


class ToolUser(Recorder):
    """
    Its policy is scripted: every other completion calls the tool `add` and then says the sum, others say nothing.
    """

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, **kwargs):
        texts = []
        for i, text in enumerate(self._tokenizer.batch_decode(prompt_ids)):
            if "<tool_response>" in text:
                answer = text.split("<tool_response>\n")[-1].split("\n")[0]
                texts.append(f"It is {answer}.")
            elif i % 2:
                a, b = re.findall(r"(\d+)\+(\d+)", text)[-1]
                call = json.dumps({"name": "add", "arguments": {"a": int(a), "b": int(b)}})
                texts.append(f"<tool_call>\n{call}\n</tool_call>")
            else:
                texts.append("Pass.")
        return self._tokenizer([text + "<|im_end|>" for text in texts])["input_ids"], None


def build(
    trainer_class, tmp_path, reward, dataset=None, model=None, tokenizer=None, tools=None, factory=None, **options
):
    tokenizer = tokenizer or chat_tokenizer()
    return build_trainer(
        tmp_path,
        reward,
        dataset or (NUMBERS if factory else Dataset.from_dict({"prompt": CONVERSATIONS})),
        model or tiny_chat_model(tokenizer),
        tokenizer=tokenizer,
        trainer_class=trainer_class,
        tools=tools,
        environment_factory=factory,
        **TINY | options,
    )


def says_the_sum(prompts, completions, **kwargs):
    """Looks at the question and at the last message."""
    sums = [str(sum(map(int, prompt[-1]["content"].split("+")))) for prompt in prompts]
    return [float(s in completion[-1].get("content", "")) for s, completion in zip(sums, completions, strict=True)]


class Counting:
    """An environment that asks for a number in its observation, and that rewards having been given it."""

    resets = Counter()

    def reset(self, target, **row):
        self.target, self.given = target, None
        self.resets[target] += 1
        return f" Please give {target}+0"

    def add(self, a: int, b: int) -> int:
        """
        Adds two numbers.

        Args:
            a: First number.
            b: Second number.
        """
        self.given = a + b
        self._play()
        return self.given

    def _play(self):
        pass

    def get_reward(self):
        return float(self.given == self.target)


def picture(color):
    return Image.new("RGB", (28, 28), color)


def image_dataset():
    """A picture for each conversation."""
    images = [picture(color) for color in ("red", "green", "blue", "black")]
    return Dataset.from_dict({"prompt": CONVERSATIONS, "image": images})
