"""What the processes that compute hidden states for a harvest share: the job, and the lines that go to and fro.

A process is `python harvest_ENGINE.py JOB.json`, JOB being

    {"target": DIR, "dtype": "bfloat16", "layers": [2, 30, 58, 61], "longest": 4096, "batch_tokens": 8192,
     "folder": DIR for the states, "log": FILE for the engine's own output, "options": {further arguments of the engine}}

Lines of JSON: first {"ready": VERSION} comes out; then a line [[token ids], ...] goes in and {"files": [one for each
sequence], "next": [the token after each]} comes out; or {"error": text}. A file holds hidden_states (T, layers, H) and
token_ids (T,). The process ends with its input.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child

Compute = Callable[[list[list[int]]], dict[str, list]]


def run(start: Callable[[dict[str, Any]], tuple[str, Compute]]) -> None:
    """Serve the job named on the command line; `start` gives the engine's version and what computes a task."""
    job = json.loads(Path(sys.argv[1]).read_text())
    child.end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with child.output_to(Path(job["log"])):
        try:
            version, compute = start(job)
            print(json.dumps({"ready": version}), file=answers)
            for line in sys.stdin:
                print(json.dumps(compute(json.loads(line))), file=answers)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
            raise SystemExit(1) from None
