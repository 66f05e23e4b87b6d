"""Accept length predicted before any launch: greedy chains replayed on held-out conversations.

Two views, never mixed. *As served* walks each turn as an engine does: a chain starts, a drafts are accepted, the target
adds one token, the next chain starts a + 1 tokens on; this is what engines' counters report. *All positions* starts a
chain at every index, which is what training supervises; it is higher, since a walk skips the stretches that it
accepts. Both count the bonus token: accept_length@K = 1 + sum_i accept_i, at most K + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from draftsmith.configs.console import meter
from draftsmith.configs.errors import DraftsmithError
from draftsmith.data.store import HarvestReader
from draftsmith.train.batch import Batch, StepRows, pack
from draftsmith.train.model import Drafter
from draftsmith.train.plan import WindowRef, deal, load_window, plan_windows
from draftsmith.train.unroll import unroll_steps

CONTEXT_EDGES = (0, 1024, 4096, 16384, 65536, 262144)
"""Edges of the context-length buckets, in tokens before the chain's start."""

CONTEXT_BUCKETS = tuple(
    (low, high, f"{low}-{high}" if high else f"{low}+")
    for low, high in zip(CONTEXT_EDGES, (*CONTEXT_EDGES[1:], None), strict=True)
)
"""(lowest, end or None, name) of each."""

HEAD_ROWS = 1024
"""Rows whose logits exist at one time."""

RESAMPLES = 1000
"""Bootstrap samples, drawn over conversations, behind a confidence interval."""


class Acceptance(BaseModel):
    """Acceptance over a set of chains.

    Attributes:
        accept_length: tokens gained per target forward, bonus token included.
        accept_per_position: P(the first i+1 drafts are all right), one value a draft position.
        interval: 95 % bootstrap interval of accept_length over conversations; None for a single conversation.
        position_intervals: the same of each accept_per_position.
        conversations: number of conversations with a chain.
        chains: number of chains, which is the number of the target's verifying forward passes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    accept_length: float
    accept_per_position: list[float]
    interval: tuple[float, float] | None
    position_intervals: list[tuple[float, float]] | None
    conversations: int
    chains: int


class Evaluation(BaseModel):
    """What `draftsmith evaluate` measures; K is `draft_steps`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    draft_steps: int
    conversations: int
    as_served: Acceptance
    all_positions: Acceptance
    acc: list[float]
    outside_share: float
    by_context: dict[str, Acceptance]
    by_category: dict[str, Acceptance]


@dataclass(frozen=True)
class Chains:
    """Chains of one conversation, in order of their start.

    Attributes:
        starts: int64 (n,), index t within the conversation.
        accepted: int64 (n,), leading drafts that are right, 0..K.
        right: int64 (K,), drafts that are right at each position given right tokens before them.
        supervised: int64 (K,), drafts made at each position.
        outside: chains whose first label is outside the draft vocabulary.
    """

    starts: np.ndarray
    accepted: np.ndarray
    right: np.ndarray
    supervised: np.ndarray
    outside: int

    def capped(self, draft_steps: int) -> Chains:
        """The same chains drafted `draft_steps` tokens deep, at most as deep as they were replayed."""
        return replace(
            self,
            accepted=np.minimum(self.accepted, draft_steps),
            right=self.right[:draft_steps],
            supervised=self.supervised[:draft_steps],
        )


Observer = Callable[[list[WindowRef], Batch, int, StepRows, Tensor], None]
"""Sees every step of every batch: the batch's windows, the batch, the step's number, its rows, and what the head reads."""


@torch.no_grad()
def draft_chains(
    drafter: Drafter, targets: Tensor, batch: Batch, observe: Callable[[int, StepRows, Tensor], None] | None = None
) -> list[Tensor]:
    """For each step of `batch`, bool (n_i,): the draft at that step is right, given right tokens before it."""
    right = []
    for step, (rows, everywhere) in enumerate(unroll_steps(drafter, batch)):
        normed = everywhere[rows.active]
        if observe is not None:
            observe(step, rows, normed)
        best = torch.cat([drafter.lm_head(part).argmax(-1) for part in normed.split(HEAD_ROWS)])
        right.append(targets[best] == rows.labels)
    return right


