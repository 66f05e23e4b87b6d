"""A draft vocabulary that holds none of the labels, or few of them, is named before training."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import load_config
from draftsmith.configs.target import read_target
from draftsmith.data.store import HarvestReader, Provenance
from draftsmith.data.store_writer import StoreWriter
from draftsmith.data.vocab import DraftVocab
from draftsmith.train.metrics import read_metrics
from draftsmith.train.trainer import train


def labels_of(config):
    """Every token that follows two generated ones' start: what the trainer's first step asks for, by hand."""
    found = []
    for conversation in HarvestReader(config.store("train")):
        ids, wrote = conversation.input_ids.tolist(), conversation.generated.tolist()
        for t in range(len(ids) - 2):
            if wrote[t + 1] and wrote[t + 2]:
                found.append(ids[t + 2] if conversation.greedy else int(conversation.argmax[t + 1]))
    return found


def write_vocab(config, ids):
    """The run's draft vocabulary becomes `ids`."""
    old = DraftVocab.load(config.vocab_file)
    ids = torch.tensor(sorted(ids))
    t2d = torch.zeros_like(old.t2d).index_fill_(0, ids, True)
    DraftVocab(ids - torch.arange(len(ids)), t2d, old.counts, old.source, old.target).save(config.vocab_file)


def write_sampled(config):
    """The training store again, as sampled text whose labels are the target's most likely tokens."""
    reader = HarvestReader(config.store("train"))
    conversations = [dataclasses.replace(c, greedy=False) for c in reader]
    fields = reader.manifest.model_dump(include=set(Provenance.model_fields))
    weight = read_target(config.target.path).require("head").load().float()
    for file in config.store("train").glob("*"):
        file.unlink()
    with StoreWriter(config.store("train"), Provenance(**fields)) as writer:
        for c in conversations:
            rows = c.generated[1:].nonzero()[:, 0]
            scores = torch.log_softmax(c.final[rows].float() @ weight.t(), -1)
            mean = float(scores.gather(1, c.input_ids[rows + 1][:, None]).mean())
            writer.append(dataclasses.replace(c, mean_logprob=mean))


@pytest.mark.parametrize("text", ["greedy", "sampled"])
def test_a_run_that_could_learn_nothing_stops_before_training_and_names_the_share(copy, text):
    config = load_config(copy())
    if text == "sampled":
        write_sampled(config)
    labels = labels_of(config)
    unused = set(range(len(DraftVocab.load(config.vocab_file).t2d))) - set(labels)
    write_vocab(config, list(unused)[:200])
    with pytest.raises(DraftsmithError, match="nothing would be learnt") as error:
        train(config)
    said = str(error.value)
    assert "100 %" in said and f"{len(labels):,} of {len(labels):,} labels" in said
    assert str(config.vocab_file) in said and "draftsmith vocab" in said
    assert not config.training.exists()


def test_where_such_positions_are_kept_there_is_something_to_learn(copy):
    config = load_config(copy(), ["train.out_of_vocabulary=keep", "train.epochs=1"])
    unused = set(range(len(DraftVocab.load(config.vocab_file).t2d))) - set(labels_of(config))
    write_vocab(config, list(unused)[:200])
    train(config)
    rows = [row for row in read_metrics(config.training / "metrics.jsonl") if "loss" in row]
    assert rows and all(row["outside"] == 1.0 and row["grad_norm"] > 0 for row in rows)


def test_a_vocabulary_that_holds_few_labels_is_named_with_their_share(copy, capsys):
    """Only the rarest label is inside: the run goes on, and says so before its first step."""
    config = load_config(copy(), ["train.epochs=1"])
    labels = labels_of(config)
    rarest = min(set(labels), key=labels.count)
    unused = set(range(len(DraftVocab.load(config.vocab_file).t2d))) - set(labels)
    write_vocab(config, [*list(unused)[:200], rarest])
    train(config)
    share = 1 - labels.count(rarest) / len(labels)
    said = capsys.readouterr().err
    assert f"{share:.1%} of the labels lie outside" in said and f"of {len(labels):,} looked at" in said


def test_an_ordinary_vocabulary_is_not_talked_about(copy, capsys):
    train(load_config(copy(), ["train.epochs=1"]))
    assert "lie outside the draft vocabulary of" not in capsys.readouterr().err
