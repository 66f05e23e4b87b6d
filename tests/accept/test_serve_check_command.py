"""serve-check as a person calls it: what it announces is there, and numbers that make no sense are named."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftsmith.accept.evaluate import drafter_chains, evaluate
from draftsmith.accept.known import evaluation_of
from draftsmith.accept.serve_check import serve_check
from draftsmith.cli import app
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import read_target
from draftsmith.convert.read import read_drafter
from draftsmith.convert.write import convert
from draftsmith.data.store import HarvestReader
from tests.accept import faulty_engine


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run with its drafter converted."""
    shutil.copytree(trained.folder, tmp_path / trained.name)
    config = trained.model_copy(update={"runs": tmp_path})
    convert(config.training, config.target.path, config.drafter_folder, dtype="float32")
    return config


def test_the_announced_log_is_there(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("draftsmith.accept.processes.GRACE_SECONDS", 0.5)
    with pytest.raises(DraftsmithError, match="exit code 7"):
        serve_check("sglang", run, python=faulty_engine.write(tmp_path, "dies"), start_limit=20, limit=30)
    announced = re.search(r"log (\S+\.log)", "".join(capsys.readouterr().err.splitlines()))
    assert announced and "out of luck" in Path(announced[1]).read_text()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--limit", "0"), ("--limit", "-3"), ("--steps", "0"), ("--steps", "-1"), ("--max-running", "0")],
)
def test_numbers_below_one_are_refused_by_name(trained, option, value):
    file = trained.runs.parent / "run.yaml"
    found = CliRunner().invoke(app, ["serve-check", "sglang", str(file), option, value])
    assert isinstance(found.exception, DraftsmithError)
    assert f"where: {option}\n  found: {value}\n" in str(found.exception)


def test_an_evaluation_is_shown_until_the_drafter_or_the_store_changes(run):
    target, reader = read_target(run.target.path), HarvestReader(run.store("heldout"))

    def known(depth=3):
        drafter = read_drafter(run.drafter_folder, target)
        chains = drafter_chains(drafter, target, reader, run, draft_steps=depth, quiet=True)
        return evaluation_of(run, drafter.origin, reader.path, chains, depth)

    file = evaluate(run, drafter=run.drafter_folder, temperatures=())
    assert known() == json.loads(file.read_text()) and known(2) is not None
    now = file.stat().st_mtime
    os.utime(file, (now - 60, now - 60))  # the drafter is younger than the evaluation
    assert known() is None
    os.utime(file, (now, now))
    assert known() is not None
    whole = file.read_text()
    for key in ("drafter", "store"):
        file.write_text(json.dumps(json.loads(whole) | {key: str(run.folder)}))
        assert known() is None
    file.write_text(whole)
    assert known() is not None
    weights = run.drafter_folder / "model.safetensors"
    ruined = {name: tensor * 0 if tensor.is_floating_point() else tensor for name, tensor in load_file(weights).items()}
    save_file(ruined, weights)
    assert known() is None  # by time
    later = time.time() + 60
    os.utime(file, (later, later))
    assert known() is None  # by what the evaluation says
