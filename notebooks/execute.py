"""Executes notebooks in place, and keeps their outputs free of what differs from machine to machine.

python notebooks/execute.py notebooks/01_lecture.ipynb ...        # none named: all of this folder
"""

import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
SECONDS = 300  # for one cell


def execute(notebook: NotebookNode) -> NotebookNode:
    """Runs all cells, in the folder of the notebooks.

    Raises:
        nbclient.exceptions.CellExecutionError: for what a cell raises.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    resources = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources, record_timing=False)
    return client.execute()


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """Takes out which Python it was, and paths of this machine."""
    notebook.metadata["language_info"] = {"name": "python"}
    ours = re.compile("|".join(re.escape(f"{path}/") for path in (FOLDER.parent, Path.home(), sys.prefix)))
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = ours.sub("", output["text"])
            for kind in ("text/plain", "text/html"):
                if kind in output.get("data", {}):
                    output["data"][kind] = ours.sub("", output["data"][kind])
    return notebook


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:] or sorted(map(str, FOLDER.glob("*.ipynb")))):
        nbformat.write(cleaned(execute(nbformat.read(file, as_version=4))), file)
        print(file)
