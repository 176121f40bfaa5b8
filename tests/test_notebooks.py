"""The notebooks run, come to what they say, and are kept with their outputs."""

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hydra import compose, initialize_config_dir
from nbformat.v4 import new_code_cell
from notebooks.execute import execute

from shardlab.config import parse
from tests.sweep.folders import write_finished_sweep
from tests.training import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

VERDICTS = {
    "The programs run as they are printed": "does not hold",
    "FULL_SHARD takes the least memory": "holds",
    "FULL_SHARD communicates most": "holds",
    "SHARD_GRAD_OP keeps the parameters whole on each GPU": "does not hold",
    "SHARD_GRAD_OP needs no all-gather": "does not hold",
    "Gradients are all-reduced in backward": "does not hold",
    "FSDP(model) with FULL_SHARD leaves each GPU a part of the parameters": "does not hold",
    "4 batches of 32, accumulated, are one batch of 128": "holds",
    "Accumulation lowers memory further": "holds in part",
    "The optimizer state can be sharded: each GPU stores a part": "holds",
    "That takes FSDPAdam, which PyTorch provides": "does not hold",
    "AMP stores the parameters in fp16": "does not hold",
    "AMP stores the activations in fp16": "holds in part",
    "AMP lowers memory further": "holds in part",
    "The more GPUs, the less memory on each": "holds",
}


def executed(name: str, expression: str) -> Any:
    """Runs a notebook to its end; returns what an expression comes to there."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    notebook.cells.append(new_code_cell(f"import json\nprint(json.dumps({expression}))"))
    (output,) = execute(notebook).cells[-1]["outputs"]
    return json.loads(output["text"])


def test_the_lectures_claims_come_to_the_same_verdicts_again():
    found = executed("01_lecture.ipynb", "[list(row.values()) for row in verdicts]")
    assert [verdict for _, _, verdict in found] == list(VERDICTS.values())
    assert all(said.startswith(statement) for (said, _, _), statement in zip(found, VERDICTS, strict=True))
    (last,) = nbformat.read(ROOT / "notebooks/01_lecture.ipynb", as_version=4).cells[-1]["outputs"]
    kept = re.findall(r"<td>((?:holds|does not hold)[a-z ]*)</td>", last["data"]["text/html"])
    assert kept == list(VERDICTS.values())


def test_a_sweep_can_be_read_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SWEEP", str(write_finished_sweep(tmp_path / "sweep")))
    found = executed(
        "02_read_a_sweep.ipynb", "[results.counts(), [row['job'] for row in front], sorted(bars), MADE_HERE]"
    )
    counts, front, bars, makes = found
    assert counts.startswith("8 jobs: 4 completed")
    assert front == [1, 2]
    assert [name for name in bars if name.startswith("job 0")] == ["job 0, measured", "job 0, predicted"]
    # Its own sweep, which would take as long as all other notebooks: it is possible at least.
    (sharding,) = (override for override in makes if override.startswith("sharding="))
    for choice in sharding.removeprefix("sharding=").split(","):
        overrides = [override for override in makes if override != sharding]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            parse(compose("config", overrides=[f"sharding={choice}", *overrides]), world_size=2, nodes=1)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_outputs_are_kept_for_reading_on_the_web(file: Path):
    cells = [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}  # no errors
    assert any("image/png" in output.get("data", {}) for output in outputs)  # which need no script
    told = json.dumps([output.get("text") or output["data"].get("text/html", "") for output in outputs])
    assert str(ROOT) not in told
    assert not re.search(r"(?<![\w.<])/(home|root|tmp|usr|var|Users)/", told)
