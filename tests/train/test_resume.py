"""Killed at any moment and launched again with the same command, a run ends in the same bytes; with other processes, equal to rounding."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import load_config
from draftsmith.train import checkpoint as saving
from draftsmith.train.lock import run_lock
from draftsmith.train.metrics import read_metrics
from draftsmith.train.trainer import train
from tests.train.launching import curve, final_tensors, losses, run, start

KILLS = int(os.environ.get("DRAFTSMITH_KILLS", "4"))
"""Kills of the two-process run; 20 takes a quarter of an hour."""

SEED = int(os.environ.get("DRAFTSMITH_KILL_SEED", "0"))


def workers(launcher):
    """Process id of each rank under `accelerate launch`, from the environment the launcher gave it."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) != launcher.pid:
                continue
            variables = dict(v.split("=", 1) for v in (entry / "environ").read_text().split("\0") if "=" in v)
        except (OSError, ValueError):
            continue
        if "RANK" in variables and "draftsmith.train" in (entry / "cmdline").read_text():
            found[int(variables["RANK"])] = int(entry.name)
    return found


def kill_all(launcher):
    """Launcher and workers at once, as far as one process can."""
    everyone = [launcher.pid, *workers(launcher).values()]
    for process in everyone:
        os.kill(process, signal.SIGKILL)
    launcher.wait()


