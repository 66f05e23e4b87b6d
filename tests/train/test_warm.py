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


def test_another_drafter_to_start_from_is_another_run(trained, copy):
    _, best = trained
    file = copy("again")
    train(load_config(file, [*STILL, f"train.init_from={best}"]))
    with pytest.raises(DraftsmithError, match=r"another run: .*init_from"):
        train(load_config(file, STILL))