def replay(
    drafter: Drafter,
    targets: Tensor,
    reader: HarvestReader,
    draft_steps: int,
    batch_tokens: int,
    *,
    share: tuple[int, int] = (0, 1),
    observe: Observer | None = None,
    quiet: bool = False,
) -> dict[int, Chains]:
    """Chains from every supervised index of every conversation of a store, keyed by the conversation's number.

    Args:
        targets: int64 (D,), target id of each draft id.
        observe: called with every step of every batch, for figures beyond right and wrong.
        share: (number of this process, number of processes): the conversations are dealt out by length, and this
            process replays its own only.
    """
    if not reader.lengths:
        raise DraftsmithError(
            "the store has no conversations to evaluate on", where=reader.path, found="0 conversations",
            mend="harvest conversations into it, or name another store",
        )  # fmt: skip
    device = drafter.fc.weight.device
    inside = torch.zeros(drafter.spec.vocab_size, dtype=torch.bool, device=device)
    inside[targets.to(device)] = True
    for name, parameter in drafter.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise DraftsmithError("a weight of the drafter is not finite", where=name)
    longest = max(reader.lengths)
    windows = deal(plan_windows(reader, longest, draft_steps, "aligned"), share[1])[share[0]]
    found: dict[int, Chains] = {}
    with meter("evaluate", sum(w.tokens for w in windows), "tokens", quiet=quiet) as progress:
        for group in by_budget(windows, batch_tokens) if windows else []:
            windows_read = [load_window(reader, ref, draft_steps) for ref in group]
            for ref, window in zip(group, windows_read, strict=True):
                if not bool(torch.isfinite(window.taps).all()):
                    raise DraftsmithError(
                        "a conversation's hidden states are not finite", where=reader.path, found=reader.ids[ref.conversation],
                        mend=f"draftsmith store check {reader.path}; then harvest it again",
                    )  # fmt: skip
            table = None if device.type == "cpu" else drafter.embedding
            batch = pack(windows_read, draft_steps, embedding=table).to(device)
            watch = None if observe is None else partial(observe, group, batch)
            right = draft_chains(drafter, targets.to(device), batch, watch)
            _collect(group, batch, right, inside, draft_steps, found)
            progress.advance(sum(w.tokens for w in group))
    return found


def summarize(chains: dict[int, Chains], draft_steps: int, categories: dict[int, str] | None = None) -> Evaluation:
    """Turn chains into the figures of `Evaluation`; `categories` names each conversation's prompt category."""
    walked = {number: walk(chain) for number, chain in chains.items()}
    everything = {number: chain.accepted for number, chain in chains.items()}
    on_walk = {number: chains[number].accepted[steps] for number, steps in walked.items()}
    by_context: dict[str, Acceptance] = {}
    for low, high, label in CONTEXT_BUCKETS:
        part = {}
        for number, steps in walked.items():
            starts = chains[number].starts[steps]
            chosen = on_walk[number][(starts >= low) & (starts < (high or starts.max(initial=0) + 1))]
            if len(chosen):
                part[number] = chosen
        if part:
            by_context[label] = _acceptance(part, draft_steps)
    by_category: dict[str, Acceptance] = {}
    for name in sorted(set((categories or {}).values())):
        members = {number: on_walk[number] for number in on_walk if (categories or {}).get(number) == name}
        if members:
            by_category[name] = _acceptance(members, draft_steps)
    made = np.sum([chain.supervised for chain in chains.values()], axis=0)
    right = np.sum([chain.right for chain in chains.values()], axis=0)
    return Evaluation(
        draft_steps=draft_steps,
        conversations=len(chains),
        as_served=_acceptance(on_walk, draft_steps),
        all_positions=_acceptance(everything, draft_steps),
        acc=[float(r) / float(m) if m else 0.0 for r, m in zip(right, made, strict=True)],
        outside_share=sum(chain.outside for chain in chains.values())
        / max(1, sum(len(c.starts) for c in chains.values())),
        by_context=by_context,
        by_category=by_category,
    )


