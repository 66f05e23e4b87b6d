"""Networks that a drafter may have been trained as: the described one, changed in one thing at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.accept.network import Network, build
from draftsmith.configs.drafter import DrafterSpec, RopeSpec, default_taps
from draftsmith.train.model import Drafter

THETAS = (10_000.0, 50_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0)

Edit = Callable[[DrafterSpec, dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Candidate:
    """One way to read the weights.

    Attributes:
        changes: names of the variants that it has taken in; none: as described.
        taps: layer inputs that it reads. shift: it reads the features of index t + shift at t.
        spec: its description. targets: int64 (D,), target id of each draft id.
        edits: of the weights, in order.
    """

    changes: tuple[str, ...]
    taps: tuple[int, ...]
    spec: DrafterSpec
    targets: Tensor
    shift: int = 0
    edits: tuple[Edit, ...] = ()

    def module(self, network: Network) -> Drafter:
        """The drafter to run."""
        weights = dict(network.weights)
        for edit in self.edits:
            weights = edit(self.spec, weights)
        spec = (
            self.spec
            if not self.spec.fc_norm or "fc_norm.0.weight" in weights
            else self.spec.model_copy(update={"fc_norm": False})
        )
        needed = set(spec.trainable_shapes())
        drafter = build(network, spec, {name: value for name, value in weights.items() if name in needed})
        return drafter.eval()


@dataclass(frozen=True)
class Variant:
    """A change that may explain a drafter better than its description does.

    Attributes:
        name: short, for tables. cause: what it means if it fits. mend: what to do then.
        group: variants of one group exclude each other.
        change: applies it.
    """

    group: str
    name: str
    cause: str
    mend: str
    change: Callable[[Candidate], Candidate] = field(repr=False)


def described(network: Network) -> Candidate:
    """The network as its folder describes it."""
    return Candidate((), network.spec.taps, network.spec, torch.arange(len(network.d2t)) + network.d2t)


def needed_taps(network: Network) -> list[int]:
    """Every layer input that some variant reads, ascending."""
    spec = network.spec
    every = {tap + shift for tap in spec.taps for shift in (-1, 0, 1)} | set(default_taps(spec.target_num_layers))
    return sorted(tap for tap in every if 0 <= tap < spec.target_num_layers)


def variants(network: Network, target_theta: float) -> list[Variant]:
    """Every change worth trying for this network."""
    return [
        *_taps(network), *_flags(network), *_rope(network, target_theta), *_order(network), *_vocabulary(network),
        *_norms(network),
    ]  # fmt: skip


def _taps(network: Network) -> Iterator[Variant]:
    spec, layers = network.spec, network.spec.target_num_layers
    mend = "write the layer ids of those taps: draftsmith convert --ids-are layer-input, layer-output or sglang-served"
    found: dict[tuple[int, ...], str] = {}
    for shift in (-1, 1):
        found[tuple(tap + shift for tap in spec.taps)] = f"taps {shift:+d}"
    for place, tap in enumerate(spec.taps):
        for shift in (-1, 1):
            moved = (*spec.taps[:place], tap + shift, *spec.taps[place + 1 :])
            found.setdefault(moved, f"tap {tap} is {tap + shift}")
    if len(spec.taps) == 3:
        found.setdefault(default_taps(layers), "taps of the engines' default")
    for taps, name in found.items():
        ordered = list(taps) == sorted(set(taps))
        if ordered and taps[0] >= 0 and taps[-1] < layers and taps != spec.taps:
            yield Variant(
                "taps", name, f"it was trained on layer inputs {_join(taps)}, the description says {_join(spec.taps)}", mend,
                _with(taps=taps),
            )  # fmt: skip
    for shift in (-1, 1):
        yield Variant(
            "alignment",
            f"features of t{shift:+d}",
            f"it was trained with the features of index t{shift:+d} beside the token of t+1: harvest or loader was shifted",
            "harvest again, and train again: draftsmith harvest, draftsmith train",
            _with(shift=shift),
        )


def _flags(network: Network) -> Iterator[Variant]:
    spec = network.spec
    for name, meaning in (
        ("norm_output", ("the un-normed hidden state", "the normed hidden state")),
        ("norm_before_residual", ("the un-normed hidden state in the residual", "the normed one in the residual")),
    ):
        now = bool(getattr(spec, name))
        yield Variant(
            name,
            f"{name} {str(not now).lower()}",
            f"it was trained with {meaning[not now]} passed on, the description says {name}: {str(now).lower()}",
            f"set {name} to {str(not now).lower()} in config.json, or convert its checkpoint again",
            _with_spec(**{name: not now}),
        )


def _rope(network: Network, target_theta: float) -> Iterator[Variant]:
    rope = network.spec.rope
    for theta in dict.fromkeys((target_theta, *THETAS)):
        if theta == rope.theta:
            continue
        yield Variant(
            "theta", f"theta {theta:g}", f"it was trained with RoPE base {theta:g}, the description says {rope.theta:g}",
            f"draftsmith convert CHECKPOINT --rope-theta {theta:g}",
            _with_rope(theta=theta),
        )  # fmt: skip
    if rope.scaling is not None:
        yield Variant(
            "scaling", "no RoPE scaling", "it was trained without the RoPE scaling that the description has",
            "draftsmith convert CHECKPOINT --rope-scaling none", _with_rope(scaling=None),
        )  # fmt: skip


def _order(network: Network) -> Iterator[Variant]:
    again = "swap the column halves of q_proj, k_proj and v_proj, or train again"
    yield Variant(
        "concatenation",
        "hidden state first",
        "it was trained with the hidden state before the embedding; engines put the embedding first",
        again,
        _with_edit(swap_halves),
    )
    if len(network.spec.taps) > 1:
        yield Variant(
            "tap order", "taps descending", "it was trained with its taps in descending order; engines feed them ascending",
            "reverse the blocks of fc's columns, or train again",
            _with_edit(reverse_taps),
        )  # fmt: skip


def _vocabulary(network: Network) -> Iterator[Variant]:
    size, vocabulary = len(network.d2t), network.spec.vocab_size
    if size == vocabulary:
        return
    readings = {
        "d2t absolute": (network.d2t, "its d2t holds target ids; engines add it to the draft id"),
        "d2t ignored": (torch.arange(size), "it drafts the first target ids: d2t does not belong to it"),
    }
    now = torch.arange(size) + network.d2t
    for name, (ids, cause) in readings.items():
        if not torch.equal(ids, now):
            yield Variant(
                "d2t", name, cause, "draftsmith convert CHECKPOINT --d2t-is absolute" if "abs" in name else "--vocab FILE with its own d2t",
                _with(targets=ids),
            )  # fmt: skip


def _norms(network: Network) -> Iterator[Variant]:
    if network.spec.fc_norm:
        yield Variant(
            "fc_norm", "no fc_norm", "it was trained without the norms before fc", "set fc_norm to false in config.json",
            _with_spec(fc_norm=False),
        )  # fmt: skip


def swap_halves(spec: DrafterSpec, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that read [hidden, embedding] where the given ones read [embedding, hidden], and the reverse."""
    readers = ("q_a_proj", "kv_a_proj_with_mqa") if spec.mla else ("q_proj", "k_proj", "v_proj")
    changed = dict(weights)
    for name in readers:
        key = f"midlayer.self_attn.{name}.weight"
        first, second = weights[key].chunk(2, dim=1)
        changed[key] = torch.cat([second, first], dim=1)
    return changed


