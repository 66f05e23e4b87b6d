"""Packed batches keep conversations apart, cut long ones without losing or doubling a label, and reach every process alike."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftsmith.configs.drafter import DrafterSpec, RopeSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import load_config
from draftsmith.data.store import HarvestReader, Provenance
from draftsmith.data.store_writer import StoreWriter
from draftsmith.train.batch import Window, each_tensor, pack, supervised
from draftsmith.train.flops import step_flops
from draftsmith.train.initial import build_drafter
from draftsmith.train.inputs import read_inputs
from draftsmith.train.loader import Loader
from draftsmith.train.metrics import read_metrics
from draftsmith.train.plan import load_window, plan_windows
from draftsmith.train.trainer import train
from draftsmith.train.unroll import Unroll
from tests.train.launching import losses, run

STEPS = 3


@pytest.fixture(scope="module")
def inputs(prepared):
    return read_inputs(load_config(prepared))


@pytest.fixture(scope="module")
def drafter(inputs, prepared):
    embedding = inputs.target.require("embedding").load().float()
    return build_drafter(inputs.spec, inputs.target, embedding, inputs.targets, load_config(prepared).train)


def windows_of(inputs, count):
    refs = plan_windows(inputs.train, 1024, STEPS, "aligned")[:count]
    return [load_window(inputs.train, ref, STEPS) for ref in refs]


def other(window: Window, seed: int) -> Window:
    """The same mask and length with another text and other states."""
    rng = torch.Generator().manual_seed(seed)
    return dataclasses.replace(
        window,
        ids=torch.randint(3, 300, window.ids.shape, generator=rng),
        argmax=torch.randint(3, 300, window.argmax.shape, generator=rng),
        taps=torch.randn(window.taps.shape, generator=rng).to(window.taps.dtype) * 7,
        final=torch.randn(window.final.shape, generator=rng).to(window.final.dtype) * 7,
    )


def rows_of(window, step):
    """Indices of a window's rows that a step supervises."""
    mask = supervised(window.generated.numpy(), window.turn.numpy(), step)
    return mask[: window.stop - window.start].nonzero()[0]


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_neighbour_in_the_batch_changes_nothing_at_all(inputs, drafter, changed):
    """The gradient in each conversation's taps, which all its states and losses pass through, stays equal bit by bit."""
    head = inputs.target.require("head").load()[inputs.targets].float()
    unroll = Unroll(drafter, head, inputs.targets)
    windows = windows_of(inputs, 3)
    keys = [int(rows_of(window, 0)[-1]) + 1 for window in windows]
    slopes = []
    for group in (windows, [other(w, 1) if n == changed else w for n, w in enumerate(windows)]):
        batch = pack(group, STEPS)
        taps = batch.taps.float().requires_grad_()
        loss, _ = unroll(dataclasses.replace(batch, taps=taps), [1.0] * STEPS)
        slopes.append(torch.autograd.grad(loss, taps)[0].split(keys))
    for number, (before, after) in enumerate(zip(*slopes, strict=True)):
        assert before.abs().max() > 0
        assert torch.equal(before, after) == (number != changed)


def supervision(reader, refs):
    """(conversation, step, position, label) of everything that a list of windows supervises."""
    found = []
    for ref in refs:
        window = load_window(reader, ref, STEPS)
        for index, step in enumerate(pack([window], STEPS).steps):
            positions = rows_of(window, index) + ref.start
            found += [
                (ref.conversation, index, int(t), int(label)) for t, label in zip(positions, step.labels, strict=True)
            ]
    return found


@pytest.mark.parametrize("budget", [5, 7, 16, 33])
def test_conversations_cut_at_any_budget_keep_every_label_once(inputs, budget):
    whole = supervision(inputs.train, plan_windows(inputs.train, 4096, STEPS, "aligned"))
    refs = plan_windows(inputs.train, budget, STEPS, "aligned")
    assert max(ref.tokens for ref in refs) <= budget
    parts = supervision(inputs.train, refs)
    assert len(parts) == len(set(parts)) and sorted(parts) == sorted(whole)
    assert sum(ref.counts[2] for ref in refs) == sum(1 for part in whole if part[1] == 2)


def test_a_step_stays_within_its_token_budget(copy):
    """max_length above batch_tokens: the budget wins."""
    config = load_config(copy(), ["train.max_length=1024", "train.batch_tokens=24", "train.epochs=1"])
    train(config)
    rows = [row for row in read_metrics(config.training / "metrics.jsonl") if "loss" in row]
    assert len(rows) > 5 and all(0 <= row["waiting"] <= 1 and row["mfu"] > 0 for row in rows)


