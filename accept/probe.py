"""`draftsmith probe`: which taps, alignment, norms, RoPE and draft vocabulary was this drafter trained with?

A few held-out conversations are harvested on the spot with the layers around every tap. The described network and every
variant of it score the same drafts; variants that are clearly worse drop out early. A variant that is clearly better is
taken in, and the search goes on from there. Faults that no description explains are looked for in the tensors (missing,
norms of ones, matrices without structure), in what stands behind a turn's end, and in the distribution that was taught.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from draftsmith.accept.network import Network, read_network
from draftsmith.accept.overlap import trained_on, warn_of_trained
from draftsmith.accept.scores import Bench, Score, spectrum
from draftsmith.accept.spot import Spot, harvest_spot
from draftsmith.accept.store_states import Finding, store_findings
from draftsmith.accept.variants import Candidate, Variant, described, needed_taps, variants
from draftsmith.configs.console import closing, console, meter, out, table
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import write_json
from draftsmith.configs.schema import RunConfig
from draftsmith.configs.target import Target, read_target
from draftsmith.data.store import HarvestReader

CLEAR = 3.0
"""Standard errors (over conversations) from which a difference counts."""

SURE = 4.0
"""Standard errors from which a variant is given up before every conversation was read."""

SMALL = 0.0005
"""Nats a draft below which a better variant is not worth naming, however sure."""

FIRST = 6
"""Conversations of the first heat; each later heat doubles what was read."""

ROUNDS = 3

STRUCTURELESS = 1.1
"""`spectrum` of a matrix below which nothing was learnt into it; random ones give 0.97 to 1.02."""

GUESSED = 0.05
"""Share of right first drafts that the commonest token would reach."""

FEW_BEHIND = 3
"""Drafts behind the end of a turn from which the mask can be judged."""


class Row(BaseModel):
    """One way of reading, in nats a draft better (above 0) than the way it was tried on; error over conversations."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    round: int
    name: str
    difference: float
    error: float
    acc: list[float]
    drafts: int


class Probe(BaseModel):
    """What a probe says.

    Attributes:
        as_described: no reading fits clearly better than the folder's description, and nothing else was found.
        fits: names of the variants that fit; none: the description.
        alike: names that this many drafts cannot tell from what fits.
        findings: everything found, the likely cause first.
        rows: every score. numbers: the measures behind findings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    drafter: str
    description: dict[str, Any]
    conversations: int
    drafts: int
    as_described: bool
    fits: list[str]
    alike: list[str]
    findings: list[Finding]
    rows: list[Row]
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Heat:
    """A round's outcome: who leads, who cannot be told from it, and all scores."""

    leader: str
    alike: list[str]
    scores: dict[str, Score]


def probe(
    config: RunConfig,
    drafter: Path,
    *,
    store: Path | None = None,
    conversations: int = 48,
    steps: int = 3,
    longest: int = 1024,
    as_json: bool = False,
) -> Probe:
    """Probe a drafter and write `probe-DRAFTER.json` into the run's folder.

    Args:
        drafter: a converted folder, read by its config.json, or a training checkpoint.
        store: also compare this store's states with the target's; default: the run's held-out one, if it is there.
        conversations: at most so many held-out ones; longest: each cut to so many tokens.
    """
    target = read_target(config.target.path)
    network = read_network(drafter, target)
    console.print(
        f"probe: harvesting up to {conversations} conversations around taps {list(network.spec.taps)}", highlight=False
    )
    spots = harvest_spot(config, needed_taps(network), conversations, longest)
    if len(spots) < 2:
        raise DraftsmithError(
            "one conversation tells no difference from chance", where=config.conversations("heldout"),
            found=len(spots), expected="two at least, better twenty", mend="draftsmith probe ... --limit 24",
        )  # fmt: skip
    trained = trained_on(config, {spot.id: spot.prompt for spot in spots})
    warn_of_trained(trained)
    place = store or (config.store("heldout") if (config.store("heldout") / "manifest.json").is_file() else None)
    findings = store_findings(HarvestReader(place), spots) if place else []
    found = judge(str(drafter), network, target, spots, steps, findings)
    found = found.model_copy(update={"numbers": found.numbers | {"trained_on": trained}})
    result = config.folder / f"probe-{drafter.resolve().name}.json"
    write_json(result, found.model_dump(mode="json"))
    if as_json:
        out.print_json(data=found.model_dump(mode="json"))
    else:
        show(found)
    closing(str(result))
    return found