def walk(chains: Chains) -> np.ndarray:
    """Indices into `chains.starts` at which an engine would start a chain.

    A turn begins with the target's own first token, so its first chain starts at its first supervised index; after a
    accepted drafts and the bonus token the next chain starts a + 1 indices on. A new run of consecutive starts is a
    new turn.
    """
    visited, next_start, previous = [], -1, -2
    for place, start in enumerate(chains.starts):
        if start != previous + 1:
            next_start = start
        previous = start
        if start == next_start:
            visited.append(place)
            next_start = start + int(chains.accepted[place]) + 1
    return np.array(visited, dtype=np.int64)


def by_budget(windows: list[WindowRef], batch_tokens: int) -> list[list[WindowRef]]:
    """Batches of windows, the shortest first, of at most `batch_tokens` tokens or one window."""
    groups: list[list[WindowRef]] = [[]]
    for window in sorted(windows, key=lambda w: (w.tokens, w.conversation)):
        if groups[-1] and sum(w.tokens for w in groups[-1]) + window.tokens > batch_tokens:
            groups.append([])
        groups[-1].append(window)
    return groups


def _collect(
    group: list[WindowRef],
    batch: Batch,
    right: list[Tensor],
    inside: Tensor,
    draft_steps: int,
    found: dict[int, Chains],
) -> None:
    """Split a batch's answers into conversations."""
    first, bounds = batch.steps[0], batch.segments.query_bounds
    alive = right[0]
    accepted = alive.long()
    for step in range(1, len(right)):
        active = batch.steps[step].active
        chain = alive[active] & right[step]
        alive = torch.zeros_like(alive).index_copy_(0, active, chain)
        accepted += alive.long()
    starts = first.positions[batch.queries].cpu().numpy()
    outside = (~inside[first.labels]).cpu().numpy()
    counts = accepted.cpu().numpy()
    hits = [r.cpu().numpy() for r in right]
    owners = [step.active.cpu().numpy() for step in batch.steps]
    for place, ref in enumerate(group):
        rows = slice(bounds[place], bounds[place + 1])
        hit, made = np.zeros(draft_steps, dtype=np.int64), np.zeros(draft_steps, dtype=np.int64)
        for step, owner in enumerate(owners):
            own = slice(*np.searchsorted(owner, [rows.start, rows.stop]))
            hit[step], made[step] = hits[step][own].sum(), own.stop - own.start
        found[ref.conversation] = Chains(starts[rows], counts[rows], hit, made, int(outside[rows].sum()))


def _acceptance(accepted: dict[int, np.ndarray], draft_steps: int) -> Acceptance:
    """Figures over the chains of several conversations (number -> accepted drafts of each chain)."""
    per = np.array(
        [[len(a), *((a > i).sum() for i in range(draft_steps))] for a in accepted.values()], dtype=np.float64
    )
    total = per.sum(0)
    share = total[1:] / total[0]
    low, high = resampled(
        per, lambda sums: np.column_stack([1 + sums[:, 1:].sum(1) / sums[:, 0], sums[:, 1:] / sums[:, :1]])
    )
    return Acceptance(
        accept_length=float(1 + share.sum()),
        accept_per_position=[float(value) for value in share],
        interval=(low[0], high[0]) if len(per) > 1 else None,
        position_intervals=list(zip(low[1:], high[1:], strict=True)) if len(per) > 1 else None,
        conversations=len(per),
        chains=int(total[0]),
    )


def resampled(sums: np.ndarray, figures: Callable[[np.ndarray], np.ndarray]) -> tuple[list[float], list[float]]:
    """Lower and upper ends of 95 % bootstrap intervals, conversations being drawn with replacement.

    Args:
        sums: (conversations, n), what each conversation adds to n sums.
        figures: from sums (draws, n) to figures (draws, m).
    """
    count = len(sums)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    low, high = np.quantile(figures(draws.astype(np.float64) @ sums), [0.025, 0.975], axis=0)
    return low.tolist(), high.tolist()
