"""Notebook 2 against a real vLLM server on the CPU: the same cells, with the other way of generating."""

import nbformat

from notebooks.run import FOLDER, execute

from ..helpers import free_port


def test_dry_run_with_a_server(tmp_path, monkeypatch):
    for name in ("ADA_TRL_DRY_RUN", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "1")
    text = (FOLDER / "2_lora_on_colab.ipynb").read_text()
    for old, new in (
        ('GENERATION = \\"transformers\\"', 'GENERATION = \\"vllm-server\\"'),
        ("8000", str(free_port())),
    ):
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "notebook.ipynb"
    path.write_text(text)
    notebook = execute(path)
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "generation by vllm-server" in printed and "step  24" in printed and "held-out problems" in printed
    nbformat.validate(notebook)
