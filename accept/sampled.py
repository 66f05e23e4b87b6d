"""Acceptance when the target samples at a temperature, from the distributions of target and drafter along the text.

Two rules of verification, as engines have them. *Rejection* sampling (Leviathan et al., arXiv 2211.17192) accepts a draft
with probability sum_v min(p_v, q_v) and needs the drafter's distribution q at the same temperature. *Target only*, the
default of engines, drafts greedily and accepts where the target's own sample is the draft: p(argmax q). p is normalised
over the whole vocabulary, q over the draft vocabulary.

Along a chain the probabilities multiply. On text that was itself sampled at the temperature the estimate is unbiased:
a prefix x counts with the chance that it was accepted, min(1, q(x) / p(x)) or [x = argmax q]. Greedy text has no such
weights; there the acceptance of each step multiplies, which takes the text's tokens for typical ones.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from draftsmith.accept.scores import owners, teaching_rows
from draftsmith.train.batch import Batch, StepRows
from draftsmith.train.evaluate import HEAD_ROWS, resampled
from draftsmith.train.model import Drafter
from draftsmith.train.plan import WindowRef

Rule = str
RULES: tuple[Rule, ...] = ("rejection", "target_only")


class SampledAcceptance(BaseModel):
    """Expected acceptance over chains from every supervised index; position i is that of the (i+1)-th draft.

    Attributes:
        step: acceptance of one draft, given that the text before it is the target's.
        accept_per_position: P(the first i+1 drafts are accepted).
        accept_length: tokens gained per target forward with 1, 2, ... drafts, bonus token included.
        interval: 95 % bootstrap intervals of accept_length over conversations.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    step: list[float]
    accept_per_position: list[float]
    accept_length: list[float]
    interval: list[tuple[float, float]]


