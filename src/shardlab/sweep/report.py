"""What is written and said at the end of a sweep; and once more, of what is there by now:

python -m shardlab.sweep.report outputs/multirun/2026-01-31/12-00-00
"""

import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shardlab.errors import ConfigError, describe
from shardlab.sweep.page import write_page
from shardlab.sweep.results import read_results, write_results
from shardlab.sweep.screen import show


def finish(folder: Path) -> None:
    """Ends a sweep: prints and writes its results and its report, and sums them up in W&B. Raises no error.

    Args:
        folder: of the sweep.
    """
    try:
        make_report(folder)
        from shardlab.sweep.wandb_summary import log_summary

        notice = log_summary(folder)
        if notice:
            print(f"  note: {notice}\n", flush=True)
    except Exception as error:  # the jobs have run, and are not to be lost for it
        file = folder / "report_error.log"
        with suppress(OSError):
            file.write_text(traceback.format_exc())
        again = f"python -m shardlab.sweep.report {shlex.quote(str(folder))}"
        print(
            f"  note: the report is not complete ({describe(error)}; traceback in {file}); make it again by {again}\n"
        )


def make_report(folder: Path) -> None:
    """Prints the results of a sweep, and writes them to `results.csv`, `results.jsonl` and `report.html`.

    Args:
        folder: of the sweep, whether it has ended or not.

    Raises:
        ConfigError: where the folder holds no sweep.
    """
    results = read_results(folder)
    show(results)
    write_results(results)
    write_page(results)
    print("".join(f"  {folder / name}\n" for name in ("results.csv", "report.html")), flush=True)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 2 for a mistake."""
    try:
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise ConfigError("name one folder of a sweep: python -m shardlab.sweep.report FOLDER")
        make_report(Path(arguments[0]))
    except (ConfigError, OSError) as error:
        print(f"error: {describe(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