def judge(
    name: str,
    network: Network,
    target: Target,
    spots: Sequence[Spot],
    steps: int,
    findings: Sequence[Finding] = (),
) -> Probe:
    """Score every variant on harvested conversations and say what fits."""
    head = target.require("head").load().float()
    current, taken, rows, alike = described(network), list[Variant](), list[Row](), list[str]()
    spectra = spectra_of(network)
    tensors = tensor_findings(network, spectra)
    whole, benches = Bench(spots, head, steps), heats(spots, head, steps)
    for number in range(1, ROUNDS + 1):
        choices = [v for v in variants(network, target.rope.theta) if v.group not in {t.group for t in taken}]
        candidates = {
            "": current,
            **{v.name: replace(v.change(current), changes=(*current.changes, v.name)) for v in choices},
        }
        heat = race(candidates, network, benches, {v.name: v.group for v in choices})
        rows += _rows(number, heat)
        right = heat.scores[""].acc[0]
        alike = heat.alike
        if not heat.leader:
            break
        gained, error = heat.scores[heat.leader].against(_same(heat.scores[""], heat.scores[heat.leader]))
        if gained < max(SMALL, CLEAR * error):
            alike = [name for name in (heat.leader, *heat.alike) if name]
            break
        current, right = candidates[heat.leader], heat.scores[heat.leader].acc[0]
        taken.append(next(v for v in choices if v.name == heat.leader))
        if tensors:  # a broken tensor bends every comparison; one round shows the numbers
            break
    gains = {row.name: row for row in rows}
    causes = [
        Finding(
            name=v.name, cause=v.cause, mend=v.mend,
            number=f"{gains[v.name].difference:+.3f} +- {gains[v.name].error:.3f} nats a draft",
        )
        for v in taken
    ]  # fmt: skip
    drafter = current.module(network)
    numbers: dict[str, Any] = {"spectrum": spectra}
    others, measured = taught_findings(whole, drafter, current)
    numbers |= measured
    lost = None if tensors else _nothing_fits(right, None if others else measured.get("teacher_kl"))
    if lost is not None:
        taken, causes, others, alike = [], [lost], [], []
    everything = [*findings, *tensors, *causes, *others]
    base = next(row for row in rows if row.name == "")
    return Probe(
        drafter=name,
        description={
            "taps": list(network.spec.taps), "rope_theta": network.spec.rope.theta, "rope_scaling": network.spec.rope.scaling,
            "norm_output": network.spec.norm_output, "norm_before_residual": network.spec.norm_before_residual,
            "fc_norm": network.spec.fc_norm, "draft_vocab_size": network.spec.draft_vocab_size,
        },
        conversations=len(spots),
        drafts=base.drafts,
        as_described=not everything,
        fits=[v.name for v in taken],
        alike=alike,
        findings=everything,
        rows=rows,
        numbers=numbers,
    )  # fmt: skip


def _nothing_fits(right: float, gaps: dict[str, float] | None) -> Finding | None:
    """The best reading drafts no better than a guess: what made it a little better says nothing of its training."""
    worse = gaps is not None and gaps["normed"] > gaps["uniform"]
    if right >= GUESSED and not worse:
        return None
    number = f"{right:.1%} of first drafts right at best"
    if gaps is not None:
        number += (
            f", {gaps['normed']:.2f} nats from the target where equal probabilities are {gaps['uniform']:.2f} away"
        )
    return Finding(
        name="no reading fits", number=number,
        cause="read in no way does it draft what this target says: its rows or blocks are in another order, tensors were exchanged "
        "or damaged, or it was trained for another target",
        mend="draftsmith verify DRAFTER --target TARGET --deep; convert the checkpoint again; is it this target's?",
    )  # fmt: skip


