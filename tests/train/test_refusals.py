"""What stops a run before it costs anything, or before it writes what no one can use."""

from __future__ import annotations

import json

import pytest
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import load_config
from draftsmith.data.store import HarvestReader
from draftsmith.train import checkpoint as saving
from draftsmith.train.evaluate import replay
from draftsmith.train.initial import build_drafter
from draftsmith.train.inputs import read_inputs
from draftsmith.train.metrics import append_metrics, read_metrics
from draftsmith.train.trainer import train


def shard_of(config, split):
    return next(config.store(split).glob("shard-*.safetensors"))


def test_a_damaged_held_out_shard_stops_before_the_first_step(copy):
    config = load_config(copy())
    shard = shard_of(config, "heldout")
    content = bytearray(shard.read_bytes())
    content[-300:] = bytes(300)
    shard.write_bytes(content)
    with pytest.raises(DraftsmithError, match="damaged"):
        train(config)
    assert not saving.checkpoints(config.training)


def test_held_out_states_that_are_not_finite_are_named_instead_of_counted_as_misses(copy):
    config = load_config(copy())
    inputs = read_inputs(config)
    shard = shard_of(config, "heldout")
    content = bytearray(shard.read_bytes())
    length = int.from_bytes(content[:8], "little")
    for name, part in json.loads(content[8 : 8 + length]).items():
        if "taps" in name:  # every bfloat16 becomes 0xffff
            first, last = (8 + length + offset for offset in part["data_offsets"])
            content[first:last] = b"\xff" * (last - first)
    shard.write_bytes(content)
    embedding = inputs.target.require("embedding").load().float()
    drafter = build_drafter(inputs.spec, inputs.target, embedding, inputs.targets, config.train)
    with pytest.raises(DraftsmithError, match="not finite"):
        replay(drafter, inputs.targets, HarvestReader(config.store("heldout")), 3, 512, quiet=True)


def test_a_drafter_with_a_broken_weight_is_not_evaluated(copy):
    config = load_config(copy())
    inputs = read_inputs(config)
    embedding = inputs.target.require("embedding").load().float()
    drafter = build_drafter(inputs.spec, inputs.target, embedding, inputs.targets, config.train)
    with torch.no_grad():
        drafter.norm.weight[0] = float("inf")
    with pytest.raises(DraftsmithError, match="not finite"):
        replay(drafter, inputs.targets, inputs.heldout, 3, 512, quiet=True)


def test_another_width_than_the_targets_and_a_negative_seed_are_refused(copy):
    file = copy()
    with pytest.raises(DraftsmithError, match="width"):
        read_inputs(load_config(file, ["drafter.hidden_size=32", "train.head_init=random"]))
    with pytest.raises(DraftsmithError, match="seed"):
        load_config(file, ["train.seed=-1"])


def test_a_checkpoint_is_never_made_of_ruined_weights(tmp_path, copy):
    spec = read_inputs(load_config(copy())).spec
    weights = {"fc.weight": torch.full((2, 2), float("nan"))}
    with pytest.raises(DraftsmithError, match="not finite"):
        saving.save_checkpoint(tmp_path / "train", 3, weights, {}, spec, {}, {})
    assert not (tmp_path / "train").exists()


def test_damage_that_keeps_a_files_size_is_an_error_and_no_traceback(tmp_path, copy):
    spec = read_inputs(load_config(copy())).spec
    weights = {"fc.weight": torch.ones(2, 2)}
    saved = saving.save_checkpoint(tmp_path, 3, weights, {"exp_avg/fc.weight": torch.ones(2, 2)}, spec, {}, {})
    for file, read in (("drafter/model", saving.read_drafter), ("state/moments", saving.read_moments)):
        path = saved / f"{file}.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[:10] + b"\xff" + whole[11:])
        with pytest.raises(DraftsmithError, match="cannot be read"):
            read(saved)
        path.write_bytes(whole[:-4] + b"\xff\xff\xff\xff")
        with pytest.raises(DraftsmithError, match="not finite"):
            read(saved)
        path.write_bytes(whole)


def test_lines_that_are_no_rows_end_the_metrics(tmp_path):
    file = tmp_path / "metrics.jsonl"
    append_metrics(file, {"step": 1, "loss": 2.0})
    for junk in ("[1]\n", '{"loss": 1}\n', "{"):
        file.write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n" + junk)
        assert [row["step"] for row in read_metrics(file)] == [1]


def test_a_run_does_not_go_on_with_another_measure_of_the_best(copy):
    file = copy()
    train(load_config(file, ["train.epochs=1"]))
    with pytest.raises(DraftsmithError, match=r"evaluate\.draft_steps"):
        train(load_config(file, ["train.epochs=1", "evaluate.draft_steps=1"]))
