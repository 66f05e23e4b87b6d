"""The promise that memory does not grow with the number of conversations; scripts/bench_many.py with 100,000 is the full one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_many_conversations_stay_in_little_memory(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts/bench_many.py"
    peaks = []
    for count in (500, 8000):
        file = tmp_path / f"{count}.json"
        command = [
            sys.executable,
            str(script),
            "--conversations",
            str(count),
            "--folder",
            str(tmp_path),
            "--json",
            str(file),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(file.read_text())["peak_bytes"])
    # 7,500 conversations more, of 50 tokens: a few kB each at most, manifest and plan included
    assert peaks[1] < 1.5e9 and peaks[1] - peaks[0] < 7500 * 20_000, peaks
