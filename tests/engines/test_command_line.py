"""The scripts refuse what cannot work with one clear line, and leave no process behind."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"prompts": [{"id": "a", "input_ids": [1, 2], "max_new_tokens": 4000}]}))
    return path


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an expected failure."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["serve_sglang.sh", "serve_vllm.sh"])
def test_missing_folders_and_files_are_named(script, target_folder, tmp_path, prompts, name):
    out = tmp_path / "out.json"
    none = tmp_path / "none"
    good = ("--target", target_folder, "--prompts", prompts, "--out", out)
    assert f"--target {none}: no config.json" in refusal(script(name, *good, "--target", none))
    assert f"--drafter {none}: no config.json" in refusal(script(name, *good, "--drafter", none))
    assert f"--prompts {none}" in refusal(script(name, *good, "--prompts", none))
    assert "--compare needs --drafter" in refusal(script(name, *good, "--compare"))
    assert not out.exists()


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"prompts": []}, "at least one"),
        ({"prompts": [{"id": 1, "input_ids": [1], "max_new_tokens": 1}]}, "prompts[0].id"),
        ({"prompts": [{"id": "a", "input_ids": [], "max_new_tokens": 1}]}, "prompts[0].input_ids"),
        ({"prompts": [{"id": "a", "input_ids": [1], "max_new_tokens": 0}]}, "prompts[0].max_new_tokens"),
        ({"prompts": [{"id": "a", "input_ids": [1], "max_new_tokens": 1}] * 2}, "prompts[1].id"),
        ({"prompts": [{"id": "a", "input_ids": [1], "max_new_tokens": 1}], "stop_token_ids": "2"}, "stop_token_ids"),
    ],
)
def test_a_malformed_prompts_file_is_refused_by_place(script, target_folder, tmp_path, document, place):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(document))
    done = script("serve_sglang.sh", "--target", target_folder, "--prompts", path, "--out", tmp_path / "out.json")
    assert place in refusal(done)


def test_faked_acceptance_is_refused(script, target_folder, tmp_path, prompts, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    done = script("serve_sglang.sh", "--target", target_folder, "--prompts", prompts, "--out", tmp_path / "out.json")
    assert "SGLANG_SIMULATE_ACC_LEN is set" in refusal(done)


def _processes_in(folder: Path) -> list[int]:
    """Ids of the living processes that work in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").resolve(strict=True) == folder:
                found.append(int(entry.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def test_no_process_of_the_engine_survives_an_interrupt(target_folder, tmp_path, prompts):
    out = tmp_path / "out.json"
    command = [str(REPOSITORY / "scripts" / "serve_sglang.sh"), "--target", str(target_folder)]
    command += ["--prompts", str(prompts), "--out", str(out), "--max-running", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while len(_processes_in(tmp_path)) < 4 and time.monotonic() < deadline:  # launcher, engine, scheduler, detokenizer
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert _processes_in(tmp_path) == []
    assert not out.exists()
    assert "Traceback" not in errors
