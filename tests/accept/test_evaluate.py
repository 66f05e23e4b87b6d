"""The figures of `draftsmith evaluate` against a drafter that runs token by token and sums written out as loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.accept.evaluate import evaluate, measure
from draftsmith.accept.sampled import SampledObserver
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import read_target
from draftsmith.convert.engine_forward import load_drafter
from draftsmith.convert.export import export
from draftsmith.convert.read import read_drafter
from draftsmith.convert.tensors import read_array, to_float32
from draftsmith.convert.write import convert
from draftsmith.data.store import HarvestReader
from draftsmith.train.evaluate import replay, resampled
from tests.train.naive import NaiveDrafter, naive_supervised

STEPS = 3


@pytest.fixture(scope="module")
def room(trained):
    """Target, canonical drafter, store, and every chain by the naive drafter: conversation -> t -> logits a step."""
    target = read_target(trained.target.path)
    canonical = read_drafter(trained.training, target)
    reader = HarvestReader(trained.store("train"))  # its turns are longer than the held-out ones
    spec = canonical.spec
    tensors = {
        name: torch.from_numpy(to_float32(read_array(canonical.tensors[name]), canonical.tensors[name].dtype))
        for name in spec.trainable_shapes()
    }
    naive = NaiveDrafter(
        tensors, target.require("embedding").load().float(), heads=spec.num_attention_heads,
        kv_heads=spec.num_key_value_heads, head_dim=spec.head_dim, theta=spec.rope.theta, eps=spec.rms_norm_eps,
    )  # fmt: skip
    targets = torch.from_numpy(read_array(canonical.tensors["d2t"])) + torch.arange(spec.draft_vocab_size)
    chains = {}
    for number, c in enumerate(reader):
        ids, taps, generated = c.input_ids.tolist(), c.taps.float(), c.generated.tolist()
        made = [naive_supervised(generated, step) for step in range(STEPS)]
        chains[number] = {
            t: [logits for step, (_, logits) in enumerate(naive.chain(ids, taps, t, STEPS)) if made[step][t]]
            for t in range(len(ids))
            if made[0][t]
        }
    return target, canonical, reader, targets, chains


def greedy_walk(reader, targets, chains, depth):
    """Accepted drafts of each chain that an engine would start, by hand."""
    found = []
    for number, c in enumerate(reader):
        ids, position = c.input_ids.tolist(), -1
        for t in sorted(chains[number]):
            if t - 1 not in chains[number]:
                position = t  # a turn begins
            if t != position:
                continue
            accepted = 0
            for step, logits in enumerate(chains[number][t][:depth]):
                if targets[logits.argmax()] != ids[t + 2 + step]:
                    break
                accepted += 1
            found.append(accepted)
            position = t + accepted + 1
    return found


def test_every_depth_is_the_walk_of_an_engine_at_that_depth(room, trained):
    _, canonical, reader, targets, chains = room
    measured = measure(canonical, read_target(trained.target.path), reader, trained)
    assert sorted(measured.depths) == list(range(1, 9))
    for depth in (1, 2, 3):
        accepted = greedy_walk(reader, targets, chains, depth)
        served = measured.depths[depth]
        assert served.chains == len(accepted)
        assert served.accept_length == pytest.approx(1 + sum(accepted) / len(accepted))
        shares = [sum(a > i for a in accepted) / len(accepted) for i in range(depth)]
        assert served.accept_per_position == pytest.approx(shares)
    assert measured.as_served == measured.depths[3]
    assert any(0 < share < 1 for share in measured.depths[3].accept_per_position)
    assert measured.tokens == sum(reader.lengths) and measured.tokens_per_second > 0


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy text", "sampled text"])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampled_acceptance_is_the_sum_of_minima_along_the_text(room, greedy, temperature):
    target, canonical, reader, targets, chains = room
    head = target.require("head").load().float()
    drafter = load_drafter(canonical, target)
    observer = SampledObserver(drafter, targets, head, [greedy] * len(reader), (temperature,), STEPS)
    replay(drafter, targets, reader, STEPS, 64, observe=observer, quiet=True)
    (found,) = observer.result()
    assert found.text == ("greedy" if greedy else "sampled")

    single = {"rejection": [[] for _ in range(STEPS)], "target_only": [[] for _ in range(STEPS)]}
    prefix = {"rejection": [0.0] * STEPS, "target_only": [0.0] * STEPS}
    count = 0
    for number, c in enumerate(reader):
        ids, final = c.input_ids.tolist(), c.final.float()
        for t, steps in chains[number].items():
            count += 1
            reached = {"rejection": 1.0, "target_only": 1.0}
            for step, logits in enumerate(steps):
                p = torch.softmax(head @ final[t + 1 + step] / temperature, -1)
                q = torch.zeros_like(p)
                q[targets] = torch.softmax(logits / temperature, -1)
                drafted, label = int(targets[logits.argmax()]), ids[t + 2 + step]
                answers = {
                    "rejection": (torch.minimum(p, q).sum().item(), min(1.0, (q[label] / p[label]).item())),
                    "target_only": (p[drafted].item(), float(drafted == label)),
                }
                for rule, (share, weight) in answers.items():
                    single[rule][step].append(share)
                    prefix[rule][step] += reached[rule] * share
                    reached[rule] *= share if greedy else weight
    for rule, steps in single.items():
        got = getattr(found, rule)
        assert got.step == pytest.approx([np.mean(values) for values in steps], abs=2e-5)
        shares = [value / count for value in prefix[rule]]
        assert got.accept_per_position == pytest.approx(shares, abs=2e-5)
        assert got.accept_length == pytest.approx((1 + np.cumsum(shares)).tolist(), abs=1e-4)
        assert all(low <= value <= high for (low, high), value in zip(got.interval, got.accept_length, strict=True))


def test_chains_at_a_turns_end_never_look_past_it(room):
    """The last chain of a turn can be right at most until the end-of-turn token, whatever the target goes on with."""
    _, _, reader, _, chains = room
    for number, c in enumerate(reader):
        generated = c.generated.tolist()
        for t, steps in chains[number].items():
            assert all(generated[t + 1 : t + 2 + len(steps)])


def test_intervals_are_those_of_a_bootstrap_over_conversations():
    """Two conversations of one chain each, accepted 0 and 1: a draw has mean 0, 1/2 or 1 with chance 1/4, 1/2, 1/4."""
    sums = np.array([[1.0, 0.0], [1.0, 1.0]])
    low, high = resampled(sums, lambda draws: draws[:, 1:] / draws[:, :1])
    assert (low, high) == ([0.0], [1.0])
    many = np.column_stack([np.ones(400), np.arange(400) % 2])
    low, high = resampled(many, lambda draws: draws[:, 1:] / draws[:, :1])
    assert low[0] == pytest.approx(0.5 - 1.96 * 0.025, abs=0.01) and high[0] == pytest.approx(0.549, abs=0.01)


def test_the_converted_files_give_the_checkpoints_figures_and_the_card_shows_them(trained, tmp_path, capsys):
    drafter = convert(trained.training, trained.target.path, tmp_path / "final", dtype="float32")
    ours, theirs = (json.loads(evaluate(trained, drafter=folder).read_text()) for folder in (None, drafter))
    timed = ("drafter", "dialect", "seconds", "tokens_per_second")
    assert {k: v for k, v in ours.items() if k not in timed} == {k: v for k, v in theirs.items() if k not in timed}
    assert "tokens/s" in capsys.readouterr().err
    assert ours["by_category"]["chat"]["interval"] is not None
    # The converted folder's results are known by the digests, though the checkpoint is stored in another form.
    (tmp_path / "evaluate.json").write_text(json.dumps(ours))
    rounded = convert(trained.training, trained.target.path, tmp_path / "rounded", dtype="bfloat16")
    place = export(rounded, tmp_path / "shared", trained.target.path)
    assert (
        f"| as_served.accept_length | {ours['as_served']['accept_length']:.4g} |"
        in (Path(place) / "README.md").read_text()
    )


def test_a_temperature_of_zero_is_refused(trained):
    with pytest.raises(DraftsmithError, match="above 0"):
        evaluate(trained, temperatures=(0.0,))


def test_a_store_without_conversations_is_named(trained, tmp_path):
    store = tmp_path / "empty"
    store.mkdir()
    manifest = json.loads((trained.store("heldout") / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps(manifest | {"shards": [], "planned": 0}))
    with pytest.raises(DraftsmithError, match="no conversations") as caught:
        evaluate(trained, store=store)
    assert caught.value.where == store
