"""The unroll equals the engine-like replay of tests/train/naive.py: hidden states, logits, loss and gradients."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.configs.drafter import DrafterSpec, RopeSpec
from draftsmith.train.batch import Window, pack, supervised, turns
from draftsmith.train.model import Drafter
from draftsmith.train.unroll import Unroll, loss_coefficients

_spec = importlib.util.spec_from_file_location("naive", Path(__file__).parent / "naive.py")
naive = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(naive)

STEPS = 4
ONES = [1.0] * STEPS


def make_spec(**changes):
    values = {
        "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "vocab_size": 40, "draft_vocab_size": 24, "target_hidden_size": 16, "target_num_layers": 8, "taps": (2, 4, 5),
        "rms_norm_eps": 1e-5, "rope": RopeSpec(theta=100.0), "max_position_embeddings": 64,
    }  # fmt: skip
    return DrafterSpec(**(values | changes))


def make_conversation(seed, pattern, spec, dtype):
    rng = torch.Generator().manual_seed(seed)
    length = len(pattern)
    return {
        "ids": torch.randint(0, spec.vocab_size, (length,), generator=rng).tolist(),
        "generated": [int(mark) for mark in pattern],
        "taps": torch.randn(length, len(spec.taps), spec.target_hidden_size, generator=rng, dtype=dtype),
        "final": torch.randn(length, spec.target_hidden_size, generator=rng, dtype=dtype),
    }


def make_window(conversation, start=0, stop=None, lookahead=STEPS + 1):
    length = len(conversation["ids"])
    stop = length if stop is None else stop
    rows = slice(start, min(length, stop + lookahead))
    generated = np.array(conversation["generated"], dtype=bool)
    ids = torch.tensor(conversation["ids"])
    return Window(
        ids=ids[rows], generated=torch.from_numpy(generated[rows]), turn=torch.from_numpy(turns(generated)[rows]),
        taps=conversation["taps"][rows], final=conversation["final"][rows], argmax=ids[rows], start=start, stop=stop, greedy=True,
    )  # fmt: skip


@pytest.fixture(
    params=[{}, {"fc_norm": True, "norm_output": True}, {"taps": (1, 6)}], ids=["eagle3", "eagle3.1", "two-taps"]
)
def setup(request):
    spec = make_spec(**request.param)
    torch.manual_seed(1)
    embedding = torch.randn(spec.vocab_size, spec.hidden_size)
    drafter = Drafter(spec, embedding)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    targets = torch.randperm(spec.vocab_size)[: spec.draft_vocab_size].sort().values
    head = torch.randn(spec.vocab_size, spec.target_hidden_size)
    return spec, drafter, embedding, targets, head


def make_naive(spec, drafter, embedding, dtype):
    tensors = {name: value.detach().to(dtype).requires_grad_() for name, value in drafter.named_parameters()}
    return naive.NaiveDrafter(
        tensors, embedding.to(dtype), heads=spec.num_attention_heads, kv_heads=spec.num_key_value_heads, head_dim=spec.head_dim,
        theta=spec.rope.theta, eps=spec.rms_norm_eps, fc_norm=spec.fc_norm, norm_output=spec.norm_output,
    )  # fmt: skip


PATTERNS = ["0011110", "00111100111111", "1111111", "001010", "000111111111000111"]


def test_hidden_states_and_logits_equal_the_token_by_token_replay(setup):
    spec, drafter, embedding, *_ = setup
    conversations = [make_conversation(i, p, spec, torch.float32) for i, p in enumerate(PATTERNS)]
    batch = pack([make_window(c) for c in conversations], STEPS)
    oracle = make_naive(spec, drafter, embedding, torch.float64)
    expected = [[] for _ in range(STEPS)]
    for c in conversations:
        taps = c["taps"].double()
        for t in range(len(c["ids"])):
            if naive.naive_supervised(c["generated"], 0)[t]:
                for i, state in enumerate(oracle.chain(c["ids"], taps, t, STEPS)):
                    if naive.naive_supervised(c["generated"], i)[t]:
                        expected[i].append(state)
    hidden, cache = drafter.begin(batch.taps, batch.fed, STEPS)
    for i, rows in enumerate(batch.steps):
        queries = None if i else batch.queries
        hidden, normed = drafter.step(rows.slots, hidden, rows.positions, queries, cache, batch.segments)
        want_hidden = torch.stack([h for h, _ in expected[i]])
        want_logits = torch.stack([logits for _, logits in expected[i]])
        torch.testing.assert_close(hidden[rows.active].double(), want_hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(drafter.lm_head(normed[rows.active]).double(), want_logits, rtol=1e-5, atol=1e-5)
    assert len(batch.steps) == STEPS


def test_loss_and_gradients_equal_the_replay(setup):
    spec, drafter, embedding, targets, head = setup
    conversations = [make_conversation(i, p, spec, torch.float32) for i, p in enumerate(PATTERNS)]
    unroll = Unroll(drafter, head[targets], targets)
    batch = pack([make_window(c) for c in conversations], STEPS)
    loss, _ = unroll(batch, loss_coefficients([len(rows.labels) for rows in batch.steps], 0.8))
    loss.backward()
    oracle = make_naive(spec, drafter, embedding, torch.float64)
    for c in conversations:
        c["taps"], c["final"] = c["taps"].double(), c["final"].double()
    want = naive.naive_loss(oracle, conversations, targets - torch.arange(len(targets)), head.double(), STEPS, 0.8)
    want.backward()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), oracle.w[name].grad, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_worked_example_of_the_mask():
    generated = np.array([0, 0, 1, 1, 1, 1, 0], dtype=bool)
    assert supervised(generated, turns(generated), 0).nonzero()[0].tolist() == [1, 2, 3]
    assert supervised(generated, turns(generated), 1).nonzero()[0].tolist() == [1, 2]
    assert supervised(generated, turns(generated), 2).nonzero()[0].tolist() == [1]
    assert supervised(generated, turns(generated), 0, "upstream").nonzero()[0].tolist() == [2, 3, 4]


def test_adjacent_turns_are_not_joined():
    generated = np.array([0, 1, 1, 1, 0, 1, 1], dtype=bool)
    assert supervised(generated, turns(generated), 0).nonzero()[0].tolist() == [0, 1, 4]
    assert supervised(generated, turns(generated), 1).nonzero()[0].tolist() == [0]


def test_a_neighbour_in_the_pack_changes_nothing(setup):
    spec, drafter, _, targets, head = setup
    unroll = Unroll(drafter, head[targets], targets)
    first, second = (make_conversation(i, PATTERNS[i], spec, torch.float32) for i in (1, 4))
    other = make_conversation(99, PATTERNS[4], spec, torch.float32)
    count = len(pack([make_window(first)], STEPS).steps[0].labels)
    with torch.no_grad():
        states = []
        for neighbour in (second, other):
            batch = pack([make_window(first), make_window(neighbour)], STEPS)
            rows = batch.steps[0]
            hidden, cache = drafter.begin(batch.taps, batch.fed, STEPS)
            states.append(
                drafter.step(rows.slots, hidden, rows.positions, batch.queries, cache, batch.segments)[0][:count]
            )
        assert torch.equal(*states)
        together = [s.loss.item() for s in unroll(pack([make_window(first), make_window(second)], STEPS), ONES)[1]]
        apart = [[s.loss.item() for s in unroll(pack([make_window(c)], STEPS), ONES)[1]] for c in (first, second)]
    assert together == pytest.approx([a + b for a, b in zip(*apart, strict=True)], rel=1e-5)


def test_a_windows_labels_reach_past_its_cut(setup):
    """Cutting a conversation keeps every supervised position exactly once, with the label it had."""
    spec, *_ = setup
    conversation = make_conversation(7, "001111111100111111", spec, torch.float32)
    whole = pack([make_window(conversation)], STEPS)
    cut = pack([make_window(conversation, 0, 7), make_window(conversation, 7, 18)], STEPS)
    for i in range(STEPS):
        assert whole.steps[i].labels.tolist() == cut.steps[i].labels.tolist()
        places = [
            b.steps[i].positions[b.queries if i == 0 else slice(None)][b.steps[i].active].tolist() for b in (whole, cut)
        ]
        assert places[0] == places[1]


def test_labels_outside_the_draft_vocabulary_have_no_gradient_and_count_as_misses(setup):
    spec, drafter, _, targets, head = setup
    conversation = make_conversation(3, "0011110", spec, torch.float32)
    outside = next(i for i in range(spec.vocab_size) if i not in targets.tolist())
    conversation["ids"] = [*conversation["ids"][:2], *[outside] * 4, conversation["ids"][-1]]
    sums = Unroll(drafter, head[targets], targets)(pack([make_window(conversation)], STEPS), ONES)[1]
    assert [s.loss.item() for s in sums] == [0.0] * len(sums)
    assert not any(s.right.any() or s.chain.any() for s in sums) and all(s.outside.all() for s in sums)
    kept = Unroll(drafter, head[targets], targets, keep_outside=True)(pack([make_window(conversation)], STEPS), ONES)[1]
    assert all(s.loss.item() > 0 for s in kept)
