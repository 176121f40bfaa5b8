"""Mistakes on the command line: one line, once, in seconds; and how Hydra's own errors become one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from shardlab.errors import ConfigError, TrainingError, describe
from shardlab.launch import one_line, prepare_arguments
from tests.commands import QUICK, USERS_MODULE, read_json, run
from tests.training import config_of

# --- what Hydra and OmegaConf refuse ---


def refusal(*overrides: str) -> str:
    """The line that these overrides end in."""
    with pytest.raises((ConfigError, HydraException, OmegaConfBaseException, ValueError)) as caught:
        config_of(*overrides, world_size=1)
    return one_line(caught.value, overrides)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("sharding=nope", "'sharding/nope', Available options in 'sharding': full_shard, hybrid_shard,"),
        ("experiment=nope", "'experiment/nope', Available options in 'experiment': lecture_accumulation,"),
        ("sharding.strategy=nope", "sharding.strategy=nope: Invalid value 'nope', expected one of [full_shard,"),
        ("train.steps=many", "train.steps=many: Value 'many' of type 'str' could not be converted to Integer"),
        ("train.steps=1.5", "train.steps=1.5: Value '1.5' of type 'float' could not be converted to Integer"),
        ("train.clip_norm=a", "train.clip_norm=a: Value 'a' of type 'str' could not be converted to Float"),
        ("seed=null", "seed=null: field 'seed' is not Optional"),
        ("sharding.units=layers.*", "sharding.units=layers.*: Invalid value assigned: str is not a ListConfig, list"),
        ("train.stepz=3", "train.stepz: there is no such key; did you mean train.steps?"),
        ("data.sek_len=3", "data.sek_len: there is no such key; did you mean data.seq_len?"),
        ("shard=full_shard", "shard: there is no such key; did you mean sharding?"),
        ("xyz=3", "xyz: there is no such key; there are hydra, mode, seed, device, train, "),
        ("+train.stepz=3", "train.stepz: there is no such key; did you mean train.steps?"),
        ("+xyz=3", "xyz: there is no such key; there are mode, seed, device, train, "),
        ("model=3", "model=3: a config group takes the name of one of its choices"),
        ("model=null", "model=null: a config group takes the name of one of its choices"),
        ("precision=16", "precision=16: a config group takes the name of one of its choices"),
        ("=3", "=3: a config group takes the name of one of its choices"),
        ("~model", "model is missing: set model=..."),
        ("train.steps=???", "train.steps is missing: set train.steps=..."),
        ("train.steps=${nope}", "train.steps: Interpolation key 'nope' not found"),
        ("seed=0,1", "Ambiguous value for argument 'seed=0,1', 1. To use it as a list, use key=[value1,value2]"),
        ("experiment", "experiment cannot be read (missing EQUAL at '<EOF>'): write key=value, and quote it"),
        ("sharding.units=[a,b", "sharding.units=[a,b cannot be read (no viable alternative at input '[a,b'): write"),
        ("hydra/launcher=nope", "'hydra/launcher/nope', Available options in 'hydra/launcher': "),
    ],
)
def test_mistakes_that_hydra_finds_become_one_line(override: str, line: str) -> None:
    refused = refusal(override)
    assert line in refused
    assert "\n" not in refused


def test_a_run_folder_that_cannot_be_made_is_named() -> None:
    error = PermissionError(13, "Permission denied", "/root/run")
    assert one_line(error) == "hydra.run.dir=/root/run cannot be made (Permission denied): name another folder"
    for multirun in ("-m", "--multirun", "hydra.mode=MULTIRUN"):
        assert one_line(error, [multirun, "seed=1,2"]).startswith("hydra.sweep.dir=/root/run cannot be made")


def test_what_a_worker_of_a_dataloader_raised_is_told_as_if_it_had_been_raised_here() -> None:
    def raised_in_worker(error: Exception) -> Exception:
        try:
            raise error
        except Exception:
            wrapped = torch.utils.data._utils.ExceptionWrapper(where="in DataLoader worker process 0")
        with pytest.raises(type(error)) as caught:
            wrapped.reraise()
        return caught.value

    assert describe(raised_in_worker(ConfigError("data.name=c4 is away"))) == "data.name=c4 is away"
    assert describe(raised_in_worker(RuntimeError("no sample"))) == "RuntimeError: no sample"


def test_errors_of_ours_need_no_class_name() -> None:
    assert describe(TrainingError("the loss is not finite")) == "the loss is not finite"
    assert describe(ValueError("first\nsecond")) == "ValueError: first"
    assert describe(KeyError()) == "KeyError"


# --- the command line ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: a module, choices for config groups, and some files that are no good as data."""
    (tmp_path / "mine.py").write_text(USERS_MODULE)
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("short")
    write_choices(tmp_path, "model", {"net": "_target_: mine.Net", "no_module": "_target_: mine.NoModule"})
    misshapen = "{_target_: mine.Data, does: misshapen, on_rank: 0, at_step: 1}"
    write_choices(tmp_path, "data", {"misshapen": misshapen})
    return tmp_path


