"""What the display says of a run, before and after it."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from shardlab.device import Cpu
from shardlab.display import closing_rows, header, planned_row
from shardlab.errors import Interrupted
from shardlab.telemetry.prediction import Prediction
from shardlab.tracking import RunHeader, make_tracker
from shardlab.tracking.config import TrackingConfig, WandbConfig, WandbMode
from shardlab.trainer import Datasets
from tests.training import CPU, built_from, config_of

CHOICES = {"model": "llama_tiny", "precision": "bf16", "optimizer": "adamw", "data": "random_tokens"}


def header_of(mesh_shape: tuple[int, ...], choices: dict[str, str], freeze: str, overrides: tuple[str, ...]):
    config = config_of(*overrides)
    built = built_from(config)
    for name, parameter in built.model.named_parameters():
        if freeze and name.startswith(freeze):
            parameter.requires_grad_(False)
    mesh = init_device_mesh("cpu", mesh_shape)
    return header(
        config, built, Datasets(config), device=Cpu(CPU), mesh=mesh, choices=choices, notices=["a word of warning"]
    )


def test_the_header_says_what_runs(on_ranks):
    overrides = ("data=random_tokens", "precision=bf16", "train.steps=7", "data.seq_len=64")
    shown = on_ranks(2)(header_of, (2,), CHOICES, "", overrides)[0]
    assert dict(shown.rows) == {
        # 256 x 192 embeddings and as many outputs, 4 blocks of 2 x 192^2 + 2 x 192 x 64 + 3 x 192 x 512 + 2 x 192, and
        # a last norm: 1,673,664.
        "model": "llama_tiny, 1.7 M parameters",
        "sharding": "full_shard, mesh 2, 7 units",  # embedding, 4 blocks, norm with output, root
        "precision": "bf16",
        "optimizer": "adamw",
        "activation": "none",
        "batch": "8 samples x 2 ranks = 16",
        "data": "random_tokens, 64 tokens a sample",
        "device": "2 x CPU",
    }
    assert shown.total_steps == 7
    assert shown.notices == ["a word of warning"]


def test_the_header_says_what_is_frozen_accumulated_and_replicated(on_ranks):
    overrides = (
        "model=mlp",
        "data=random_classes",
        "sharding=no_shard",
        "accumulation=reduce_last",
        "activation.policy=none",
        "train.micro_batch=3",
    )
    rows = dict(on_ranks(2)(header_of, (2, 1), {**CHOICES, "model": "mlp"}, "fc1", overrides)[0].rows)
    assert rows["model"] == "mlp, 325 parameters, 105 of them trained"  # fc2: 20 x 5 + 5
    assert rows["sharding"] == "no_shard, mesh 2 x 1, 3 units"
    assert rows["batch"] == "3 samples x 4 micro-batches x 2 ranks = 24, reduce last"
    assert rows["data"] == "random_tokens"  # samples of no tokens


SUMMARY = {
    "status": "completed",
    "steps": 100,
    "loss": {"first": 5.54519, "last": 2.0},
    "eval": {"loss": 2.25},
    "perf": {"step_ms": 1234.56, "tokens_per_s": 16589.4, "unit": "tokens", "flops_per_token": 1.0},
    "comm": {"all_gather_bytes": 3 << 30, "reduce_scatter_bytes": 1 << 20, "all_reduce_bytes": 0},
    "memory": {
        "allocated_peak_bytes": 5 << 30,
        "reserved_peak_bytes": 6 << 30,
        "host_rss_peak_bytes": 1 << 29,
        "parameters_bytes": 1 << 20,
        "gradients_bytes": 0,
        "optimizer_bytes": 2 << 20,
    },
}


def test_the_closing_table_says_what_was_measured():
    assert closing_rows(SUMMARY) == [
        ("status", "completed"),
        ("steps", "100"),
        ("loss", "5.5452 -> 2.0000"),
        ("held-out loss", "2.2500"),
        ("tokens/s", "16,589"),
        ("step", "1,234.6 ms"),
        ("peak allocated", "5.00 GiB per rank"),
        ("peak reserved", "6.00 GiB per rank"),
        ("parameters", "1.0 MiB per rank"),
        ("gradients", "0.0 KiB per rank"),
        ("optimizer state", "2.0 MiB per rank"),
        ("host memory, peak", "0.50 GiB per rank"),
        ("all-gather", "3.00 GiB per rank and step"),
        ("reduce-scatter", "1.0 MiB per rank and step"),
    ]


GIB = 1 << 30


@pytest.mark.parametrize(("prediction", "text"), [
    (Prediction(5 * GIB, None, None, None), "5.00 GiB allocated per rank"),
    (Prediction(5 * GIB, 6 * GIB, 90 * GIB, True), "5.00 GiB allocated, 6.00 GiB reserved of 90.00 GiB per rank: fits"),
    (
        Prediction(5 * GIB, 6 * GIB, 4 * GIB, False),
        "5.00 GiB allocated, 6.00 GiB reserved of 4.00 GiB per rank: does not fit",
    ),
])  # fmt: skip
def test_a_row_says_what_the_plan_ahead_predicts(prediction, text):
    assert planned_row(prediction) == ("plan", text)


@pytest.mark.parametrize(("allocated", "reserved", "error_pct", "beside_allocated", "beside_reserved"), [
    (5 * GIB, 9 * GIB, 50.0, " (planned 5.00 GiB, error 0.0 %)", " (planned 9.00 GiB, error 50.0 %)"),
    (4 * GIB, None, -20.0, " (planned 4.00 GiB, error -20.0 %)", ""),
    (5 * GIB - 1, None, -1e-8, " (planned 5.00 GiB, error 0.0 %)", ""),
    (4 * GIB, 9 * GIB, None, " (planned 4.00 GiB)", " (planned 9.00 GiB)"),  # not all of it was measured
    (None, None, None, "", ""),
])  # fmt: skip
def test_the_closing_table_says_what_was_planned(allocated, reserved, error_pct, beside_allocated, beside_reserved):
    plan = {"allocated_peak_bytes": allocated, "reserved_peak_bytes": reserved, "error_pct": error_pct}
    rows = dict(closing_rows({**SUMMARY, "plan": plan}))
    assert rows["peak allocated"] == "5.00 GiB per rank" + beside_allocated
    assert rows["peak reserved"] == "6.00 GiB per rank" + beside_reserved
    assert rows["parameters"] == "1.0 MiB per rank"


def tracker_in(folder):
    cfg = TrackingConfig(wandb=WandbConfig(mode=WandbMode.disabled))
    return make_tracker(cfg, folder, config={}, tags=[], rank=0)


def test_rows_that_are_known_late_end_the_header_and_notices_follow(tmp_path, capsys):
    tracker = tracker_in(tmp_path)

    def late_rows():
        assert capsys.readouterr().out == "  model   net\n  device  CPU\n"
        tracker.notice("of the plan")
        return [("plan", "5 GiB")]

    header = RunHeader(rows=[("model", "net"), ("device", "CPU")], total_steps=3, notices=["of the header"])
    tracker.start(header, late_rows=late_rows)
    assert capsys.readouterr().out == "  plan    5 GiB\n\nnote: of the header\nnote: of the plan\n"


def test_what_ends_the_wait_for_late_rows_leaves_the_display_in_order(tmp_path, capsys):
    def late_rows():
        raise Interrupted

    with pytest.raises(Interrupted):
        tracker_in(tmp_path).start(RunHeader([("model", "net")], 3, notices=["said all the same"]), late_rows=late_rows)
    assert capsys.readouterr().out == "  model  net\n\nnote: said all the same\n"


@pytest.mark.parametrize("nothing", [
    {},
    {"loss": None, "perf": None, "memory": None, "comm": None, "eval": None},
    {"loss": {"first": None, "last": None}, "eval": {"loss": None}, "perf": {"step_ms": None, "tokens_per_s": None}},
    {"memory": {"allocated_peak_bytes": None, "reserved_peak_bytes": None}, "comm": {"all_gather_bytes": 0}},
])  # fmt: skip
def test_the_closing_table_leaves_out_what_was_not_measured(nothing):
    assert closing_rows({"status": "failed", **nothing}) == [("status", "failed"), ("steps", "0")]
