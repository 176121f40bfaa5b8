"""torchrun, for a parent that wants to know how each rank ended: `python -m shardlab.sweep.elastic REPORT ARGUMENTS`.

The arguments are torchrun's. REPORT is written where ranks failed: their exit codes, by rank, negative for signals.
Where the standard input closes, the parent is gone, and the ranks are ended.
"""

import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from shardlab.files import write_json
from shardlab.interrupt import when_input_closes


def main() -> int:
    """Returns the exit code."""
    # torchrun passes the signal on to its ranks, and waits for them.
    when_input_closes(lambda: os.kill(os.getpid(), signal.SIGTERM))
    # A store that outlives an attempt (--max-restarts) has the addresses of its ranks, to which gloo then connects.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    report, *arguments = sys.argv[1:]
    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        write_json(Path(report), {str(rank): failure.exitcode for rank, failure in error.failures.items()})
        return 1
    except SignalException as ended:
        return 128 + ended.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