def write_choices(folder: Path, group: str, choices: dict[str, str]) -> None:
    """Adds choices to a config group of a user's own."""
    (folder / "conf" / group).mkdir(parents=True)
    for name, text in choices.items():
        (folder / "conf" / group / f"{name}.yaml").write_text(f"{text}\n")


# For each run: what the mlp on random classes has instead; further keys; how the line begins that it ends in.
MISTAKES = {
    "vocabulary": (
        {"model": "llama_tiny", "data": "text"},
        "model: {vocab_size: 100}",
        "model.vocab_size=100 is smaller than the 256 token ids of the data: set model.vocab_size to at least 256",
    ),
    "no_file": ({"data": "text"}, "data: {path: /nope}", "data.path=/nope does not exist; give a file, a folder"),
    "empty": ({"data": "text"}, "data: {path: empty}", "data.path=empty holds no text"),
    "short": (
        {"data": "text"},
        "data: {path: short.txt}",
        "data.seq_len=256 is too long: the train part of data.path=short.txt holds 5 tokens",
    ),
    "nothing": (
        {},
        "model: {units: [fc3]}",
        "model.units: the pattern 'fc3' matches no module; the model has fc1, fc2",
    ),
    "twice": ({}, "sharding: {units: ['fc*', fc1]}", "sharding.units=['fc*', 'fc1'] matches the module fc1 twice: let"),
    "cuda": ({}, "device: cuda", "device=cuda: 1 processes on this machine, but 0 CUDA devices: use device=cpu"),
    "offload": ({}, "sharding: {cpu_offload: true}", "sharding.cpu_offload=true on a CPU run offloads nothing: set it"),
    "batch": ({}, "train: {global_batch: 7}", "train.global_batch=7 is no multiple of train.micro_batch=8 x 1 ranks"),
    "scaler": ({}, "precision: {grad_scaler: true}", "precision.grad_scaler=true scales fp16 gradients, but nothing"),
    "muon": (
        {"precision": "fp16", "optimizer": "muon"},
        "",
        "optimizer._target_=torch.optim.Muon without optimizer.fused=true cannot skip",
    ),
    "target": (
        {},
        "model: {_target_: does.not.Exist}",
        "model._target_=does.not.Exist could not be made: Error loading 'does.not.Exist': ModuleNotFoundError(",
    ),
    "no_module": ({"model": "no_module"}, "", "model._target_=mine.NoModule makes a NoModule, not an nn.Module"),
    "misshapen": (
        {"data": "misshapen"},
        "",
        "data: labels are torch.int64 of shape (8, 1), but logits of shape (8, 5) need int64 of shape (8,)",
    ),
    "argument": ({}, "model: {width: 3}", "model._target_=shardlab.models.mlp.MLP could not be made: "),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="some mistakes are none where there is a GPU")
def test_each_job_of_a_multirun_names_its_mistake_and_the_others_run(folder: Path) -> None:
    """One process for many mistakes; alone, each ends in the same line and the same code."""

    def experiment(groups: dict[str, str], keys: str) -> str:
        groups = {"model": "mlp", "data": "random_classes"} | groups
        defaults = ", ".join(f"override /{group}: {choice}" for group, choice in groups.items())
        return f"# @package _global_\ndefaults: [{defaults}]\n{keys}"

    experiments = {"fine": experiment({"model": "net"}, "")}
    experiments |= {name: experiment(groups, keys) for name, (groups, keys, _) in MISTAKES.items()}
    write_choices(folder, "experiment", experiments)
    everywhere = (*QUICK[2:], "tracking.display=none", "train.steps=1", "hydra/launcher=basic")
    ended = run(folder, "-m", "--config-dir=conf", *everywhere, f"experiment={','.join(experiments)}")
    assert ended.code == 2
    lines = ended.err.splitlines()
    assert len(lines) == len(MISTAKES), ended.err
    for name, (_, _, expected) in MISTAKES.items():
        assert sum(line.startswith(f"error: {expected}") for line in lines) == 1, (name, ended.err)
    (multirun,) = (folder / "outputs" / "multirun").glob("*/*")
    assert read_json(multirun / "0" / "summary.json")["status"] == "completed"
    assert read_json(multirun / "1" / "summary.json")["status"] == "failed"


