"""Files of a run that come from different conversations: train and evaluate say which one is stale, and how to renew it."""

from __future__ import annotations

import json
import shutil

import pytest

from draftsmith.accept.evaluate import evaluate
from draftsmith.configs.schema import load_config
from draftsmith.data.harvest import harvest
from draftsmith.data.vocab import build_vocab
from draftsmith.train.inputs import read_inputs
from draftsmith.train.stale import warn_of_stale_heldout, warn_of_stale_training
from draftsmith.train.trainer import train


def change(config, split):
    """The last conversation has another id, as after new prompts and `synthesize`."""
    file = config.conversations(split)
    *others, last = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*others, json.dumps(json.loads(last) | {"id": "another"}) + "\n"]))


@pytest.fixture
def said(capsys):
    """What was printed since the last call, wrapped lines joined."""
    return lambda: "".join(capsys.readouterr().err.split())


def test_train_and_evaluate_name_what_is_stale(copy, said):
    config = load_config(copy(), ["train.epochs=1", "train.evaluate_every=1000"])
    inputs = read_inputs(config)
    for changes in ([], ["train"]):  # store and vocabulary belong together, whatever has been asked since
        for split in changes:
            change(config, split)
        warn_of_stale_training(config, inputs.train, inputs.vocab)
        warn_of_stale_heldout(config, inputs.heldout)
        assert not said()
    config.vocab_file.unlink()
    build_vocab(config)
    change(config, "heldout")
    said()
    train(config)
    text = said()
    assert f"rm-r{config.store('train')};draftsmithharvestCONFIG--splittrain" in text
    heldout = f"rm-r{config.store('heldout')};draftsmithharvestCONFIG--splitheldout"
    assert heldout in text
    evaluate(config)
    assert heldout in said()


def test_a_stale_vocabulary_is_named(copy, said):
    config = load_config(copy())
    change(config, "train")
    shutil.rmtree(config.store("train"))
    harvest(config, "train")
    inputs = read_inputs(config)
    said()
    warn_of_stale_training(config, inputs.train, inputs.vocab)
    assert said().endswith(f"rm{config.vocab_file};draftsmithvocabCONFIG")
    config.conversations("train").unlink()
    warn_of_stale_training(config, inputs.train, inputs.vocab)
    assert said().endswith(f"rm{config.vocab_file};draftsmithvocabCONFIG--store{config.store('train')}")
