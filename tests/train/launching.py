"""Start the trainer as a person would, in processes of its own, and read what it left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from draftsmith.configs.schema import load_config
from draftsmith.train import checkpoint as saving
from draftsmith.train.metrics import CLOCKED, read_metrics

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
"""One thread: the deterministic mode."""


def start(file, *overrides, back_end=None, processes=None, launcher=(), log=None, python=None):
    """Start training; `back_end` names a file of configs/accelerate/, none is plain Python. Leads a process group.

    `python` replaces this one: see tests/train/warm.py.
    """
    command = [str(python or sys.executable)]
    if back_end is not None:
        command += [
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(ROOT / f"configs/accelerate/{back_end}.yaml"),
        ]
        command += launcher or ["--main_process_port", "0"]
        command += ["--num_processes", str(processes)] if processes else []
    with log.open("ab") if log else open(os.devnull, "wb") as sink:  # noqa: PTH123
        return subprocess.Popen(
            [*command, "-m", "draftsmith.train", "--config", str(file), *overrides],
            cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def run(file, *overrides, tmp_path, timeout=240, **how):
    """Train to the end; the output is shown if that fails."""
    log = tmp_path / "launch.log"
    status = start(file, *overrides, log=log, **how).wait(timeout)
    assert status == 0, log.read_text()[-6000:]
    return load_config(file, list(overrides))


def curve(config):
    """Everything of metrics.jsonl that does not depend on the clock."""
    return [
        {k: v for k, v in row.items() if k not in CLOCKED} for row in read_metrics(config.training / "metrics.jsonl")
    ]


def losses(config):
    """(step, loss, gradient norm) of every logged row."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in curve(config) if "loss" in row]


def final_tensors(config):
    """Float32 master weights and AdamW's moments of the newest checkpoint, by name."""
    newest = saving.checkpoints(config.training)[-1]
    return load_file(newest / "drafter" / "model.safetensors") | load_file(newest / "state" / "moments.safetensors")
