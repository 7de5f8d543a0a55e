"""
Execute notebooks from a clean kernel and store their outputs: `python notebooks/run.py [FILE …]`, default all.

With `ADA_TRL_DRY_RUN=1`, the notebook that needs a GPU runs the same cells in a few steps on a CPU;
its outputs are not stored.
"""

import argparse
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient


FOLDER = Path(__file__).parent
DRY_RUN = "ADA_TRL_DRY_RUN"  # environment variable


def execute(path: Path, timeout: float | None = 600) -> nbformat.NotebookNode:
    """
    Execute a notebook and return it with new outputs; raises `nbclient.exceptions.CellExecutionError` if a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # text progress bars are sufficient
    client = NotebookClient(
        notebook, timeout=timeout, coalesce_streams=True, resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which would change in every run
        if cell.cell_type == "code":  # a removed progress bar leaves blank output
            cell.outputs = [output for output in cell.outputs if output.get("text", "-").strip()]
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", type=Path, nargs="*", default=sorted(FOLDER.glob("*.ipynb")))
    for path in parser.parse_args().notebooks:
        notebook = execute(path, timeout=None)
        if not (os.environ.get(DRY_RUN) == "1" and DRY_RUN in path.read_text(encoding="utf-8")):
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
