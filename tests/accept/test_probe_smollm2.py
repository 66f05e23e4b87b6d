"""Faults planted into a real drafter of SmolLM2-135M are found without an engine, and named.

The drafter is right; each test changes what its folder says, or holds, so that the weights no longer fit it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from draftsmith.accept import probe
from draftsmith.accept.network import build, read_network
from draftsmith.accept.probe import judge, spectra_of, taught_findings, tensor_findings
from draftsmith.accept.scores import Bench
from draftsmith.accept.spot import harvest_spot
from draftsmith.accept.store_states import store_findings
from draftsmith.accept.variants import described, variants
from draftsmith.configs.target import read_target
from draftsmith.data.store import HarvestReader
from draftsmith.train.batch import pack
from draftsmith.train.unroll import Unroll, loss_coefficients
from tests.accept import smollm2_run
from tests.convert.conftest import edit_tensors

pytestmark = pytest.mark.slow
FEW = 6
"""Conversations that are enough for faults that are not subtle."""


@pytest.fixture(scope="module")
def bare_room(tmp_path_factory, target_folder):
    """Run and target."""
    torch.set_num_threads(1)
    return smollm2_run.make_run(tmp_path_factory.mktemp("smollm2"), target_folder), read_target(target_folder)


@pytest.fixture(scope="module")
def room(bare_room):
    """Run, target, and every conversation's states."""
    return *bare_room, smollm2_run.harvested(bare_room[0])


@pytest.fixture(scope="module")
def long_room(tmp_path_factory, target_folder):
    """As `room`, of longer answers: the better a drafter is, the less it looks far back, where RoPE's base shows."""
    config = smollm2_run.make_run(tmp_path_factory.mktemp("smollm2"), target_folder, text="long")
    return config, read_target(target_folder), harvest_spot(config, smollm2_run.TAPS, 1000, 1024)


@pytest.fixture
def plant(bare_room, tmp_path):
    """A function that copies the drafter, changes config.json or tensors, and reads what came of it."""
    config, target = bare_room

    def make(change=None, edit=None):
        folder = tmp_path / "drafter"
        shutil.copytree(config.drafter_folder, folder)
        if change is not None:
            content = json.loads((folder / "config.json").read_text())
            change(content)
            (folder / "config.json").write_text(json.dumps(content))
        if edit is not None:
            edit_tensors(folder, edit)
        return read_network(folder, target)

    return make


def probed(room, network, conversations=FEW, steps=2):
    _, target, spots = room
    return judge("planted", network, target, spots[:conversations], steps)


