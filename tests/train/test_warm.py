"""Training goes on from a drafter of any form, with its dimensions and its draft vocabulary."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import load_config
from draftsmith.convert.write import convert
from draftsmith.data.vocab import DraftVocab
from draftsmith.train import checkpoint as saving
from draftsmith.train.metrics import read_metrics
from draftsmith.train.trainer import train
from draftsmith.train.warm import contradictions

STILL = ["train.epochs=1", "train.learning_rate=1e-12", "train.grad_clip=1e-6"]
"""Settings under which weights stay where they are."""


@pytest.fixture
def trained(copy):
    config = load_config(copy("first"), ["train.epochs=12", "train.learning_rate=0.003", "drafter.fc_norm=true"])
    return config, train(config)


def first_loss(config):
    return next(row["loss"] for row in read_metrics(config.training / "metrics.jsonl") if "loss" in row)


@pytest.mark.parametrize("form", ["checkpoint", "training folder", "sglang", "vllm"])
def test_a_run_goes_on_from_any_form_of_a_drafter(trained, copy, tmp_path, form):
    config, best = trained
    source = {"checkpoint": best, "training folder": config.training}.get(form)
    if source is None:
        source = convert(best, config.target.path, tmp_path / form, to=form, dtype="float32")
    again = load_config(copy("again"), [*STILL, f"train.init_from={source}"])
    train(again)
    spec, tensors, provenance = saving.read_drafter(saving.checkpoints(again.training)[-1])
    assert spec.fc_norm and provenance["init_from"]
    for name, value in load_file(best / "drafter" / "model.safetensors").items():
        torch.testing.assert_close(tensors[name], value, rtol=0, atol=1e-6)
    cold = load_config(copy("cold"), STILL)
    train(cold)
    assert first_loss(again) < 0.9 * first_loss(cold)


def test_the_drafters_vocabulary_is_kept_or_another_one_refused_with_the_mend(trained, copy):
    config, best = trained
    file = copy("other")
    other = load_config(file, [*STILL, f"train.init_from={best}"])
    own = DraftVocab.load(other.vocab_file)
    swapped = own.t2d.clone()
    inside, outside = swapped.nonzero()[5, 0], (~swapped).nonzero()[0, 0]
    swapped[inside], swapped[outside] = False, True
    ids = swapped.nonzero()[:, 0]
    DraftVocab(ids - torch.arange(len(ids)), swapped, own.counts, own.source, own.target).save(other.vocab_file)
    with pytest.raises(DraftsmithError, match="draft vocabulary is not that of the drafter") as error:
        train(other)
    assert f"rm {other.vocab_file}" in str(error.value) and f"{own.size - 1:,} of them" in str(error.value)
    other.vocab_file.unlink()  # as the mend says
    train(other)
    assert torch.equal(DraftVocab.load(other.vocab_file).d2t, DraftVocab.load(config.vocab_file).d2t)
    train(other)  # finished; the same command finds it so


def test_contradicting_dimensions_and_other_targets_are_refused(trained, copy, tmp_path):
    _, best = trained
    contradicting = load_config(
        copy("wrong"), [f"train.init_from={best}", "drafter.head_dim=16", "drafter.fc_norm=true"]
    )
    with pytest.raises(DraftsmithError, match="other dimensions") as error:
        train(contradicting)
    assert "drafter.head_dim=16" in str(error.value) and "fc_norm" not in str(error.value)
    with pytest.raises(DraftsmithError):
        train(load_config(copy("nothing"), [f"train.init_from={tmp_path / 'nowhere'}"]))


@pytest.mark.parametrize(
    ("setting", "theirs"),
    [
        ("vocab.size=300", "vocab.size=400"),
        ("target.taps=[1,4,6]", "target.taps=[2, 4, 5]"),
        ("drafter.intermediate_size=96", "drafter.intermediate_size="),
        ("drafter.norm_output=true", "drafter.norm_output=False"),
    ],
)
def test_each_setting_that_the_drafter_contradicts_is_refused_by_name(trained, copy, setting, theirs):
    _, best = trained
    file = copy("wrong")
    config = load_config(file, [f"train.init_from={best}", setting])
    config.vocab_file.unlink()  # nothing but the setting contradicts the drafter's vocabulary
    with pytest.raises(DraftsmithError, match="other dimensions") as error:
        train(config)
    assert setting.replace(",", ", ").replace("true", "True") in str(error.value) and theirs in str(error.value)
    assert not config.training.exists()


def test_settings_that_only_a_new_drafter_heeds_are_named_as_idle(trained, copy, capsys):
    _, best = trained
    train(load_config(copy("idle"), [*STILL, f"train.init_from={best}", "train.head_init=random"]))
    said = capsys.readouterr().err
    assert "train.head_init=random" in said and str(best) in said and "layer_init" not in said
    train(load_config(copy("silent"), [*STILL, f"train.init_from={best}"]))
    assert "has no effect" not in capsys.readouterr().err


def test_a_vocabulary_size_above_the_targets_means_all_of_it(trained, copy):
    """vocab.size is capped, so that a drafter with the whole vocabulary contradicts no larger number."""
    _, best = trained
    spec, _ = saving.read_drafter_record(best)
    whole = spec.model_copy(update={"draft_vocab_size": spec.vocab_size})
    config = load_config(copy("capped"), ["vocab.size=100000"])
    assert contradictions(config, whole) == []
    assert contradictions(config, spec) == [("vocab.size", 400, 100_000)]


def test_another_drafter_to_start_from_is_another_run(trained, copy):
    _, best = trained
    file = copy("again")
    train(load_config(file, [*STILL, f"train.init_from={best}"]))
    with pytest.raises(DraftsmithError, match=r"another run: .*init_from"):
        train(load_config(file, STILL))
