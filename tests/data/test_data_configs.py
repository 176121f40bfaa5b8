"""The YAML files of conf/data: each makes both parts of its data."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from shardlab.data import batches, eval_batches

FOLDER = Path(__file__).parents[2] / "conf" / "data"


@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "custom"])
def test_config_makes_both_parts(name, tmp_path):
    data = OmegaConf.create({"seed": 1, "data": OmegaConf.load(FOLDER / f"{name}.yaml")}).data
    if name == "hf":  # from the hub by default
        (tmp_path / "a.txt").write_text("some text of a line\n" * 500)
        data.update(name="text", subset=None, data_files=str(tmp_path / "a.txt"), eval_split=None)
    del data["num_workers"]
    train, held_out = (instantiate(data, split=split) for split in ("train", "eval"))

    shape = {"micro_batch": 2, "rank": 0, "world_size": 1}
    ((batch,),) = batches(train, seed=1, micro_batches=1, steps=1, **shape)
    held_out_batch = next(eval_batches(held_out, **shape))
    assert batch.inputs.shape == held_out_batch.inputs.shape == (2, data.get("seq_len") or data.features)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_file_opens_with_its_purpose_and_every_key_has_a_comment(path):
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    bare = [line for line in lines if ":" in line and "#" not in line and not line.startswith("_target_")]
    assert not bare