def heats(spots: Sequence[Spot], head: torch.Tensor, steps: int) -> list[Bench]:
    """The conversations in parts: a first few, then as many again each time, so that bad ways drop out early."""
    benches, first, size = [], 0, FIRST
    while first < len(spots):
        benches.append(Bench(spots[first : first + size], head, steps))
        first, size = first + size, first + size
    return benches


def race(candidates: dict[str, Candidate], network: Network, benches: Sequence[Bench], groups: dict[str, str]) -> Heat:
    """Score candidates on more and more conversations, giving up those that are clearly behind the leader.

    "" is the one that the others are variants of; it always stays. Of a group's members that cannot be told from its
    best one, the first in the order of `candidates` leads.
    """
    alive, scores = list(candidates), dict[str, Score]()
    with meter("probe", len(candidates) * sum(len(bench.spots) for bench in benches), "scores") as progress:
        for bench in benches:
            for name in sorted(alive, key=lambda n: (candidates[n].taps, candidates[n].shift)):
                one = candidates[name]
                part = bench.score(one.module(network), one.taps, one.targets, one.shift)
                scores[name] = _joined(scores[name], part) if name in scores else part
                progress.advance(len(bench.spots), name)
            leader = _leader(alive, scores)
            alive = [n for n in alive if n in ("", leader) or not _behind(scores[leader], scores[n], SURE)]
    leader = _leader(alive, scores)
    near = [n for n in alive if n == leader or not _behind(scores[leader], scores[n], 2.0)]
    if "" in near:
        return Heat("", [n for n in near if n], scores)
    same = [n for n in near if groups.get(n) == groups.get(leader)]
    return Heat(same[0], [n for n in near if n != same[0]], scores)


def _leader(alive: Sequence[str], scores: dict[str, Score]) -> str:
    """The nearest to the target; not one that is clearly worse in another measure than the way it is a variant of."""
    sound = [n for n in alive if not n or not _behind(scores[""], scores[n], CLEAR, ("logs", "right"))]
    return max(sound, key=lambda n: scores[n].mean)


def spectra_of(network: Network) -> dict[str, float]:
    """`spectrum` of every matrix."""
    return {name: spectrum(weight) for name, weight in network.weights.items() if weight.dim() == 2}


def tensor_findings(network: Network, spectra: dict[str, float]) -> list[Finding]:
    """Tensors that are missing, norms that hold nothing but ones, matrices in which nothing was learnt."""
    found = [
        Finding(
            name=f"{name} missing", cause=f"{name} is not in the files; engines leave it as it was made, without a word",
            number="no such tensor", mend="convert the checkpoint again: draftsmith convert",
        )
        for name in network.missing
    ]  # fmt: skip
    norms = {name: w for name, w in network.weights.items() if w.dim() == 1 and name not in network.missing}
    ones = [name for name, w in norms.items() if bool((w == 1).all())]
    if len(ones) < len(norms):  # a drafter that was never trained has ones everywhere
        found += [
            Finding(
                name=f"{name} holds ones", cause=f"{name} holds nothing but ones while other norms were trained: it was lost, or never loaded",
                number=f"all {len(network.weights[name])} values are 1", mend="convert the checkpoint again: draftsmith convert",
            )
            for name in ones
        ]  # fmt: skip
    for name, share in spectra.items():
        if name not in network.missing and share < STRUCTURELESS:
            found.append(
                Finding(
                    name=f"{name} random",
                    cause=f"{name} has the spectrum of random numbers: it was lost, or never trained",
                    number=f"largest singular value {share:.2f} of what random entries give; at least {STRUCTURELESS} expected",
                    mend="convert the checkpoint again, or train longer",
                )
            )
    return found


