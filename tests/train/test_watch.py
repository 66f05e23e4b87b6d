"""What a person watches: figures, trackers that survive a kill, a report, and a run that stops when it goes wrong."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import load_config
from draftsmith.data.store import HarvestReader
from draftsmith.train import checkpoint as saving
from draftsmith.train.metrics import read_metrics
from draftsmith.train.plan import epoch_batches, plan_windows
from draftsmith.train.step import Figures
from draftsmith.train.tracking import wandb_id
from draftsmith.train.trainer import train
from draftsmith.train.watch import stop_diverged, stop_not_finite


def rows_of(config, field="loss"):
    return [row for row in read_metrics(config.training / "metrics.jsonl") if field in row]


def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_batch(copy):
    """The step at fault is named, not the later one at which figures are read."""
    overrides = ["train.learning_rate=1e18", "train.grad_clip=1e18", "train.warmup_ratio=0", "train.log_every=4",
                 "train.batch_tokens=64", "train.save_every=100", "train.evaluate_every=100"]  # fmt: skip
    config = load_config(copy(), overrides)
    with pytest.raises(DraftsmithError, match="not finite") as error:
        train(config)
    named = re.search(r"step (\d+), conversations (.*)", str(error.value))
    assert named is not None
    step, ids = int(named[1]), set(named[2].split(", "))
    assert 1 < step < 4  # the first step is sound, its update ruins the second
    reader = HarvestReader(config.store("train"))
    plan = epoch_batches(plan_windows(reader, 48, 3, "aligned"), 64, config.train.seed, 0)
    assert ids == {reader.ids[window.conversation] for window in plan[step - 1]}


def test_the_first_bad_step_of_several_is_found():
    figures = Figures([], [], [], 0.0, 0, norms=[1.0, 1.0, float("inf")], losses=[1.0, float("nan"), 1.0])
    with pytest.raises(DraftsmithError, match="loss is not finite") as error:
        stop_not_finite(figures, 10, lambda step: [f"c{step}"])
    assert "step 12, conversations c11" in str(error.value)


def test_a_loss_that_leaves_its_course_stops_the_run():
    losses = [9.0, 4.0, 3.0, 3.5, 13.0, 12.5, 14.0]  # three in a row held 4.0
    rows = [{"step": n, "loss": loss} for n, loss in enumerate(losses)]
    with pytest.raises(DraftsmithError, match="diverges") as error:
        stop_diverged(rows, 3.0, ["a", "b"])
    assert "steps 4 to 6" in str(error.value) and "conversations a, b" in str(error.value)
    stop_diverged(rows[:-1], 3.0, [])  # two in a row may be noise
    stop_diverged([*rows[:-1], {"step": 6, "loss": 11.9}], 3.0, [])
    stop_diverged(rows, 4.0, [])


def test_one_lucky_batch_sets_no_standard():
    rows = [{"step": n, "loss": loss} for n, loss in enumerate([9.8, 9.5, 9.6, 3.1, 9.7, 9.6, 9.8, 9.5])]
    stop_diverged(rows, 3.0, [])


def test_a_diverging_run_stops_before_it_saves(copy):
    config = load_config(
        copy(), ["train.learning_rate=30", "train.grad_clip=1e9", "train.epochs=30", "train.save_every=1000"]
    )
    with pytest.raises(DraftsmithError, match=r"diverges|not finite"):
        train(config)
    assert not saving.checkpoints(config.training) or rows_of(config)[-1]["step"] < 90


def test_each_row_holds_what_a_person_watches(copy):
    config = load_config(copy(), ["train.epochs=2", "train.log_every=3"])
    train(config)
    rows, heldout = rows_of(config), rows_of(config, "heldout_accept_length")
    for row in rows:
        assert len(row["loss_i"]) == len(row["acc_i"]) == len(row["accept_i"]) == 3
        assert row["loss"] == pytest.approx(sum(0.8**i * value for i, value in enumerate(row["loss_i"])))
        assert row["accept_length"] == pytest.approx(1 + sum(row["accept_i"]))
        assert 0 < row["supervised"] <= 1 and 0 <= row["outside"] <= 1 and 0 <= row["waiting"] <= 1
        assert 0 < row["mfu"] < 1 and row["grad_norm_max"] >= row["grad_norm"] > 0
    for row in heldout:
        assert row["heldout_accept_length"] == pytest.approx(1 + sum(row["heldout_accept_per_position"]))
        assert list(row["heldout_by_context"]) == ["0-1024"]
        assert row["heldout_by_context"]["0-1024"] == pytest.approx(row["heldout_accept_length"])


def rewind(config, step):
    """As if killed before any checkpoint after `step`."""
    for folder in saving.checkpoints(config.training):
        if int(folder.name.rsplit("-", 1)[1]) > step:
            shutil.rmtree(folder)


def test_tensorboard_shows_every_step_once_after_a_kill(copy):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = load_config(copy(), ["train.epochs=2", "train.log_with=tensorboard", "train.keep_checkpoints=50"])
    train(config)
    rewind(config, 2)
    train(config)
    events = EventAccumulator(str(config.training / "tensorboard")).Reload()
    rows = rows_of(config)
    assert [e.step for e in events.Scalars("loss")] == [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [round(e.value, 4) for e in events.Scalars("loss")] == [round(row["loss"], 4) for row in rows]
    assert [e.step for e in events.Scalars("accept_i/2")] == [row["step"] for row in rows]
    assert events.Scalars("heldout_by_context/0-1024")


def test_wandb_stays_offline_without_a_key_and_keeps_its_id(copy, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = load_config(copy(), ["train.epochs=1", "train.log_with=wandb", "train.keep_checkpoints=50"])
    train(config)
    (folder,) = (config.training / "wandb").glob("offline-run-*")
    mark = json.loads((config.training / "wandb.json").read_text())["id"]
    assert next(folder.glob("*.wandb")).stat().st_size > 0 and folder.name.endswith(mark)
    rewind(config, 2)
    train(config)
    assert all(one.name.endswith(mark) for one in (config.training / "wandb").glob("offline-run-*"))


def test_two_runs_of_one_name_have_two_wandb_ids(copy):
    one, other = load_config(copy("one")), load_config(copy("other"))
    assert one.name == other.name and wandb_id(one) != wandb_id(other)
    assert wandb_id(one) == wandb_id(one)


def test_the_report_holds_the_curves_and_the_best_checkpoint(copy):
    config = load_config(copy(), ["train.epochs=4"])
    best = train(config)
    assert (config.training / "report.png").stat().st_size > 10_000
    page = (config.training / "report.html").read_text(encoding="utf-8")
    assert str(best) in page and "data:image/png;base64," in page and "http" not in re.sub(r"data:[^\"]*", "", page)
    for row in rows_of(config, "heldout_accept_length"):
        assert f"<td>{row['heldout_accept_length']:.3f}</td>" in page
    assert "train.learning_rate" in page and "drafter.head_dim" in page
