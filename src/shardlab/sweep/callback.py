"""Hydra's callback that ends a sweep: `hydra.callbacks.sweep_report._target_=shardlab.sweep.callback.SweepReport`."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepReport(Callback):
    """Writes and prints the results of a sweep whose jobs have all ended."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        is_first_node = not config.hydra.launcher.get("node_rank", 0)  # the others only lend their devices
        if is_first_node and (folder / "sweep.json").exists():  # Hydra's own launchers write none
            from shardlab.sweep.report import finish  # what takes time to import comes where it is needed

            finish(folder)
        from shardlab.sweep.launcher import tell_command_line

        tell_command_line(folder)