def taught_findings(bench: Bench, drafter: Any, current: Candidate) -> tuple[list[Finding], dict[str, Any]]:
    """The mask and the teacher, judged by what the drafter does."""
    found, targets = [], current.targets
    usable = bool(((targets >= 0) & (targets < len(bench.head))).all())
    if not usable:
        return [], {}
    normed, unnormed, uniform = bench.teacher_gap(drafter, current.taps, targets)
    if unnormed < normed:
        found.append(
            Finding(
                name="un-normed teacher",
                number=f"KL {unnormed:.3f} nats to the un-normed states' distribution, {normed:.3f} to the target's",
                cause="it was taught from final states without the target's final norm",
                mend="harvest again with the final states after the norm, and train again",
            )
        )
    mask = bench.mask_evidence(drafter, current.taps, targets)
    behind, later = mask["behind"], mask["later"]
    if (
        behind[1] >= FEW_BEHIND and behind[0] > (later[0] - math.log(2)) / 2
    ):  # nearer to trained drafts than to the worst
        found.append(
            Finding(
                name="mask shifted by one",
                number=f"{behind[0]:.2f} nats for the draft behind a turn's end, {later[0]:.2f} within turns, -0.69 at worst ({behind[1]} drafts)",
                cause="it has learnt what stands behind the end of a turn: its loss mask was shifted against the labels, so that the first draft of each turn was not trained",
                mend="train again with train.mask=aligned",
            )
        )
    return found, {"teacher_kl": {"normed": normed, "unnormed": unnormed, "uniform": uniform}, "mask": mask}


def show(found: Probe) -> None:
    """Tables and the verdict."""
    for number in sorted({row.round for row in found.rows}):
        mine = sorted((row for row in found.rows if row.round == number), key=lambda row: -row.difference)
        base = next(row for row in mine if row.name == "")
        rows = [
            [
                row.name or ("as described" if number == 1 else "with what was found"),
                f"{row.difference:+.4f}" if row.name else "0", f"{row.error:.4f}" if row.name else "",
                f"{row.difference / row.error:+.1f}" if row.error else "", f"{row.acc[0]:.3f}", f"{row.drafts:,}",
            ]
            for row in mine
        ]  # fmt: skip
        columns = ["read as", "nats a draft", "error", "in errors", "acc_0", "drafts read"]
        out.print(table(f"round {number}, {base.drafts:,} drafts: better than the described network by", columns, rows))
    if found.as_described:
        out.print("the description fits: nothing else explains the weights better", style="green", highlight=False)
    for finding in found.findings:
        out.print(f"{finding.name}: {finding.cause} ({finding.number})", style="red", highlight=False, markup=False)
        out.print(f"  mend: {finding.mend}", highlight=False, markup=False)
    if found.alike:
        console.print(f"  cannot be told apart from it here: {', '.join(found.alike)}", highlight=False, markup=False)


def _rows(number: int, heat: Heat) -> list[Row]:
    rows = []
    for name, score in heat.scores.items():
        difference, error = score.against(_same(heat.scores[""], score))
        rows.append(
            Row(
                round=number, name=name, difference=difference if name else 0.0, error=error if name else 0.0,
                acc=score.acc, drafts=int(score.drafts.sum()),
            )
        )  # fmt: skip
    return rows


def _behind(leader: Score, other: Score, errors: float, metrics: Sequence[str] = ("nats", "logs", "right")) -> bool:
    """Whether `other` is behind by so many standard errors in any of the measures, where both were scored."""
    differences = [_same(leader, other).against(other, metric) for metric in metrics]
    return any(difference > max(0.0, errors * error) for difference, error in differences)


def _same(longer: Score, shorter: Score) -> Score:
    count = len(shorter.nats)
    return Score(longer.nats[:count], longer.logs[:count], longer.drafts[:count], longer.right[:count])


def _joined(one: Score, other: Score) -> Score:
    return Score(*(np.concatenate([getattr(one, n), getattr(other, n)]) for n in ("nats", "logs", "drafts", "right")))
