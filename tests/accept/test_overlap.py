"""A drafter accepts what it has memorised, whatever is wrong with it: text that was trained on is named as such."""

from __future__ import annotations

import json
import shutil

import pytest

from draftsmith.accept.evaluate import evaluate
from draftsmith.accept.overlap import trained_on
from draftsmith.accept.probe import probe
from draftsmith.accept.requests import heldout_requests
from draftsmith.accept.serve_check import serve_check
from draftsmith.convert.write import convert
from draftsmith.data.store import HarvestReader
from tests.accept.test_remote import start  # noqa: F401  (a fixture)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run, whose stores may be changed."""
    shutil.copytree(trained.folder, tmp_path / trained.name)
    return trained.model_copy(update={"runs": tmp_path})


def hold_out_training_text(config):
    """The held-out split becomes the training split."""
    shutil.copy(config.conversations("train"), config.conversations("heldout"))
    shutil.rmtree(config.store("heldout"))
    shutil.copytree(config.store("train"), config.store("heldout"))


def test_held_out_text_shares_no_prompt_with_training_text(run, capsys):
    content = json.loads(evaluate(run).read_text())
    assert content["trained_on"] == [] and "were trained on" not in capsys.readouterr().err


@pytest.mark.parametrize("known", ["store", "conversations"])
def test_evaluating_on_trained_text_is_told_with_names(run, capsys, known):
    reader = HarvestReader(run.store("train"))
    shutil.copytree(run.store("train"), run.folder / "again")
    if known == "conversations":
        shutil.rmtree(run.store("train"))
    file = evaluate(run, store=run.folder / "again")
    assert json.loads(file.read_text())["trained_on"] == reader.ids
    said = capsys.readouterr().err
    assert f"{len(reader)} of these conversations were trained on" in said and reader.ids[0] in said
    assert "were trained on" in file.with_suffix(".html").read_text()


def test_without_training_text_nothing_is_claimed(run, capsys):
    shutil.rmtree(run.store("train"))
    run.conversations("train").unlink()
    assert json.loads(evaluate(run).read_text())["trained_on"] is None
    assert "were trained on" not in capsys.readouterr().err


def test_the_probe_says_so_too(run, capsys):
    hold_out_training_text(run)
    found = probe(run, run.training, conversations=3, steps=1)
    assert "3 of these conversations were trained on" in capsys.readouterr().err
    assert found.numbers["trained_on"] == [f"train-{n}" for n in range(3)]


def test_requests_are_compared_by_the_prompt_of_their_first_turn(run):
    hold_out_training_text(run)
    asked = {one.conversation: one.input_ids for one in heldout_requests(run, 2)}
    assert trained_on(run, asked) == ["train-0", "train-1"]
    asked["train-0"] = (*asked["train-0"][:-1], 0)  # another prompt of the same id
    assert trained_on(run, asked) == ["train-1"]


def test_a_serve_check_on_trained_text_is_told_with_names(run, start, capsys):  # noqa: F811
    hold_out_training_text(run)
    convert(run.training, run.target.path, run.drafter_folder, dtype="float32")
    _, url = start()
    found = serve_check("sglang", run, url=url, explain=False)
    assert found.trained_on == HarvestReader(run.store("train")).ids
    assert "were trained on" in capsys.readouterr().err
    assert "were trained on" in (run.folder / "serve-check-sglang.html").read_text()
