"""What both serve scripts share: comparison, counters, and child processes that end whatever they do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
ENGINES = Path(__file__).parents[2] / "scripts" / "engines"

sys.path.insert(0, str(ENGINES))
import counting as common  # noqa: E402

sys.path.remove(str(ENGINES))

# A serve script with an engine of one process and a worker that ignores every polite request.
SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {engines!r})
import child
import counting
import serve_common as c
child.GRACE_SECONDS = 0.5

def serve(job, drafter):
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    {behaviour}

job = c.parse_job("fake")
child.end_on_signals()
c.run("fake", "1", job, serve)
"""
DRAFTED = "counting.Output('a', [7, 8, 9], 1, [0, 1, 0, 0])"
PLAIN = "counting.Output('a', [7, 8, 9])"


def run_fake(folder: Path, behaviour: str, *options: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    for name in ("target", "drafter"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    prompts = {"prompts": [{"id": "a", "input_ids": [1], "max_new_tokens": 3}]}
    (folder / "prompts.json").write_text(json.dumps(prompts))
    (folder / "fake.py").write_text(SCRIPT.format(engines=str(ENGINES), behaviour=behaviour))
    command = [
        sys.executable,
        "fake.py",
        "--target",
        "target",
        "--prompts",
        "prompts.json",
        "--out",
        "out.json",
        *options,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    return done, folder / "out.json"


def survivors(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").resolve(strict=True) == folder:
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_a_result_is_written_whole_and_the_stubborn_worker_is_gone(tmp_path):
    behaviour = f"return counting.Served([{DRAFTED} if drafter else {PLAIN}], 1.0, 2.0)"
    done, out = run_fake(tmp_path, behaviour, "--drafter", "drafter", "--compare")
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["spec"]["accept_length"] == 2
    assert result["spec"]["accept_per_position"] == [1, 0, 0]
    assert result["base"] == {
        "tokens": 3,
        "seconds": 2.0,
        "tokens_per_second": 1.5,
        "start_seconds": 1.0,
        "outputs": [{"id": "a", "output_ids": [7, 8, 9]}],
    }
    assert result["identical"] is True
    assert survivors(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_without_a_drafter_only_the_base_is_served(tmp_path):
    done, out = run_fake(tmp_path, f"return counting.Served([{PLAIN}], 1.0, 2.0)")
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert (result["spec"], result["identical"]) == (None, None)


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("raise ValueError('no such tensor')", "no such tensor"),
        ("print('weights are broken', flush=True); os._exit(3)", "weights are broken"),
        ("time.sleep(600)", "ran into the time limit"),
    ],
)
def test_a_failing_dying_or_hanging_engine_is_reported_and_ended(tmp_path, behaviour, words):
    began = time.monotonic()
    done, out = run_fake(tmp_path, behaviour, "--timeout", "1")
    assert done.returncode == 2
    assert words in done.stderr
    assert str(tmp_path / "out.log") in done.stderr
    assert time.monotonic() - began < 20
    assert survivors(tmp_path) == []
    assert not out.exists()


def test_contradicting_counters_are_refused():
    served = common.Served([common.Output("a", [1], 2, [1, 1, 0, 0])], 0.0, 1.0, {"verify_steps": 3})
    with pytest.raises(RuntimeError, match="2 verify steps and 1 accepted drafts, the totals 3 and 1"):
        common.summarise_counters(served, 3)


def test_per_position_acceptance_counts_steps_that_went_further():
    served = common.Served([common.Output("a", [], 5, [2, 0, 2, 1])], 0.0, 1.0)
    summary = common.summarise_counters(served, 3)
    assert summary["accept_per_position"] == [3 / 5, 3 / 5, 1 / 5]
    assert summary["accept_length"] == 1 + (2 * 2 + 3) / 5


def test_first_divergence_is_where_tokens_or_lengths_part():
    base = [common.Output(name, ids) for name, ids in (("same", [1, 2]), ("other", [1, 2, 3]), ("short", [1, 2]))]
    spec = [common.Output(name, ids) for name, ids in (("same", [1, 2]), ("other", [1, 9, 3]), ("short", [1]))]
    assert common.first_divergences(base, spec) == [
        {"id": "other", "index": 1, "base": 2, "spec": 9},
        {"id": "short", "index": 1, "base": 2, "spec": None},
    ]
