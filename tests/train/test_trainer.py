"""The trainer: it learns what it should, resumes to the same bytes, and refuses what does not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from draftsmith.accept.evaluate import evaluate
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import TrainSection, load_config
from draftsmith.configs.target import read_target
from draftsmith.convert.write import convert
from draftsmith.data.store import HarvestReader
from draftsmith.data.store_writer import StoreWriter
from draftsmith.train import checkpoint as saving
from draftsmith.train.metrics import read_metrics
from draftsmith.train.step import learning_rate
from draftsmith.train.trainer import train


def store_of(config, split, conversations, provenance_from):
    """Write `conversations` as the store of a run, in place of what is there."""
    manifest = HarvestReader(provenance_from.store("train")).manifest
    folder = config.store(split)
    for file in folder.glob("*"):
        file.unlink()
    fields = manifest.model_dump(exclude={"schema_version", "tool_version", "complete", "shards"})
    provenance = type(manifest).__mro__[1](**fields | {"planned": len(conversations), "shard_tokens": 100_000})
    with StoreWriter(folder, provenance) as writer:
        for conversation in conversations:
            writer.append(conversation)


def test_overfitting_one_conversation_is_learnt_at_every_step_and_replays_from_the_converted_files(copy, tmp_path):
    original = load_config(copy("original"))
    one = max(HarvestReader(original.store("train")), key=lambda c: len(c.input_ids[c.generated].unique()))
    one = dataclasses.replace(one, final=one.final * 4)  # a random target hesitates between near-ties; this one is sure
    config = load_config(
        copy(),
        [
            "train.epochs=200",
            "train.max_length=512",
            "train.learning_rate=0.003",
            "train.save_every=1000",
            "train.evaluate_every=1000",
        ],
    )
    for split in ("train", "heldout"):
        store_of(config, split, [one], original)
    train(config)
    row = [r for r in read_metrics(config.training / "metrics.jsonl") if "acc_i" in r][-1]
    assert all(share >= 0.99 for share in row["acc_i"]), row["acc_i"]
    assert row["accept_length"] >= 3.9
    drafter = convert(config.training, config.target.path, tmp_path / "drafter", dtype="float32")
    trained = json.loads(evaluate(config).read_text())
    replayed = json.loads(evaluate(config, drafter=drafter).read_text())
    assert replayed["as_served"] == trained["as_served"] and replayed["acc"] == trained["acc"]
    assert replayed["as_served"]["accept_length"] >= 3.5


def test_training_reduces_the_loss_and_keeps_the_best_checkpoint(copy):
    config = load_config(copy(), ["train.epochs=12", "train.learning_rate=0.003"])
    best = train(config)
    rows = [r for r in read_metrics(config.training / "metrics.jsonl") if "loss" in r]
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert all(chain <= single for r in rows for chain, single in zip(r["accept_i"], r["acc_i"], strict=True))
    marked = json.loads((config.training / "best.json").read_text())
    heldout = {
        r["step"]: r["heldout_accept_length"]
        for r in read_metrics(config.training / "metrics.jsonl")
        if "heldout_accept_length" in r
    }
    assert best.name == marked["checkpoint"] and marked["accept_length"] == max(heldout.values())
    assert len(saving.checkpoints(config.training)) <= config.train.keep_checkpoints + 1
    assert (config.training / "report.png").stat().st_size > 10_000
    spec, tensors, provenance = saving.read_drafter(best)
    assert {k: tuple(v.shape) for k, v in tensors.items()} == spec.trainable_shapes() | spec.map_shapes()
    assert provenance["target"] == read_target(config.target.path).fingerprint() and provenance["mask"] == "aligned"


def test_the_rate_warms_up_and_ends_at_its_minimum():
    settings = TrainSection(learning_rate=1.0, warmup_ratio=0.1, min_learning_rate_ratio=0.2)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0 and rates[99] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def refused(config, words):
    with pytest.raises(DraftsmithError, match=words) as error:
        train(config)
    assert not config.training.exists()
    return str(error.value)


def test_missing_inputs_are_named_with_the_mending_command(copy):
    file = copy()
    config = load_config(file)
    config.vocab_file.unlink()
    assert "draftsmith vocab" in refused(config, "vocabulary")
    for part in config.store("train").glob("*"):
        part.unlink()
    assert "draftsmith harvest" in refused(config, "manifest")


def test_other_taps_or_another_target_do_not_fit_the_store(copy, tmp_path):
    file = copy()
    message = refused(load_config(file, ["target.taps=[1,4,6]"]), "taps")
    assert "[2, 4, 5]" in message and "[1, 4, 6]" in message
    values = json.loads(file.read_text())
    other = tmp_path / "other"
    shutil.copytree(values["target"]["path"], other)
    described = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(described | {"rms_norm_eps": 1e-6}))
    refused(load_config(file, [f"target.path={other}"]), "target's")


def test_a_checkpoint_of_another_run_is_refused(copy):
    file = copy()
    train(load_config(file, ["train.epochs=1"]))
    with pytest.raises(DraftsmithError, match="another run"):
        train(load_config(file, ["train.epochs=2"]))
    train(load_config(file, ["train.epochs=1", "train.log_every=7", "train.keep_checkpoints=3"]))  # these may change


def test_a_finished_run_is_left_as_it_is(copy):
    config = load_config(copy(), ["train.epochs=1"])
    train(config)
    before = {p: p.read_bytes() for p in config.training.rglob("*.safetensors")}
    marked = (config.training / "best.json").read_bytes()
    (config.training / "best.json").unlink()  # as if killed before the mark
    train(config)
    assert (config.training / "best.json").read_bytes() == marked
    assert {p: p.read_bytes() for p in config.training.rglob("*.safetensors")} == before