class Sampled(BaseModel):
    """Both rules at one temperature. `text` says how the held-out text was made: greedy, sampled or mixed."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    temperature: float
    text: str
    rejection: SampledAcceptance
    target_only: SampledAcceptance


class SampledObserver:
    """An observer of `replay` that adds up, conversation by conversation, what both rules accept.

    Args:
        drafter: the one that is replayed.
        targets: int64 (D,), target id of each draft id.
        head: (V, H), the target's head.
        greedy: of each conversation of the store, whether its text is the target's greedy answer.
        temperatures: above 0.
        draft_steps: K of the replay.
    """

    def __init__(
        self,
        drafter: Drafter,
        targets: Tensor,
        head: Tensor,
        greedy: list[bool],
        temperatures: tuple[float, ...],
        draft_steps: int,
    ) -> None:
        device = drafter.fc.weight.device
        self.drafter, self.greedy = drafter, greedy
        self.temperatures, self.draft_steps = temperatures, draft_steps
        self.targets, self.head = targets.to(device), head.to(device).float()
        self.draft_of = torch.full((drafter.spec.vocab_size,), -1, dtype=torch.int64, device=device)
        self.draft_of[self.targets] = torch.arange(len(targets), device=device)
        self.sums: dict[tuple[float, Rule], dict[int, np.ndarray]] = defaultdict(dict)
        """(temperature, rule) -> conversation -> (1 + 3K,): chains, accepted prefixes, accepted drafts, drafts made."""
        self._running: dict[tuple[float, Rule], Tensor] = {}
        self._totals: dict[float, Tensor] = {}
        self._teachers: list[Tensor] = []

    def __call__(self, group: list[WindowRef], batch: Batch, step: int, rows: StepRows, normed: Tensor) -> None:
        """Take in one step of one batch."""
        if step == 0:
            self._begin(batch)
        owner = owners(batch)
        greedy = torch.tensor([self.greedy[ref.conversation] for ref in group], device=normed.device)
        for key, (share, weight) in self._step(batch, step, rows, normed).items():
            reached = self._running.get(key, torch.ones(len(owner), device=normed.device))
            accepted = reached[rows.active] * share
            further = reached[rows.active] * torch.where(greedy[owner[rows.active]], share, weight)
            self._running[key] = torch.zeros_like(reached).index_copy_(0, rows.active, further)
            self._add(key, group, step, owner[rows.active], accepted, share)

    def _begin(self, batch: Batch) -> None:
        """The normaliser of each teaching row's full distribution, and which row teaches which draft."""
        lessons = batch.lessons
        self._teachers = teaching_rows(batch)
        self._running = {}
        self._totals = {t: batch.final.new_zeros(len(batch.final), dtype=torch.float32) for t in self.temperatures}
        for rows in lessons.taught.split(HEAD_ROWS):
            logits = batch.final[rows].float() @ self.head.T
            for temperature, total in self._totals.items():
                total[rows] = torch.logsumexp(logits / temperature, dim=-1)

    def _step(
        self, batch: Batch, step: int, rows: StepRows, normed: Tensor
    ) -> dict[tuple[float, Rule], tuple[Tensor, Tensor]]:
        """For each temperature and rule: acceptance (n,), and the weight (n,) of going on behind the text's own token."""
        parts: dict[tuple[float, Rule], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        chunks = zip(
            normed.split(HEAD_ROWS), self._teachers[step].split(HEAD_ROWS), rows.labels.split(HEAD_ROWS), strict=True
        )
        for state, teacher, label in chunks:
            drafted = self.drafter.lm_head(state).float()
            wanted = batch.final[teacher].float() @ self.head[self.targets].T
            best, place = drafted.argmax(-1), self.draft_of[label]
            inside = (place >= 0).float()
            place = place.clamp(min=0)[:, None]
            for temperature in self.temperatures:
                log_q = torch.log_softmax(drafted / temperature, dim=-1)
                log_p = wanted / temperature - self._totals[temperature][teacher, None]
                both = torch.minimum(log_p, log_q).exp().sum(-1)
                odds = (log_q.gather(1, place) - log_p.gather(1, place)).exp().clamp(max=1)[:, 0] * inside
                parts[temperature, "rejection"].append((both, odds))
                sure = log_p.gather(1, best[:, None]).exp()[:, 0]
                parts[temperature, "target_only"].append((sure, (self.targets[best] == label).float()))
        return {key: tuple(map(torch.cat, zip(*pieces, strict=True))) for key, pieces in parts.items()}  # type: ignore[misc]

    def _add(
        self,
        key: tuple[float, Rule],
        group: list[WindowRef],
        step: int,
        owner: Tensor,
        accepted: Tensor,
        share: Tensor,
    ) -> None:
        depth = self.draft_steps

        def by_conversation(values: Tensor) -> list[float]:
            sums = torch.zeros(len(group), dtype=torch.float64, device=values.device)
            return sums.index_add_(0, owner, values.double()).tolist()

        made_of = by_conversation(torch.ones_like(share))
        rows = zip(group, by_conversation(accepted), by_conversation(share), made_of, strict=True)
        for ref, gained, single, made in rows:
            sums = self.sums[key].setdefault(ref.conversation, np.zeros(1 + 3 * depth))
            sums[0] += made if step == 0 else 0
            sums[1 + step] += gained
            sums[1 + depth + step] += single
            sums[1 + 2 * depth + step] += made

    def result(self) -> list[Sampled]:
        """The figures of every temperature."""
        seen = {self.greedy[number] for number in next(iter(self.sums.values()))}
        text = "mixed" if len(seen) > 1 else "greedy" if True in seen else "sampled"
        return [
            Sampled(
                temperature=temperature,
                text=text,
                **{rule: self._acceptance(self.sums[temperature, rule]) for rule in RULES},
            )
            for temperature in self.temperatures
        ]

    def _acceptance(self, sums: dict[int, np.ndarray]) -> SampledAcceptance:
        depth, per = self.draft_steps, np.array(list(sums.values()))
        chains, accepted, single, made = np.split(per.sum(0), [1, 1 + depth, 1 + 2 * depth])
        shares = accepted / chains
        low, high = resampled(per, lambda draws: 1 + (draws[:, 1 : 1 + depth] / draws[:, :1]).cumsum(1))
        return SampledAcceptance(
            step=(single / np.maximum(made, 1)).tolist(),
            accept_per_position=shares.tolist(),
            accept_length=(1 + shares.cumsum()).tolist(),
            interval=list(zip(low, high, strict=True)),
        )
