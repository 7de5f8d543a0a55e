"""
recipes/slurm/train.sbatch, rehearsed: two "nodes" on this machine train, and a scripted server stands for the third.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ..helpers import PROMPTS, free_port, save_tiny_model, write_jsonl
from .fake import RIGHT, WRONG, FakeServer, answer


ROOT = Path(__file__).parents[2]
STUBS = {
    "scontrol": 'test "$1 $2 $3" = "show hostnames nodes" && printf "127.0.0.1\\nlocalhost\\nserver\\n"',
    # Every task as a process here; `--nodelist` and the rest are written down.
    "srun": """
while [[ $1 == --* ]]; do
    echo "$1" >> "$REHEARSAL/srun.txt"
    [[ $1 == --ntasks=* ]] && tasks=${1#--ntasks=}
    shift
done
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i "$@" > "$REHEARSAL/task$tasks-$i.log" 2>&1 & started+=($!); done
trap 'kill "${started[@]}"' TERM
for task in "${started[@]}"; do wait "$task"; done""",
    "serve": 'echo "$@" > "$REHEARSAL/serve.txt"; exec sleep 600',
    "accelerate": f'exec {sys.executable} -W ignore -m accelerate.commands.accelerate_cli "$@"',
}


async def every_other(call):
    return answer(call, [RIGHT if call.number % 2 else WRONG])


@pytest.mark.slow
def test_two_nodes_train_and_one_serves(tmp_path):
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    save_tiny_model(tmp_path / "model")
    rows = [{"prompt": prompt, "answer": "1"} for prompt in PROMPTS * 4]
    write_jsonl(tmp_path / "data.jsonl", rows)
    config = yaml.safe_load((ROOT / "recipes/accelerate_configs/ddp.yaml").read_text()) | {"mixed_precision": "no"}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(config))
    recipe = {
        **{"model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path / "data.jsonl")},
        **{"reward_funcs": ["ada_trl.recipes.arithmetic.task.exact_match"], "output_dir": str(tmp_path / "out")},
        **{
            "baseline": "batch",
            "num_generations": 1,
            "per_device_train_batch_size": 4,
            "max_steps": 2,
            "max_completion_length": 4,
        },
        **{"vllm_weight_sync": "disk", "bf16": False, "logging_steps": 1, "report_to": "none", "save_strategy": "no"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with FakeServer(every_other) as server:
        environment = os.environ | {
            **{"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "nodes", "REHEARSAL": str(tmp_path)},
            **{"GPUS_PER_NODE": "1", "PORT": str(free_port()), "SERVE": "serve", "OMP_NUM_THREADS": "1"},
            **{"SERVER_PORT": server.url.rpartition(":")[2], "ACCELERATE_USE_CPU": "true"},
            **{
                "ACCELERATE_CONFIG": str(tmp_path / "accelerate.yaml"),
                "TRAIN": f"--config {tmp_path / 'recipe.yaml'}",
            },
        }
        script = (ROOT / "recipes/slurm/train.sbatch").read_text().replace("http://$SERVER:", "http://127.0.0.1:")
        result = subprocess.run(
            ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
    logs = (tmp_path / "task2-0.log").read_text()
    assert result.returncode == 0, result.stderr[-2000:] + logs[-2000:]
    assert {call.prompt for call in server.completions} and (tmp_path / "out" / "model.safetensors").exists()
    assert "8 prompts" in logs, "4 on each of the two nodes"
    placed = (tmp_path / "srun.txt").read_text().split()
    nodes = {word for word in placed if "nodelist" in word}  # which of the two srun starts first is open
    assert nodes == {"--nodelist=server", "--nodelist=127.0.0.1,localhost"}
    assert (tmp_path / "serve.txt").read_text().startswith(f"--host 0.0.0.0 --port {environment['SERVER_PORT']} ")
