"""The best checkpoint is what a run is for: one that is damaged is named when the run goes on and when it ends."""

from __future__ import annotations

import json
import shutil

import pytest

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import load_config
from draftsmith.train import checkpoint as saving
from draftsmith.train.metrics import read_metrics
from draftsmith.train.trainer import train

FEW = ["train.epochs=2", "train.evaluate_every=2", "train.keep_checkpoints=50"]


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def flip(file):
    """One byte of the last tensor, which sizes and headers do not show."""
    content = bytearray(file.read_bytes())
    content[-5] ^= 0x01
    file.write_bytes(content)


def lose(file):
    file.unlink()


DAMAGE = {
    "cut off": ("drafter/model.safetensors", cut),
    "changed": ("drafter/model.safetensors", flip),
    "lost": ("drafter/model.safetensors", lose),
    "without its description": ("drafter/drafter.json", lose),
    "without its record": ("trainer.json", lose),
    "moments cut off": ("state/moments.safetensors", cut),
}


@pytest.fixture
def begun(copy):
    """A run whose best checkpoint is not its newest."""
    config = load_config(copy(), FEW)
    train(config)
    first = saving.checkpoints(config.training)[0]
    (config.training / "best.json").write_text(json.dumps({"checkpoint": first.name, "accept_length": 9.0}))
    return config


def refused(config):
    with pytest.raises(DraftsmithError, match="best checkpoint") as error:
        train(config)
    return str(error.value)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_best_checkpoint_is_named_when_the_run_goes_on_and_the_mend_mends_it(begun, damage):
    best = saving.best_checkpoint(begun.training)
    name, harm = DAMAGE[damage]
    harm(best / name)
    for folder in saving.checkpoints(begun.training)[-2:]:  # there is still something to train
        shutil.rmtree(folder)
    said = refused(begun)
    assert str(best / name) in said and f"rm -r {best}" in said
    shutil.rmtree(best)  # as it says
    measured = {
        row["step"]: row["heldout_accept_length"]
        for row in read_metrics(begun.training / "metrics.jsonl")
        if "heldout_accept_length" in row and row["step"] > 2
    }
    again = train(begun)
    marked = json.loads((begun.training / "best.json").read_text())
    assert again.name == marked["checkpoint"] and marked["accept_length"] == max(measured.values())


@pytest.mark.parametrize("damage", ["cut off", "changed", "without its record"])
def test_a_best_checkpoint_that_is_damaged_meanwhile_is_named_at_the_end(copy, damage, monkeypatch):
    """Something else on the machine harms it between its evaluation and the last step."""
    config = load_config(copy(), FEW)
    name, harm = DAMAGE[damage]
    mark = saving.mark_best

    def mark_first_and_harm(folder, checkpoint, accept_length):
        if not (folder / "best.json").is_file():
            mark(folder, checkpoint, 9.0)
            harm(checkpoint / name)

    monkeypatch.setattr(saving, "mark_best", mark_first_and_harm)
    said = refused(config)
    assert str(saving.checkpoints(config.training)[-1]) not in said
    assert "checkpoint-00000002" in said and "rm -r" in said
    rows = [row for row in read_metrics(config.training / "metrics.jsonl") if "loss" in row]
    assert len(saving.checkpoints(config.training)) >= len(rows) // 2 - 1  # it trained to its end


def test_a_finished_run_says_so_too(begun):
    best = saving.best_checkpoint(begun.training)
    flip(best / "drafter" / "model.safetensors")
    assert str(best) in refused(begun)


def test_a_mark_of_a_checkpoint_that_is_gone_goes_to_the_best_of_the_others(begun, capsys):
    gone = saving.best_checkpoint(begun.training)
    shutil.rmtree(gone)
    assert train(begun) != gone
    assert f"{gone} is not there" in capsys.readouterr().err
    assert json.loads((begun.training / "best.json").read_text())["checkpoint"] != gone.name


def test_a_damaged_mark_is_named_with_its_mend(begun):
    (begun.training / "best.json").write_text("{")
    with pytest.raises(DraftsmithError, match="mark of the best") as error:
        train(begun)
    assert f"rm {begun.training / 'best.json'}" in str(error.value)


def test_a_changed_byte_of_the_newest_checkpoint_is_not_trained_on(begun):
    newest = saving.checkpoints(begun.training)[-1]
    flip(newest / "state" / "moments.safetensors")
    with pytest.raises(DraftsmithError, match="bytes have changed") as error:
        train(begun)
    assert str(newest / "state" / "moments.safetensors") in str(error.value) and f"rm -r {newest}" in str(error.value)
