"""Runs each command in docs/planner.md, and puts what it prints below it; the tables are made of bench/results.

    python bench/planner_docs.py                # about 5 minutes on 2 cores
    python bench/planner_docs.py reshard units  # only commands that have one of these words
    python bench/planner_docs.py --check        # writes nothing; says what would change

A command begins a ```console block, after "$ "; a line that ends in a backslash goes on in the next one. It runs from
the repository's root, in bash, and must succeed: so must each part of a pipe. Run folders are temporary, and appear as
`outputs/...`; seconds appear as dots.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "planner.md"
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"```console\n(?P<command>\$ (?:.*\\\n)*.*)\n(?P<output>(?:(?!```).*\n)*)```")
TABLE = re.compile(
    r"(<!-- (?P<name>\w+): made by bench/planner_docs.py -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL
)
# `python` as the user has it, with a run folder of its own; Hydra takes the last value of a key.
PRELUDE = """set -o pipefail
python() {
  if [ "$1" = train.py ]; then
    local folder; folder=$(mktemp -u "$RUNS/XXXXXXXX")
    set -- "$@" hydra.run.dir="$folder" hydra.sweep.dir="$folder"
  fi
  "$PYTHON" "$@"
}
"""


def commands(text: str) -> list[str]:
    """The commands of a document, without their "$ "."""
    return [block["command"][2:] for block in BLOCK.finditer(text)]


def run(command: str) -> str | None:
    """What a command prints, without what differs from run to run; None where it fails, and says so."""
    with tempfile.TemporaryDirectory() as runs:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "RUNS": runs}
        done = subprocess.run(
            ["bash", "-c", PRELUDE + command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
    if done.returncode:
        print(f"exit code {done.returncode}: {command}\n{done.stdout}{done.stderr}", file=sys.stderr, flush=True)
        return None
    output = re.sub(re.escape(runs) + r"/\w+", "outputs/...", done.stdout)
    output = re.sub(r"(planned in +)[\d.]+ s", r"\1... s", output)
    return "".join(f"{line.expandtabs(4).rstrip()}\n" for line in output.splitlines() if line.strip())


def run_all(wanted: list[str]) -> dict[str, str]:
    """What each command prints that succeeds; shows it as it comes."""
    outputs = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for command, output in zip(wanted, pool.map(run, wanted), strict=True):
            if output is not None:
                outputs[command] = output
                print(f"$ {command}\n{output}", flush=True)
    return outputs


def exact() -> str:
    """How many plans of runs on CPUs were compared with them, and how many differ, in a sentence."""
    results = _results("plan_exact")
    differ = len(results["differ"]) or "none"
    return f"{results['compared']} of {results['of']} combinations compared, {differ} of them differ by a byte or more."


def published() -> str:
    """The plans of runs whose peak was published, in Markdown."""
    rows = [
        "| `experiment=published/` | peak, GiB | published | planned | in the publisher's operators |",
        "|---|---|--:|--:|--:|",
    ]
    for name, row in _results("published").items():
        for kind in ("reserved", "allocated"):
            if figure := row["published"][f"{kind}_gib"]:
                cells = [
                    f"{row[column][f'{kind}_gib']:.2f} ({row[column][f'{kind}_error_pct']:+.1f} %)"
                    for column in ("planned", "same_operators")
                ]
                rows.append(f"| [`{name}`]({row['source']}) | {kind} | {figure:.2f} | {' | '.join(cells)} |")
    return "\n".join(rows)


def profiler() -> str:
    """What torch.profiler sees in runs on CPUs, and the ledger does not, in Markdown."""
    ranks = [rank for run in _results("ledger_vs_profiler") for rank in run["ranks"]]
    largest: Counter[str] = Counter()
    for rank in ranks:
        largest |= Counter(rank["largest"])
    differ = sum(not 0 <= rank["storages"] - rank["ledger"] <= rank["untold"] for rank in ranks)
    most = max(rank["profiler"] / rank["ledger"] - 1 for rank in ranks)
    return "\n".join(
        [
            "| taken by | largest block, bytes |",
            "|---|--:|",
            *(f"| {_code(kind)} | {nbytes:,} |" for kind, nbytes in largest.most_common()),
            "",
            f"{len(_results('ledger_vs_profiler'))} runs, {len(ranks)} ranks: the peaks of storages differ on {differ} "
            "ranks by more than the profiler itself leaves open.",
            f"With all of the above, its peak is up to {100 * most:.0f} % above the ledger's in these small runs.",
        ]
    )


TABLES = {"exact": exact, "published": published, "profiler": profiler}


def filled(text: str, outputs: Mapping[str, str]) -> str:
    """The document with these outputs below their commands, and with its tables."""

    def block(match: re.Match[str]) -> str:
        output = outputs.get(match["command"][2:], match["output"])
        return f"```console\n{match['command']}\n{output}```"

    return TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match['name']]()}\n\n{match[3]}", BLOCK.sub(block, text))


def changed(before: str, after: str) -> list[str]:
    """Names of the tables and commands whose part of the document is another one."""
    pairs = [*zip(BLOCK.finditer(before), BLOCK.finditer(after), strict=True)]
    pairs += [*zip(TABLE.finditer(before), TABLE.finditer(after), strict=True)]
    return [old.groupdict().get("command") or old["name"] for old, new in pairs if old[0] != new[0]]


def _results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def _code(kind: str) -> str:
    return f"`{kind}`" if "::" in kind else kind


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", help="only commands that have one of these")
    parser.add_argument("--check", action="store_true", help="write nothing; say what would change")
    options = parser.parse_args()
    before = DOCS.read_text()
    wanted = [c for c in commands(before) if not options.words or any(word in c for word in options.words)]
    outputs = run_all(wanted)
    after = filled(before, outputs)
    changes = changed(before, after)
    if options.check:
        print("would change:", *changes or ["nothing"], sep="\n")
    else:
        DOCS.write_text(after)
        print(f"{len(changes)} of {len(wanted)} outputs and {len(TABLES)} tables changed in {DOCS.relative_to(ROOT)}")
    failed = len(wanted) - len(outputs)
    if failed or (options.check and changes):
        sys.exit(f"{failed} commands failed" if failed else 1)


if __name__ == "__main__":
    main()
