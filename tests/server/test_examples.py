"""examples/lora_vllm_server.py against the scripted server."""

import runpy
from pathlib import Path

from datasets import Dataset

from ..helpers import QUICK_ARGUMENTS, logs_of, save_tiny_model
from .fake import RIGHT, WRONG, FakeServer, answer


ROOT = Path(__file__).parents[2]


async def every_other(call):
    return answer(call, [RIGHT if (call.number + i) % 2 else WRONG for i in range(call.n)])


def test_lora_vllm_server(tmp_path):
    names = runpy.run_path(str(ROOT / "examples" / "lora_vllm_server.py"))
    save_tiny_model(tmp_path / "model")
    dataset = Dataset.from_dict({"prompt": ["0+1=", "1+0=", "2+3=", "3+4="] * 8, "answer": ["1", "1", "5", "7"] * 8})
    with FakeServer(every_other) as server:
        options = [f"--output_dir={tmp_path / 'out'}", f"--vllm_server_base_url={server.url}"]
        trainer = names["main"]([*QUICK_ARGUMENTS, *options], str(tmp_path / "model"), dataset)
    loaded = [path.rpartition("/")[2] for path, _ in server.controls]
    assert loaded.count("load_lora_adapter") >= 2 and server.completions[-1].model != "base"
    logs = logs_of(trainer)
    assert len(logs) == 2 and 0 < logs[0]["reward"] < 1  # the server's answers are right half of the time for some
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