def reverse_taps(spec: DrafterSpec, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """fc (and the norms before it) for taps in the opposite order."""
    count, changed = len(spec.taps), dict(weights)
    changed["fc.weight"] = torch.cat(weights["fc.weight"].chunk(count, dim=1)[::-1], dim=1)
    for place in range(count):
        if f"fc_norm.{place}.weight" in weights:
            changed[f"fc_norm.{place}.weight"] = weights[f"fc_norm.{count - 1 - place}.weight"]
    if "input_norm.weight" in weights:
        changed["input_norm.weight"] = torch.cat(weights["input_norm.weight"].chunk(count)[::-1])
    return changed


Change = Callable[[Candidate], Candidate]


def _with(**fields: Any) -> Change:
    return lambda old: replace(old, **fields)


def _with_spec(**fields: Any) -> Change:
    return lambda old: replace(old, spec=old.spec.model_copy(update=fields))


def _with_rope(**fields: Any) -> Change:
    return lambda old: _with_spec(rope=RopeSpec(**(old.spec.rope.model_dump() | fields)))(old)


def _with_edit(edit: Edit) -> Change:
    return lambda old: replace(old, edits=(*old.edits, edit))


def _join(taps: tuple[int, ...]) -> str:
    return "/".join(map(str, taps))