def make_loader(inputs, rank, processes, accumulation=1, *, fill=True, **changes):
    settings = load_config_settings(changes)
    windows = plan_windows(inputs.train, 48, STEPS, "aligned")
    return Loader(
        inputs.train,
        windows,
        settings,
        inputs.spec,
        rank=rank,
        processes=processes,
        accumulation=accumulation,
        fill=fill,
    )


def load_config_settings(changes):
    from draftsmith.configs.schema import TrainSection

    return TrainSection(**({"unroll_steps": STEPS, "epochs": 2, "batch_tokens": 96, "prefetch": 3} | changes))


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_processes_take_equally_many_steps_and_every_label_once(inputs, processes):
    alone = list(make_loader(inputs, 0, 1).steps(0))
    shares = [list(make_loader(inputs, rank, processes, 2).steps(0)) for rank in range(processes)]
    assert {len(share) for share in shares} == {len(alone)}
    for step, single in enumerate(alone):
        labels = [
            sorted(torch.cat([s.labels for batch in share.batches if batch is not None for s in batch.steps]).tolist())
            for share in [single]
        ]
        parts = [b for share in shares for b in share[step].batches if b is not None]
        together = sorted(torch.cat([s.labels for batch in parts for s in batch.steps]).tolist())
        assert together == labels[0]
        assert all(share[step].counts == single.counts and len(share[step].batches) == 2 for share in shares)
    assert sum(share[0].flops for share in shares) == pytest.approx(alone[0].flops, rel=0.05)


def test_one_process_computes_nothing_for_micro_steps_without_a_window(copy, monkeypatch):
    """Every step has fewer windows than micro-batches: passes are counted, and the steps are those of one micro-batch."""
    from draftsmith.train.model import Drafter

    passes, begin = [], Drafter.begin
    monkeypatch.setattr(
        Drafter, "begin", lambda self, taps, *rest: passes.append(len(taps)) or begin(self, taps, *rest)
    )
    settings = ["train.batch_tokens=48", "train.epochs=1", "train.evaluate_every=1000"]
    curves = []
    for accumulation in (1, 4):
        config = load_config(copy(f"of-{accumulation}"), [*settings, f"train.accumulation={accumulation}"])
        passes.clear()
        train(config)
        curves.append(losses(config))
        steps = make_loader(read_inputs(config), 0, 1, accumulation, fill=False, batch_tokens=48, epochs=1).steps(0)
        batches = [batch for share in steps for batch in share.batches]
        needed = len(batches) - batches.count(None)
        assert accumulation == 1 or batches.count(None) > needed
        assert needed < len(passes) < needed + 5  # the evaluation at the end drafts too
    assert [row[0] for row in curves[0]] == [row[0] for row in curves[1]]
    for one, other_row in zip(*curves, strict=True):
        assert one[1:] == pytest.approx(other_row[1:], rel=1e-5)


def test_going_on_at_a_step_gives_the_shares_an_unbroken_loader_gives(inputs):
    loader = make_loader(inputs, 1, 2)
    for one, other_share in zip(list(loader.steps(0))[4:], loader.steps(4), strict=True):
        assert one.counts == other_share.counts and one.tokens == other_share.tokens
        for batch, same in zip(one.batches, other_share.batches, strict=True):
            assert (batch is None) == (same is None)
            assert batch is None or torch.equal(batch.final, same.final)


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [tensor for item in getattr(value, "__dict__", {}).values() for tensor in tensors_in(item)]


def test_every_tensor_of_a_batch_is_reached(inputs):
    """What pinning changes: a copy of everything, without one tensor left behind."""
    batch = pack(windows_of(inputs, 2), STEPS)
    rebuilt = each_tensor(batch, torch.clone)
    pairs = list(zip(tensors_in(batch), tensors_in(rebuilt), strict=True))
    assert len(pairs) > 10
    assert all(torch.equal(one, copy) and one.data_ptr() != copy.data_ptr() for one, copy in pairs if one.numel())


def test_counted_work_agrees_with_what_torch_counts(inputs, drafter):
    """One conversation, supervised throughout, so that no row is computed in vain; attention is left out of both."""
    from torch.utils.flop_counter import FlopCounterMode

    (window,) = windows_of(inputs, 1)
    generated = torch.ones_like(window.generated)
    window = dataclasses.replace(window, generated=generated, turn=torch.zeros_like(window.turn))
    head = inputs.target.require("head").load()[inputs.targets].float()
    unroll = Unroll(drafter, head, inputs.targets)

    def in_place(total, left, right, out_shape=None, **_):
        return 2 * left[0] * left[1] * right[1]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        loss, _ = unroll(pack([window], STEPS), [1.0] * STEPS)
        loss.backward()
    seen = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op))
    assert step_flops(inputs.spec, [window], STEPS) == pytest.approx(seen, rel=0.1)