def test_a_multirun_in_one_process_runs_jobs_one_after_another(folder: Path) -> None:
    ended = run(folder, *QUICK, "train.steps=1", "-m", "hydra/launcher=basic", "seed=0,1")  # options may stand between
    assert (ended.code, ended.err) == (0, "")
    (multirun,) = (folder / "outputs" / "multirun").glob("*/*")
    summaries = [read_json(multirun / str(job) / "summary.json") for job in (0, 1)]
    assert [summary["status"] for summary in summaries] == ["completed", "completed"]
    assert summaries[0]["loss"] != summaries[1]["loss"]


def test_a_sweep_is_not_gone_on_with_by_a_single_run(folder: Path) -> None:
    ended = run(folder, *QUICK, "sweep.resume=/nowhere")
    assert ended.code == 2
    assert ended.err == "error: sweep.resume=/nowhere is of a multirun: add -m\n"


def test_hydra_s_errors_are_one_line_too(folder: Path) -> None:
    ended = run(folder, "sharding=nope")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: In 'config': Could not find 'sharding/nope', Available options")
    assert len(ended.err.splitlines()) == 1
    assert not (folder / "outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["train.stepz=3"], "train.stepz: there is no such key; did you mean train.steps?"),
        ([*QUICK, "hydra.run.dir=run"], "hydra.run.dir={run} already holds a run: name another folder, or remove it"),
    ],
)
def test_torchrun_shows_a_mistake_once(folder: Path, arguments: list[str], error: str) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "summary.json").write_text("{}")
    ended = run(folder, *arguments, ranks=2)
    assert ended.code == 1  # torchrun's own
    assert "exitcode  : 2 " in ended.err  # the ranks'
    assert ended.err.splitlines()[0] == "error: " + error.format(run=folder / "run")
    assert (len(ended.errors), ended.tracebacks, ended.out) == (1, 0, "")
    assert (folder / "run" / "summary.json").read_text() == "{}"
    assert not (folder / "outputs").exists()


def test_help_is_printed_once_under_torchrun(folder: Path) -> None:
    ended = run(folder, "--help", ranks=2)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count("micro_batch:") == 1


# --- arguments ---


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`as_rank(1, "seed=3")`: what Hydra gets on that rank of 2; rank None = without torchrun."""

    def prepare(rank: int | None, *arguments: str) -> list[str]:
        if rank is not None:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "2")
        argv = ["train.py", *arguments]
        prepare_arguments(argv)
        return argv[1:]

    return prepare


@pytest.mark.parametrize("multirun", ["-m", "--multirun", "--multi", "hydra.mode=MULTIRUN"])
def test_a_multirun_under_torchrun_is_refused_with_the_right_command(as_rank, multirun: str) -> None:
    with pytest.raises(ConfigError) as caught:
        as_rank(0, "seed=0,1", multirun, "model.units=[fc1, fc2]")
    assert "run `python train.py -m seed=0,1 'model.units=[fc1, fc2]'`" in str(caught.value)


def test_options_may_stand_between_overrides(as_rank) -> None:
    assert as_rank(None, "seed=1", "--config-dir", "conf", "~model.units") == [
        "--config-dir", "conf", "seed=1", "~model.units",
    ]  # fmt: skip


def test_an_unknown_option_is_a_mistake(as_rank) -> None:
    with pytest.raises(ConfigError, match="^unrecognized arguments: --nope; --help and --hydra-help list"):
        as_rank(None, "seed=1", "--nope")


def test_ranks_above_0_make_no_folder(as_rank) -> None:
    assert as_rank(0, "hydra.run.dir=run", "--config-dir=conf") == ["--config-dir=conf", "hydra.run.dir=run"]
    options, *overrides = as_rank(1, "hydra.run.dir=run", "seed=1", "--config-dir=conf")
    assert options == "--config-dir=conf"
    assert overrides[:2] == ["seed=1", "hydra.run.dir=."]
    assert "hydra.output_subdir=null" in overrides


@pytest.mark.parametrize("arguments", [["--help"], ["--hydra-help"], ["--cfg", "job"], ["-c=job"], ["--info"]])
def test_ranks_above_0_print_nothing(as_rank, arguments: list[str]) -> None:
    assert as_rank(0, *arguments) == arguments
    with pytest.raises(SystemExit) as ended:
        as_rank(1, *arguments)
    assert ended.value.code == 0
