"""A benchmark's command, run as users do, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_bench(out: Path, arguments: Sequence[str]) -> Any:
    """What ``comb ARGUMENTS`` has written to `out`, if it succeeds; else its last words and its servers'."""
    code = "from comb.cli.main import main; main()"
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    logs = "".join(path.read_text()[-1500:] for path in out.with_suffix(".logs").glob("*.log"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:] + logs
    return json.loads(out.read_text())
