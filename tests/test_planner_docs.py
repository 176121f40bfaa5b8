"""docs/planner.md answers each question, with commands that the program takes, and quotes their outputs."""

import re
import shlex
import sys
from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from shardlab.config import Mode, parse
from shardlab.planner.cluster import resolve
from tests.training import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import planner_docs

DOCS = planner_docs.DOCS.read_text()
COMMANDS = planner_docs.commands(DOCS)
SECTIONS = dict(re.findall(r"^### (.*)\n((?:(?!##).*\n)*)", DOCS, re.MULTILINE))
# The questions of pytorch#125323, in its order: what it asks, and the section that answers it.
QUESTIONS = {
    "expected peak memory with current configuration": "What is the peak of this config?",
    "change my FSDP wrapping": "What would other FSDP units change?",
    "best batch size": "What is the largest micro-batch that fits?",
    "maximum sequence length": "What is the longest sequence that fits?",
    "DP world size": "How does the peak move with the world size?",
    "move the optimizer to the CPU": "What does CPU offload of the optimizer save?",
    "which activation checkpointing policy": "Which activation checkpointing policy should be used?",
    "how SAC policies compare": "How do two selective policies compare?",
    "different SAC policies to different FSDP units": "What if policies differ between units?",
    "gradient reduction in fp32": "What does reducing gradients in fp32 cost?",
    "custom mixed precision policy": "What does a custom precision policy cost?",
    "when HSDP makes sense": "When does hybrid sharding pay?",
    "reshard to a smaller mesh": "What does a smaller shard group cost?",
    "disable post forward reshard": "Can forward resharding be left off?",
    "module that contributes most to activation memory": "Which module holds the most activation memory?",
    "unit that holds a lot of unsharded memory": "Which unit holds unsharded memory, and when?",
    "AC is not releasing memory": "Does recomputation free what it should?",
}


def jobs(command: str) -> Iterator[list[str]]:
    """The overrides of each job that a command runs, as Hydra's multirun expands them."""
    words = shlex.split(command.replace("\\\n", " "))
    words = words[words.index("train.py") + 1 : words.index("|") if "|" in words else None]
    overrides = [word for word in words if word != "-m"]
    if "-m" not in words:
        yield overrides
        return
    for batch in BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), None):
        yield from batch


def test_each_question_has_its_section_in_the_order_of_the_list():
    assert list(SECTIONS) == list(QUESTIONS.values())
    assert all("```console\n$ python train.py " in section for section in SECTIONS.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_plans_that_compose_and_parse(command):
    first, *others = jobs(command)
    for overrides in (first, *others[-1:]):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = compose("config", overrides=overrides)
        cluster = resolve(OmegaConf.to_object(cfg.cluster))
        assert parse(cfg, world_size=cluster.world_size, nodes=cluster.nodes).mode is Mode.plan


def test_each_command_has_an_output():
    outputs = [block["output"].strip() for block in planner_docs.BLOCK.finditer(DOCS)]
    assert len(outputs) == DOCS.count("```console")
    assert all(outputs)


@pytest.mark.parametrize("question", SECTIONS)
def test_figures_in_the_prose_stand_in_the_outputs_of_their_section(question):
    section = SECTIONS[question]
    outputs = "".join(block["output"] for block in planner_docs.BLOCK.finditer(section))
    prose = " ".join(planner_docs.BLOCK.sub("", section).split())
    # Differences are rounded to a decimal; what has two is quoted.
    figures = re.findall(r"\b\d+\.\d\d(?= GiB)", prose)
    assert all(re.search(rf"\b{re.escape(figure)} GiB", outputs) for figure in figures), figures


def test_the_tables_are_the_recorded_ones():
    assert planner_docs.filled(DOCS, {}) == DOCS


def test_an_output_goes_below_its_command_and_replaces_the_old_one():
    text = "```console\n$ one \\\n    more\nold\nold\n```\nprose\n```console\n$ two\n```\n"
    assert planner_docs.commands(text) == ["one \\\n    more", "two"]
    filled = planner_docs.filled(text, {"one \\\n    more": "new\n", "two": "2\n"})
    assert filled == "```console\n$ one \\\n    more\nnew\n```\nprose\n```console\n$ two\n2\n```\n"
    assert planner_docs.changed(text, filled) == ["$ one \\\n    more", "$ two"]
    assert planner_docs.filled(text, {"two": "2\n"}) == text.replace("$ two\n", "$ two\n2\n")


def test_what_differs_from_run_to_run_is_left_out_of_an_output():
    printed = planner_docs.run('echo "  file  $RUNS/Ab12/plan.json"; echo; echo "planned in  13.0 s"')
    assert printed == "  file  outputs/.../plan.json\nplanned in  ... s\n"


def test_a_failing_part_of_a_pipe_gives_no_output(capfd):
    assert planner_docs.run("false | cat") is None
    assert "false | cat" in capfd.readouterr().err
