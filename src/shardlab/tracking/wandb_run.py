"""The run in Weights & Biases, which may fail in any way without failing the training."""

import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardlab.tracking.config import WandbConfig, WandbMode

# What W&B's summary keeps of a metric, as `<metric>.<kind>`. (define_metric(summary="max") alone would drop the last.)
KEPT = "max,last"
LOWER_IS_BETTER = ["train/loss", "train/perplexity", "eval/loss", "eval/perplexity", "perf/step_ms", "perf/data_ms"]
KEPT_OF = {**dict.fromkeys(LOWER_IS_BETTER, "min,max,last"), "perf/tokens_per_s": "max,mean,last"}
MODES = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}


def wandb_mode(cfg: WandbConfig) -> WandbMode:
    """What `tracking.wandb.mode` and, where that is `auto`, the variable WANDB_MODE ask for."""
    mode = WandbMode(cfg.mode)
    if mode is WandbMode.auto:
        return WandbMode(MODES.get(os.environ.get("WANDB_MODE", ""), "auto"))
    return mode


class WandbRun:
    """One run in W&B: online; offline where W&B cannot be reached; nothing where even that fails."""

    name = "W&B"

    def __init__(
        self,
        cfg: WandbConfig,
        run_dir: Path,
        *,
        config: Mapping[str, Any],
        tags: list[str],
        notice: Callable[[str], None],
    ):
        """
        Args:
            cfg: the node `tracking.wandb`.
            run_dir: the run folder; W&B's files lie in `wandb/` below it.
            config: the run's whole config, for the run's page.
            tags: say what runs.
            notice: tells the user.
        """
        self._cfg = cfg
        self._run_dir = run_dir.resolve()
        self._config = dict(config)
        self._tags = [tag[:64] for tag in dict.fromkeys([*tags, *cfg.tags]) if tag]  # the server takes 64 characters
        self._notice = notice
        self._run: Any = None
        self._axis: str | None = None
        self._to_upload = False  # whether rows that should be online are only on disk

    def start(self) -> None:
        """Opens the run; says so where it is not what was asked for."""
        mode = wandb_mode(self._cfg)
        if mode is not WandbMode.offline and self._start_online(asked_for=mode is WandbMode.online):
            self._notice(f"W&B run {self._run.url}")
            return
        try:
            self._run = self._init("offline")
        except Exception as error:
            self._notice(f"W&B is off: {reason_of(error)}")

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Hands a row to W&B's own process, which writes and uploads it."""
        if self._run is None:
            return
        if self._axis is None:
            self._define_metrics(row)
        # One NaN would stay the maximum and minimum in W&B's summary for ever.
        self._run.log(
            {key: value for key, value in row.items() if value is not None and math.isfinite(value)}, step=step
        )

    def show(self, media: Mapping[str, Any]) -> None:
        """Hands tables and plots (`wandb.Table`, `wandb.Plotly`) to the run."""
        if self._run is not None:
            self._run.log(media)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Ends the run, with the summary's values beside those of W&B, under the names of summary.json (`loss.last`).

        Waits `finish_timeout_s` at most: without a network W&B's own default is to wait for ever.
        """
        if self._run is None:
            return
        import wandb

        try:
            self._run.summary.update(dict(_flatten(summary)))
            self._run.finish(exit_code=0 if summary.get("status") == "completed" else 1)
            wandb.teardown()  # W&B's own process would outlive this one by seconds
        except TimeoutError:
            self._to_upload = True
            self._notice(f"W&B has not got all rows after {self._cfg.finish_timeout_s:g} s; they are on disk")
        except Exception:
            self._to_upload = not self._run.offline
            with suppress(Exception):  # its process is gone; else it complains once more when Python exits
                wandb.teardown()
            raise

    def where(self) -> list[tuple[str, str]]:
        """How to look at the run, as rows of the closing table."""
        if self._run is None:
            return []
        if not self._run.offline and not self._to_upload:
            return [("browse", self._run.url)]
        folder = Path(self._run.dir).parent
        latest = folder.parent / "latest-run"  # W&B's link: shorter to read
        rows = [("browse", f"{_command()} leet run {_shown(latest if latest.resolve() == folder else folder)}")]
        if self._to_upload:
            rows.append(("upload", f"{_command()} sync {_shown(folder)}"))
        return rows

    def _start_online(self, *, asked_for: bool) -> bool:
        try:
            if not is_logged_in():
                if asked_for:
                    self._to_upload = True
                    self._notice("W&B goes on offline: tracking.wandb.mode=online, but not logged in (wandb login)")
                return False
            self._run = self._init("online")
            return True
        except Exception as error:
            self._to_upload = True
            self._notice(f"W&B goes on offline: {reason_of(error)}")
            return False

    def _init(self, mode: str) -> Any:
        wandb, cfg = quiet_wandb(), self._cfg
        settings = wandb.Settings(
            silent=True,  # the display says where the run is
            console="off",  # W&B's capture would get every frame of the progress bar
            save_code=False,
            disable_code=True,  # the commit is recorded, uncommitted changes are not uploaded
            init_timeout=cfg.init_timeout_s,
            finish_timeout=cfg.finish_timeout_s,
            finish_timeout_raises=True,
        )
        return wandb.init(
            project=cfg.project,
            entity=cfg.entity,
            name=cfg.name,
            group=cfg.group,
            job_type=cfg.job_type,
            tags=self._tags,
            config=self._config,
            dir=str(self._run_dir),
            mode=mode,
            settings=settings,
        )

    def _define_metrics(self, row: Mapping[str, Any]) -> None:
        axes = ("progress/tokens", "progress/samples", "progress/step")
        self._axis = next((name for name in axes if name in row), axes[-1])
        self._run.define_metric(self._axis)
        self._run.define_metric("*", step_metric=self._axis, summary=KEPT)
        for name, kept in KEPT_OF.items():
            self._run.define_metric(name, step_metric=self._axis, summary=kept)


def quiet_wandb() -> Any:
    """The module, told to keep quiet; imported here because it takes half a second."""
    import wandb

    wandb.setup(wandb.Settings(silent=True))
    return wandb


def is_logged_in() -> bool:
    """Whether the SDK knows an API key (environment, netrc, settings); never asks for one, nor the server about it."""
    return bool(quiet_wandb().login(prompt=False, verify=False))


def reason_of(error: Exception) -> str:
    """The first line of what W&B says."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def _command() -> str:
    """How this shell can call `wandb`, also where the environment is not activated."""
    beside = Path(sys.executable).with_name("wandb")
    return "wandb" if shutil.which("wandb") or not beside.exists() else _shown(beside)


def _shown(path: Path) -> str:
    """A path as the shell takes it, relative where that is shorter."""
    return shlex.quote(min(str(path), os.path.relpath(path), key=len))
