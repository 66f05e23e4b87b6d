"""serve-check as a person calls it: what it announces is there, and numbers that make no sense are named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.accept.serve_check import serve_check
from draftsmith.cli import app
from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.write import convert
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
