"""A broken engine gives one clear error within its time limit and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.accept.local import serve_locally
from draftsmith.configs.errors import DraftsmithError
from tests.accept import faulty_engine

PROMPTS = {"prompts": [{"id": "a", "input_ids": [1], "max_new_tokens": 2}], "stop_token_ids": [2]}


def survivors(folder: Path) -> list[str]:
    """Living processes that work in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            works_here = entry.name.isdigit() and (entry / "cwd").resolve(strict=True) == folder
            if works_here and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


def serve(folder: Path, behaviour: str, start_limit: float = 4.0, limit: float = 8.0):
    python = faulty_engine.write(folder, behaviour)
    return serve_locally(
        "sglang", target=folder, drafter=folder, prompts=PROMPTS, out=folder / "served.json", steps=3, python=python,
        start_limit=start_limit, limit=limit, max_running=1,
    )  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder in which the engine's processes work, so that they can be found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("draftsmith.accept.processes.GRACE_SECONDS", 0.5)
    return tmp_path


@pytest.mark.parametrize(
    ("behaviour", "words", "said"),
    [
        ("never ready", "SGLang was not ready within 4 seconds", "loading weights"),
        ("not even starting", "SGLang was not ready within 4 seconds", "importing"),
        ("dies", "ended before it had served everything, exit code 7", "out of luck"),
        ("killed", "served everything, killed by signal 9", "found: killed by signal 9 (SIGKILL), as a system does"),
        ("never done", "did not finish within 8 seconds", "nothing"),
        ("no counters", "reported no counters", "no accept_length, accept_per_position, verify_steps"),
        ("no verify steps", "reported no counters", "0 verify steps"),
        ("no result", "the served result is missing", ""),
    ],
)
def test_a_broken_engine_is_named_in_time_and_nothing_is_left(here, behaviour, words, said):
    began = time.monotonic()
    with pytest.raises(DraftsmithError, match=words) as caught:
        serve(here, behaviour)
    assert time.monotonic() - began < 20
    assert said in str(caught.value)
    if behaviour == "killed":
        assert str(caught.value).index("found: killed by signal 9") < str(caught.value).index("loading weights")
    assert len(survivors(here)) == (1 if Path.cwd() == here else 0)  # this test itself
    left = sorted(
        file.name for file in here.iterdir() if file.suffix in (".progress", ".json") and file.name != "served.json"
    )
    assert left == []
    if behaviour in ("never ready", "dies"):
        assert said in (here / "served.log").read_text()


def test_an_engine_that_is_not_there_is_named_with_the_command_that_builds_it(here, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_VENVS", str(here / "none"))
    monkeypatch.setenv("DRAFTSMITH_VLLM_PYTHON", str(here / "none" / "python"))
    with pytest.raises(DraftsmithError, match="there is no Python with vLLM") as caught:
        serve_locally(
            "vllm", target=here, drafter=here, prompts=PROMPTS, out=here / "o.json", steps=3, python=None,
            start_limit=1, limit=1, max_running=1,
        )  # fmt: skip
    assert "scripts/setup_engine.sh vllm" in str(caught.value)


def test_faked_acceptance_is_refused(here, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    with pytest.raises(DraftsmithError, match="fake acceptance"):
        serve(here, "dies")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_process_survives_an_interrupt(tmp_path, number):
    script = (
        "import signal, sys; from pathlib import Path; from draftsmith.accept import processes\n"
        "processes.GRACE_SECONDS = 0.5\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "from tests.accept.test_local import serve\n"
        "serve(Path(sys.argv[1]), 'never ready', 60, 60)\n"
    )
    root = str(Path(__file__).parents[2])  # `pytest` alone does not put it there
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=tmp_path, env=environment, stderr=subprocess.PIPE
    )
    limit = time.monotonic() + 30
    while len(survivors(tmp_path)) < 4 and time.monotonic() < limit:  # caller, engine, two workers
        time.sleep(0.05)
    assert len(survivors(tmp_path)) == 4
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode in (1, 128 + number, -number, 130)
    assert survivors(tmp_path) == []
