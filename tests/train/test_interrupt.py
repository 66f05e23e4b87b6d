"""Ctrl-C ends a run with one line that says what stands, exit code 130 and no traceback; the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.configs.schema import load_config
from draftsmith.train import checkpoint as saving
from tests.train.launching import ENVIRONMENT, ROOT, curve, start
from tests.train.test_resume import progress, same_bytes, wait_for, workers

LONG = ("train.epochs=300", "train.evaluate_every=1000")
SHORT = ("train.epochs=8", "train.evaluate_every=50")
"""Some thirty steps."""


def as_verb(file, *overrides, log):
    """`draftsmith train`, in a process group of its own."""
    with log.open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", "draftsmith", "train", str(file), *overrides],
            cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def press(process):
    """Ctrl-C, as a terminal sends it: to every process of the group."""
    os.killpg(process.pid, signal.SIGINT)


def said(log):
    return [line for line in log.read_text().splitlines() if "interrupted" in line]


@pytest.mark.slow
@pytest.mark.parametrize("begin", [as_verb, start], ids=["draftsmith train", "python -m draftsmith.train"])
def test_one_process_says_what_stands_and_the_same_command_goes_on(copy, tmp_path, warm_python, begin):
    file, log = copy("broken"), tmp_path / "broken.log"
    config = load_config(file, list(SHORT))
    process = begin(file, *SHORT, log=log)
    wait_for(lambda: progress(config) >= 7, process)
    press(process)
    assert process.wait(30) == 130
    (line,) = said(log)
    newest = saving.checkpoints(config.training)[-1]
    assert line == f"interrupted: {newest} stands, and the same command goes on from it"
    assert "Traceback" not in log.read_text() and not list(config.training.glob(".*"))
    assert begin(file, *SHORT, log=log).wait(60) == 0
    whole = copy("whole")
    assert start(whole, *SHORT, log=tmp_path / "whole.log", python=warm_python).wait(60) == 0
    same_bytes(load_config(whole, list(SHORT)), config)


def test_before_the_first_checkpoint_there_is_none_to_name(copy, tmp_path):
    file, log = copy(), tmp_path / "broken.log"
    settings = (*LONG, "train.save_every=1000000")
    config = load_config(file, list(settings))
    process = as_verb(file, *settings, log=log)
    wait_for(lambda: progress(config) >= 3, process)
    press(process)
    press(process)  # and impatiently once more
    assert process.wait(30) == 130
    (line,) = said(log)
    assert f"no checkpoint in {config.training} yet" in line and "starts from the beginning" in line
    assert "Traceback" not in log.read_text()


def test_while_it_starts_it_ends_as_well(copy, tmp_path):
    log = tmp_path / "early.log"
    process = start(copy(), *LONG, log=log)
    time.sleep(2.0)
    press(process)
    assert process.wait(30) == 130
    assert len(said(log)) == 1 and "Traceback" not in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("back_end", ["ddp", "zero2", "single"])
def test_under_accelerate_each_process_ends_and_the_first_one_says_it_once(copy, tmp_path, back_end):
    """What the launcher itself prints of its end is accelerate's; nothing of ours is in it."""
    file, log = copy(), tmp_path / "launch.log"
    config = load_config(file, list(LONG))
    launcher = start(file, *LONG, back_end=back_end, log=log)
    wait_for(lambda: progress(config) >= 7, launcher)
    ours = list(workers(launcher).values())
    press(launcher)
    launcher.wait(60)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{process}").exists() for process in ours):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    text = log.read_text()
    (line,) = said(log)
    assert line.startswith("interrupted: ") and "the same command goes on from it" in line
    assert "another process of the run has died" not in text
    assert "draftsmith/train/" not in text and "/train/trainer.py" not in text, text[-5000:]
    rows = [row["step"] for row in curve(config) if "loss" in row]
    assert rows == list(range(1, len(rows) + 1))
