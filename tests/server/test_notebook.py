"""Notebook 2 against a real vLLM server on the CPU: the same cells, with the other way of generating."""

import nbformat

from notebooks.run import FOLDER, execute

from ..helpers import free_port
from ..project.test_notebooks import offline


def test_dry_run_with_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    changes = [
        ('GENERATION = \\"transformers\\"', 'GENERATION = \\"vllm-server\\"'),
        ("PORT, LOG = 8000", f"PORT, LOG = {free_port()}"),
    ]
    notebook = execute(offline(FOLDER / "2_lora_on_colab.ipynb", tmp_path, monkeypatch, changes))
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "generation by vllm-server" in printed and "step  24" in printed
    (after,) = [line for line in printed.splitlines() if line.startswith("all ")]
    assert after.endswith(" after")
    nbformat.validate(notebook)
