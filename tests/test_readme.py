"""The README's figures are those that were recorded, and its commands compose."""

import itertools
import re
import shlex
import sys

import pytest
from hydra import compose, initialize_config_dir

from tests.training import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0]
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if "train.py" in line and "--help" not in line
]


def test_the_table_of_strategies_is_the_recorded_one(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    sys.modules.pop("strategies", None)
    import strategies

    table = README.split(strategies.BEGIN)[1].split(strategies.END)[0]
    assert table.strip() == strategies.render().strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command):
    words = [word for word in shlex.split(command.split("train.py")[1]) if word != "..."]
    sweep = "-m" in words
    choices = [
        [f"{key}={value}" for value in (values.split(",") if sweep else [values])]
        for key, _, values in (word.partition("=") for word in words if word != "-m")
    ]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for overrides in itertools.product(*choices):
            assert compose("config", overrides=list(overrides))


def test_every_group_and_choice_is_in_the_table():
    for folder in (ROOT / "conf").iterdir():
        if folder.is_dir() and folder.name not in ("hydra", "experiment"):
            row = next(line for line in README.splitlines() if line.startswith(f"| `{folder.name}` |"))
            for choice in folder.glob("*.yaml"):
                assert f"`{choice.stem}`" in row, choice