def progress(config):
    """Last logged step."""
    rows = read_metrics(config.training / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def wait_for(condition, launcher, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert launcher.poll() is None, "the run ended before its time"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def same_bytes(one, other):
    assert curve(one) == curve(other)
    tensors = final_tensors(one), final_tensors(other)
    assert tensors[0].keys() == tensors[1].keys()
    for name, value in tensors[0].items():
        assert torch.equal(value, tensors[1][name]), name


@pytest.mark.slow
def test_a_two_process_run_killed_at_random_moments_ends_in_the_same_bytes(copy, tmp_path, warm_python):
    longer = (f"train.epochs={20 + 10 * KILLS}", "train.evaluate_every=50")
    reference = run(copy("whole"), *longer, back_end="ddp", tmp_path=tmp_path, python=warm_python)
    file, log = copy("broken"), tmp_path / "broken.log"
    config = load_config(file, list(longer))
    rng = random.Random(SEED)
    for number in range(KILLS):
        launcher, before = start(file, *longer, back_end="ddp", log=log), progress(config)
        early, one_rank, delay = rng.random() < 0.2, rng.random() < 0.5, rng.uniform(0, 1.5)
        if early:  # while it starts
            wait_for(lambda launcher=launcher: len(workers(launcher)) == 2, launcher)
            delay *= 8
        else:
            wait_for(lambda before=before: progress(config) > before, launcher)
        time.sleep(delay)
        assert launcher.poll() is None, "the run ended before it could be killed"
        what = f"rank {rng.randrange(2)}" if one_rank else "all"
        print(f"kill {number} (seed {SEED}): {what} at step {progress(config)}, {delay:.2f} s in, starting={early}")
        if one_rank:
            os.kill(workers(launcher)[int(what[-1])], signal.SIGKILL)
            began = time.monotonic()
            assert launcher.wait(60) != 0
            print(f"  the launch ended after {time.monotonic() - began:.1f} s")
        else:
            kill_all(launcher)
    run(file, *longer, back_end="ddp", tmp_path=tmp_path, python=warm_python)
    same_bytes(reference, config)
    assert not list(config.training.glob(".*"))
    steps = [row["step"] for row in curve(config) if "loss" in row]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_when_one_process_dies_the_launch_ends_soon_and_says_why(copy, tmp_path):
    file, log = copy(), tmp_path / "launch.log"
    config = load_config(file)
    launcher = start(file, "train.epochs=500", back_end="ddp", log=log)
    wait_for(lambda: progress(config) >= 3, launcher)
    os.kill(workers(launcher)[1], signal.SIGKILL)
    began = time.monotonic()
    assert launcher.wait(60) != 0
    assert time.monotonic() - began < 60
    said = log.read_text()
    assert "another process of the run has died" in said and "goes on from the last checkpoint" in said, said[-3000:]


@pytest.mark.slow
def test_when_the_launcher_is_killed_its_processes_do_not_train_on(copy, tmp_path):
    file, log = copy(), tmp_path / "launch.log"
    config = load_config(file)
    launcher = start(file, "train.epochs=500", back_end="ddp", log=log)
    wait_for(lambda: progress(config) >= 3, launcher)
    left = workers(launcher)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{process}").exists() for process in left.values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "its launcher" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("back_end", ["zero2", "zero3"])
def test_deepspeed_goes_on_to_the_same_bytes(copy, tmp_path, warm_python, back_end):
    longer = ("train.epochs=12",)
    reference = run(copy("whole"), *longer, back_end=back_end, tmp_path=tmp_path, python=warm_python)
    file = copy("broken")
    config = load_config(file, list(longer))
    launcher = start(file, *longer, back_end=back_end, log=tmp_path / "broken.log", python=warm_python)
    wait_for(lambda: len(saving.checkpoints(config.training)) >= 2, launcher)
    kill_all(launcher)
    run(file, *longer, back_end=back_end, tmp_path=tmp_path, python=warm_python)
    same_bytes(reference, config)


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes_and_back_ends(copy, tmp_path, warm_python):
    """One process, then two under ZeRO-2, one under DDP, two under ZeRO-3: equal to rounding, no step missing or doubled."""
    longer = ("train.epochs=40", "train.evaluate_every=1000")
    reference = run(copy("whole"), *longer, tmp_path=tmp_path, python=warm_python)
    file = copy("moved")
    config = load_config(file, list(longer))
    for back_end, processes in (("single", None), ("zero2", None), ("ddp", 1)):
        launcher, before = (
            start(
                file,
                *longer,
                back_end=back_end,
                processes=processes,
                log=tmp_path / "moved.log",
                python=warm_python,
            ),
            progress(config),
        )
        wait_for(lambda before=before: progress(config) >= before + 7, launcher)
        kill_all(launcher)
    run(file, *longer, back_end="zero3", tmp_path=tmp_path, python=warm_python)
    assert [row[0] for row in losses(config)] == [row[0] for row in losses(reference)]
    for (_, loss, norm), (_, their_loss, their_norm) in zip(losses(reference), losses(config), strict=True):
        assert their_loss == pytest.approx(loss, rel=1e-4) and their_norm == pytest.approx(norm, rel=3e-3)
    theirs = final_tensors(config)
    for name, value in final_tensors(reference).items():
        assert float((theirs[name].double() - value.double()).norm()) <= 1e-4 * float(value.double().norm()), name


def test_two_runs_do_not_share_a_folder(copy, monkeypatch):
    config = load_config(copy(), ["train.epochs=1"])
    monkeypatch.setattr("draftsmith.train.lock.PATIENCE", 0.0)
    with run_lock(config.training), pytest.raises(DraftsmithError, match="another run writes") as error:
        train(config)
    assert f"process {os.getpid()}" in str(error.value)
    train(config)  # the lock is free again


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    holder = subprocess.Popen(
        ["python3", "-c", "import fcntl,sys,time; f=open(sys.argv[1],'w'); fcntl.flock(f,2); print('held',flush=True); time.sleep(60)",
         tmp_path / "run.lock"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(DraftsmithError, match="another run"), run_lock(tmp_path, patience=0.0):
        pass
    holder.kill()
    holder.wait()
    with run_lock(tmp_path, patience=0.0):
        pass


@pytest.fixture
def begun(copy):
    """A configuration whose run has checkpoints at steps 2 and beyond."""
    file = copy()
    train(load_config(file, ["train.epochs=1"]))
    return load_config(file, ["train.epochs=1"])


def refuse(config, words):
    with pytest.raises(DraftsmithError, match=words) as error:
        train(config)
    return str(error.value)


def test_a_cut_off_or_missing_file_of_a_checkpoint_is_named(begun):
    newest = saving.checkpoints(begun.training)[-1]
    moments = newest / "state" / "moments.safetensors"
    content = moments.read_bytes()
    moments.write_bytes(content[:-100])
    message = refuse(begun, "incomplete")
    assert str(moments) in message and f"{len(content):,} bytes" in message and f"rm -r {newest}" in message
    moments.unlink()
    assert "no such file" in refuse(begun, "incomplete")
    moments.write_bytes(content)
    (newest / "trainer.json").unlink()
    assert newest.name in refuse(begun, "trainer.json")


def test_a_foreign_checkpoint_is_refused_by_the_fields_that_differ(begun, copy):
    other = load_config(copy("other"), ["train.epochs=1", "train.learning_rate=0.5", "train.seed=7"])
    other.training.parent.mkdir(exist_ok=True)
    os.rename(begun.training, other.training)  # noqa: PTH104
    message = refuse(other, "another run")
    assert (
        "train.learning_rate = 0.001" in message and "train.learning_rate = 0.5" in message and "train.seed" in message
    )
    folder = other.training / "checkpoint-99999999"
    folder.mkdir()
    (folder / "trainer.json").write_text(json.dumps({"schema": 1, "step": 99999999}))
    assert str(folder) in refuse(other, "another format")
