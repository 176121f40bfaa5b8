"""Files that others read while they are written. Imports nothing that takes time."""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Replaces a file in one move, so that a reader never finds half of one."""
    draft = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}")  # two threads may end a run at once
    draft.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(draft, file)