def shifted(by):
    def change(content):
        inner = content["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        content["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [layer + by for layer in inner]
        top = content["eagle_aux_hidden_state_layer_ids"]
        content["eagle_aux_hidden_state_layer_ids"] = [layer + by for layer in top]

    return change


def theta(content):
    content["rope_theta"] = content["rope_parameters"]["rope_theta"] = 10_000.0


def swap(tensors):
    for name in "qkv":
        key = f"midlayer.self_attn.{name}_proj.weight"
        first, second = tensors[key].chunk(2, 1)
        tensors[key] = torch.cat([second, first], 1)


def test_the_right_description_fits(room, plant):
    found = probed(room, plant(), conversations=12)
    assert found.as_described and found.fits == [] and found.findings == []
    gains = {row.name: row for row in found.rows}
    assert gains["taps -1"].difference < -3 * gains["taps -1"].error
    assert gains["norm_output true"].difference < 0 and gains["hidden state first"].difference < -0.05
    behind, count = found.numbers["mask"]["behind"]
    assert count == 0 or behind < -0.6  # nearly as bad as can be: it never learnt what stands there


@pytest.mark.parametrize(("by", "name"), [(1, "taps -1"), (-1, "taps +1")])
def test_taps_one_layer_off(room, plant, by, name):
    """The description says one layer more (less), so the weights were trained on one less (more)."""
    found = probed(room, plant(shifted(by)), conversations=12)
    assert found.fits == [name], [(row.name, row.difference, row.error) for row in found.rows if row.difference > 0]
    assert found.findings[0].name == name and "layer inputs 2/15/27" in found.findings[0].cause


@pytest.fixture
def few_variants(monkeypatch):
    """Other taps and orders are searched in the tests around; long texts cost too much for that."""
    monkeypatch.setattr(
        probe,
        "variants",
        lambda *arguments: [v for v in variants(*arguments) if v.group in ("theta", "norm_output", "alignment")],
    )


def test_a_wrong_rope_base(long_room, plant, few_variants):
    found = probed(long_room, plant(theta), conversations=24, steps=3)
    assert found.fits == ["theta 100000"], [(row.name, row.difference, row.error) for row in found.rows]
    assert "trained with RoPE base 100000, the description says 10000" in found.findings[0].cause
    neighbour = next(row for row in found.rows if row.name == "theta 50000")
    assert neighbour.difference > 3 * neighbour.error  # 50000 and 10000 are told apart on text that was not trained on


def trained_on(room, network, theta, windows, steps=40):
    """The drafter goes on training with another RoPE base; four conversations a step."""
    _, target, _ = room
    spec = with_theta(network, theta).spec
    drafter, targets = build(network, spec, network.weights), described(network).targets
    unroll = Unroll(drafter, target.require("head").load().float()[targets], targets)
    optimiser = torch.optim.Adam(drafter.parameters(), 3e-4)
    for step in range(steps):
        batch = pack([windows[(4 * step + place) % len(windows)] for place in range(4)], 2)
        loss, _ = unroll(batch, loss_coefficients([len(rows.labels) for rows in batch.steps], 0.8))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    weights = {name: value.detach() for name, value in drafter.state_dict().items() if name in network.weights}
    return replace(network, weights=network.weights | weights)


def with_theta(network, theta):
    rope = network.spec.rope.model_copy(update={"theta": theta})
    return replace(network, spec=network.spec.model_copy(update={"rope": rope}))


def test_a_wrong_rope_base_of_a_drafter_that_was_trained_with_50000(long_room, plant, few_variants):
    """Sixteen of the conversations are its training text: a base is told from its neighbours by what was fitted to it."""
    spots = long_room[2]
    trained = trained_on(long_room, plant(), 50_000.0, [spot.window(smollm2_run.TAPS) for spot in spots[:16]])
    found = probed(long_room, with_theta(trained, 10_000.0), conversations=24, steps=3)
    assert found.fits == ["theta 50000"], [(row.name, row.difference, row.error) for row in found.rows]
    assert "trained with RoPE base 50000, the description says 10000" in found.findings[0].cause


def test_the_recurrence_flag_flipped(room, plant):
    found = probed(room, plant(lambda content: content.update(norm_output=True)))
    assert found.fits == ["norm_output false"]


def test_embedding_and_hidden_state_swapped(room, plant):
    found = probed(room, plant(edit=swap))
    assert found.fits == ["hidden state first"]


def test_d2t_of_absolute_ids(room, plant):
    network = plant(edit=lambda tensors: tensors["d2t"].add_(torch.arange(len(tensors["d2t"]))))
    found = probed(room, network)
    assert found.fits == ["d2t absolute"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t.__setitem__("lm_head.weight", t["lm_head.weight"].roll(1, 0)),
        lambda t: t["d2t"].add_(1),
    ],
    ids=["rows of the head moved by one", "d2t one too high"],
)
def test_where_nothing_fits_no_cause_is_invented(room, plant, edit):
    """Some variant of a ruined drafter is always a little better than it; that is no cause."""
    found = probed(room, plant(edit=edit))
    assert [finding.name for finding in found.findings] == ["no reading fits"]
    assert found.fits == [] and not found.as_described


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("midlayer.hidden_norm.weight holds ones", lambda t: t["midlayer.hidden_norm.weight"].fill_(1), "lost, or never loaded"),
        ("norm.weight missing", lambda t: t.pop("norm.weight"), "not in the files"),
        (
            "midlayer.mlp.down_proj.weight random",
            lambda t: t["midlayer.mlp.down_proj.weight"].normal_(0, 0.02),
            "spectrum of random numbers",
        ),
        (
            "midlayer.self_attn.q_proj.weight random",
            lambda t: t["midlayer.self_attn.q_proj.weight"].uniform_(-0.03, 0.03),
            "spectrum of random numbers",
        ),
    ],
)  # fmt: skip
def test_a_lost_or_untrained_tensor(plant, name, edit, words):
    network = plant(edit=edit)
    (found,) = tensor_findings(network, spectra_of(network))
    assert found.name == name and words in found.cause


def test_a_good_drafters_tensors_raise_nothing(plant):
    network = plant()
    assert tensor_findings(network, spectra_of(network)) == []


def test_a_mask_shifted_by_one(room, plant):
    """The drafter goes on training under the mask of public trainers, whose last labels lie behind the turn."""
    _, target, spots = room
    network = plant()
    after = [spot for spot in spots if any(end + 1 < len(spot.ids) for end in spot.ends)]
    drafter = build(network, network.spec, network.weights)
    targets = described(network).targets
    head = target.require("head").load().float()
    unroll = Unroll(drafter, head[targets], targets)
    batch = pack([spot.window(smollm2_run.TAPS, with_added=True) for spot in after[:6]], 1, "upstream")
    optimiser = torch.optim.Adam(drafter.parameters(), 3e-4)
    for _ in range(15):
        loss, _ = unroll(batch, [1.0 / len(batch.steps[0].labels)])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    found = taught_findings(Bench(after, head, 1), drafter.eval(), described(network))[0]
    assert [finding.name for finding in found] == ["mask shifted by one"]
    assert "first draft of each turn was not trained" in found[0].cause


@pytest.mark.parametrize("fault", ["none", "taps", "un-normed", "shifted"])
def test_states_harvested_wrongly(room, tmp_path, fault):
    config, _, spots = room
    wrong = {
        "none": lambda s: s,
        "taps": lambda s: replace(
            s, layers={tap: s.layers[min(tap + 1, 29)] for tap in s.layers if tap + 1 in s.layers} | {29: s.layers[29]}
        ),
        "un-normed": lambda s: replace(s, final=s.unnormed),
        "shifted": lambda s: replace(s, final=s.final.roll(1, 0)),
    }[fault]
    mine = config.model_copy(update={"runs": tmp_path})
    smollm2_run.write_store(mine, [wrong(spot) for spot in spots[:4]])
    found = store_findings(HarvestReader(mine.store("heldout")), spots)
    expected = {
        "none": [],
        "taps": ["entering layer 3", "entering layer 16", "entering layer 28"],
        "un-normed": ["the state before the final norm"],
        "shifted": ["that of index t-1"],
    }[fault]
    assert len(found) == len(expected)
    assert all(words in finding.cause for words, finding in zip(expected, found, strict=True))
