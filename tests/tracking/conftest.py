"""What tests of tracking share: an environment without a W&B account, and a server that stands in for W&B's."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardlab.tracking import RunHeader, Tracker, make_tracker
from shardlab.tracking.config import Display, TrackingConfig, WandbConfig, WandbMode

FAKE_KEY = "0123456789abcdef" * 2 + "01234567"
HEADER = RunHeader(rows=[("model", "tiny, 1.2 M parameters"), ("sharding", "full_shard, mesh 2")], total_steps=3)


@pytest.fixture(autouse=True)
def no_wandb_account(tmp_path: Path) -> Iterator[None]:
    """Hides the user's settings and keys, and ends W&B's process, whose address would stay in the environment."""
    home = tmp_path / "home"
    home.mkdir()
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            del os.environ[name]
        os.environ |= {"HOME": str(home), "NETRC": str(home / ".netrc"), "WANDB_CONFIG_DIR": str(home / "wandb")}
        yield
        if "wandb" in sys.modules:
            import wandb
            from wandb.sdk.lib import wbauth

            wbauth.unauthenticate_session(update_settings=False)
            wandb.teardown()


@pytest.fixture
def track(tmp_path: Path) -> Callable[..., Tracker]:
    """`track(mode)` makes rank 0's tracker in `tmp_path / "run"`; more arguments are keys of `tracking.wandb`."""

    def make(mode: WandbMode = WandbMode.disabled, *, display: Display = Display.auto, **wandb: Any) -> Tracker:
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        cfg = TrackingConfig(display=display, wandb=WandbConfig(mode=mode, **wandb))
        return make_tracker(cfg, run_dir, config={"seed": 3, "train": {"steps": 3}}, tags=["precision=bf16"], rank=0)

    return make


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, read as strictly as JSON is."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def wandb_records(run_dir: Path) -> list[dict[str, Any]]:
    """All records of the newest W&B run in a run folder, by W&B's own reader."""
    return [json.loads(line) for line in _inspect(run_dir).splitlines()]


def wandb_summary(run_dir: Path) -> dict[str, Any]:
    """State, config and summary of the newest W&B run in a run folder, by W&B's own reader."""
    return json.loads(_inspect(run_dir, "--summary"))


def _inspect(run_dir: Path, *options: str) -> str:
    path = (run_dir / "wandb" / "latest-run").resolve()
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class WandbServer:
    """Answers what W&B's process asks a server for, just enough for an online run."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []  # uploaded rows
        self.exit_code: int | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def go_away(self) -> None:
        """Refuses connections from now on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                reply = json.dumps(outer.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_PUT = do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            stream = json.loads(body)
            lines = stream.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.history += [json.loads(line) for line in lines]
            self.exit_code = stream.get("exitcode", self.exit_code)
        elif b"UpsertBucket" in body:
            project = {"id": "p", "name": "shardlab", "entity": {"id": "e", "name": "team"}}
            bucket = {
                "id": "b",
                "name": json.loads(body)["variables"]["name"],
                "displayName": "run-1",
                "project": project,
            }
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        elif b"CreateRunFiles" in body:
            files = [
                {"name": name, "uploadUrl": f"{self.url}/upload/{name}"}
                for name in json.loads(body)["variables"]["files"]
            ]
            return {"data": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}}
        return {"data": {}}


@pytest.fixture
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()
    os.environ |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": FAKE_KEY}
    yield server
    server.go_away()