def test_work_is_counted_as_by_hand():
    """Five generated tokens after one, two steps: 4 and 3 drafts over 4 keys, 4 teaching positions, 19 scores a head."""
    spec = DrafterSpec(
        hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=6, vocab_size=40,
        draft_vocab_size=24, target_hidden_size=16, target_num_layers=8, taps=(2, 4, 5), rms_norm_eps=1e-5,
        rope=RopeSpec(theta=100.0), max_position_embeddings=64,
    )  # fmt: skip
    generated = torch.tensor([False, True, True, True, True, True])
    window = Window(
        ids=torch.zeros(6), generated=generated, turn=generated.long(), taps=torch.zeros(0), final=torch.zeros(0),
        argmax=torch.zeros(6), start=0, stop=6, greedy=True,
    )  # fmt: skip
    by_hand = {
        "fc 16 x 48, no gradient in its input": 2 * 768 * 4 * 2,
        "k and v 12 x (16 + 16), 4 keys and 3 later rows, 5 tokens fed": 2 * (2 * 192 * 7 * 3 + 2 * 192 * 5 * 3),
        "q 24 x (16 + 16), 7 drafts, 5 tokens fed": 2 * 384 * 7 * 3 + 2 * 384 * 5 * 3,
        "o, gate, up, down, head, 384 each": 5 * (2 * 384 * 7 * 3),
        "teacher 24 x 16, forward only": 2 * 384 * 4,
        "scores and mixing, 4 heads of 6": 3 * 2 * 2 * 4 * 6 * (1 + 2 + 3 + 4 + 2 + 3 + 4),
    }
    assert step_flops(spec, [window], 2) == sum(by_hand.values()) == 156_768


@pytest.fixture
def sharded(copy):
    """A configuration file whose training store has one shard a conversation."""
    file = copy()
    config = load_config(file)
    reader = HarvestReader(config.store("train"))
    conversations = list(reader)
    fields = reader.manifest.model_dump(include=set(Provenance.model_fields)) | {"shard_tokens": 8}
    for old in config.store("train").glob("*"):
        old.unlink()
    with StoreWriter(config.store("train"), Provenance(**fields)) as writer:
        for conversation in conversations:
            writer.append(conversation)
    assert len(list(config.store("train").glob("*.safetensors"))) == len(conversations)
    return file


def flip(file, place=-40):
    """Change one byte, which size and header do not show."""
    content = bytearray(file.read_bytes())
    content[place] ^= 0xFF
    file.write_bytes(content)


def shard_files(config):
    return sorted(config.store("train").glob("*.safetensors"))


def test_damaged_shards_stop_a_run_by_name(sharded):
    config = load_config(sharded)
    flip(shard_files(config)[3])
    with pytest.raises(DraftsmithError, match="sha256") as error:
        train(config)
    assert shard_files(config)[3].name in str(error.value) and "train.damaged_shards=skip" in str(error.value)
    assert not config.training.exists()
    train(load_config(sharded, ["train.check_shards=header", "train.epochs=1"]))


def test_damaged_shards_are_skipped_counted_and_named(sharded, capsys):
    config = load_config(sharded, ["train.damaged_shards=skip", "train.epochs=1", "train.batch_tokens=64"])
    flip(shard_files(config)[3])
    cut = shard_files(config)[5]
    cut.write_bytes(cut.read_bytes()[:-100])
    train(config)
    said = capsys.readouterr().err
    assert said.count("is left out (1 conversations)") == 2 and cut.name in said and shard_files(config)[3].name in said
    assert "6 conversations" in (config.training / "report.html").read_text()
    flip(shard_files(config)[0])  # damaged since: the run cannot go on as it began
    with pytest.raises(DraftsmithError, match="other shards are damaged") as error:
        train(config)
    assert shard_files(config)[0].name in str(error.value)


def test_a_store_without_a_whole_shard_stops_in_any_case(sharded):
    config = load_config(sharded, ["train.damaged_shards=skip"])
    for file in shard_files(config):
        flip(file)
    with pytest.raises(DraftsmithError, match="no shard of the store is whole"):
        train(config)


@pytest.mark.slow
def test_two_processes_skip_the_shard_that_one_of_them_finds_damaged(sharded, tmp_path, warm_python):
    settings = ["train.damaged_shards=skip", "train.epochs=2", "train.batch_tokens=64"]
    config = load_config(sharded, settings)
    flip(shard_files(config)[1])  # the second process reads this one
    run(sharded, *settings, back_end="ddp", tmp_path=tmp_path, timeout=120, python=warm_python)
    assert "1 conversations" in (tmp_path / "launch.log").read_text()
    together = losses(config)
    import shutil

    shutil.rmtree(config.training)
    train(config)
    alone = losses(config)
    assert [row[0] for row in together] == [row[0] for row in alone]
    assert [row[1] for row in together] == pytest.approx([row[1] for row in alone], rel=1e-5)
