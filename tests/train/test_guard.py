"""The teacher guard stops a run whose stored final states are wrong, and names the cause."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import load_config
from draftsmith.configs.target import read_target
from draftsmith.data.store import HarvestReader, Provenance
from draftsmith.data.store_writer import StoreWriter
from draftsmith.train.guard import check_teacher
from draftsmith.train.trainer import train


def rewrite(config, change):
    """Replace the training store's final states by `change(conversation)`."""
    reader = HarvestReader(config.store("train"))
    conversations = [dataclasses.replace(c, final=change(c).to(torch.bfloat16)) for c in reader]
    fields = reader.manifest.model_dump(include=set(Provenance.model_fields))
    for file in config.store("train").glob("*"):
        file.unlink()
    with StoreWriter(config.store("train"), Provenance(**fields)) as writer:
        for conversation in conversations:
            writer.append(conversation)


def states(config):
    """The target's hidden states by transformers: R[0..L-1], then the un-normed output of the last layer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(config.target.path, dtype=torch.float32)

    def run(ids):
        kept = []
        handle = model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0][0]))
        with torch.no_grad():
            hidden = model.model(ids[None], output_hidden_states=True).hidden_states
        handle.remove()
        return [h[0] for h in hidden[:-1]], kept[0]

    return run, model.model.norm


def test_the_harvested_states_pass(prepared):
    config = load_config(prepared)
    target = read_target(config.target.path)
    report = check_teacher(
        HarvestReader(config.store("train")), target.head.load(), target.final_norm.load(), target.rms_norm_eps, 0.97
    )
    assert report.agreement >= 0.99 and report.greedy_positions > 100


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("un-normed", "before the target's final norm"),
        ("shifted", "row t holds the state of t-1"),
        ("shifted the other way", "row t holds the state of t\\+1"),
        ("one layer early", "a layer other than the last"),
        ("normed twice", "a norm applied twice"),
    ],
)
def test_wrong_states_stop_the_run_by_cause(copy, fault, cause):
    config = load_config(copy())
    run, norm = states(config)

    def change(c):
        if fault == "shifted":
            return c.final.roll(1, 0)
        if fault == "shifted the other way":
            return c.final.roll(-1, 0)
        with torch.no_grad():
            if fault == "normed twice":
                return norm(norm(c.final.float()))
            inputs, last = run(c.input_ids)
            return last if fault == "un-normed" else norm(inputs[-1])

    rewrite(config, change)
    with pytest.raises(DraftsmithError, match="teacher guard") as error:
        train(config)
    assert cause.replace("\\", "") in str(error.value), str(error.value)
    assert not config.training.exists()


class Sampled(list):
    """The conversations of a store as if sampled at 0.7, with the log-probability that a server recorded at `recorded_at`."""

    def __init__(self, config, head, recorded_at):
        self.path = config.store("train")
        for c in HarvestReader(self.path):
            rows = c.generated[1:].nonzero()[:, 0].numpy()
            logits = (c.final.double() @ head.double().t()).numpy()[rows] / recorded_at
            chosen = logits[np.arange(len(rows)), c.input_ids.numpy()[rows + 1]]
            top = logits.max(-1)
            recorded = (chosen - top - np.log(np.exp(logits - top[:, None]).sum(-1))).mean()
            self.append(dataclasses.replace(c, greedy=False, mean_logprob=float(recorded), temperature=0.7))


@pytest.mark.parametrize("recorded_at", [1.0, 0.7])
def test_sampled_text_passes_whether_the_server_recorded_before_or_after_the_temperature(prepared, recorded_at):
    config = load_config(prepared)
    target = read_target(config.target.path)
    head = target.head.load()
    sampled = Sampled(config, head, recorded_at)
    report = check_teacher(sampled, head, target.final_norm.load(), target.rms_norm_eps, 0.97)
    assert report.agreement is None and report.sampled_positions > 100
    assert report.logprob_gap < 1e-3


def test_sampled_text_of_another_temperature_is_refused(prepared):
    config = load_config(prepared)
    target = read_target(config.target.path)
    head = target.head.load()
    with pytest.raises(DraftsmithError, match="another log-probability than generation recorded"):
        check_teacher(Sampled(config, head, 0.3), head, target.final_norm.load(), target.rms_norm_eps, 0.97)


@pytest.mark.parametrize("first", [float("nan"), float("inf")])
def test_a_log_probability_that_is_no_number_fits_nothing(prepared, first):
    config = load_config(prepared)
    target = read_target(config.target.path)
    head = target.head.load()
    sampled = Sampled(config, head, 1.0)
    sampled[0] = dataclasses.replace(sampled[0], mean_logprob=first)
    with pytest.raises(DraftsmithError, match="another log-probability than generation recorded"):
        check_teacher(sampled, head, target.final_norm.load(), target.rms_norm_eps, 0.97)
