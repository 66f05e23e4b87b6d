"""How well a way to read a drafter's weights fits the target: its distance to the target's distribution along chains.

The score of a draft is -KL(p || (p + q) / 2) in nats: p the target's distribution, q the drafter's over its own tokens. It
lies between -log 2 and 0, so that tokens outside the draft vocabulary and hopeless positions cost a bounded amount. On
SmolLM2-135M it tells taps one layer off (28 conversations, 8,400 drafts) with 4.8 standard errors of the paired
difference, where the log-probability has 2.0 and acceptance 3.3: a few hopeless positions drown the former.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.accept.spot import Spot
from draftsmith.train.batch import Batch, StepRows, pack
from draftsmith.train.evaluate import HEAD_ROWS
from draftsmith.train.model import Drafter
from draftsmith.train.unroll import unroll_steps

BATCH_TOKENS = 2048
FLOOR = 0.01
KEPT_ELEMENTS = 1 << 27

Place = tuple[int, int, int]
"""First conversation of a batch, step, first row of a slice."""


@dataclass(frozen=True)
class Score:
    """Sums over the drafts of each conversation.

    Attributes:
        nats: (conversations, steps), sum of the score over drafts.
        logs: the same of the expected log-probability, log((1 - FLOOR) q + FLOOR / V), which a wrong sharpness cannot deceive.
        drafts: (conversations, steps), number of drafts.
        right: (conversations, steps), drafts that equal the label, given right ones before them.
    """

    nats: np.ndarray
    logs: np.ndarray
    drafts: np.ndarray
    right: np.ndarray

    @property
    def mean(self) -> float:
        """Nats a draft."""
        return float(self.nats.sum() / max(1, self.drafts.sum()))

    @property
    def acc(self) -> list[float]:
        """Share of right drafts at each step."""
        return (self.right.sum(0) / np.maximum(1, self.drafts.sum(0))).tolist()

    def against(self, other: Score, metric: str = "nats") -> tuple[float, float]:
        """Mean difference self - other of `nats`, `logs` or `right` a draft, and its standard error over conversations."""
        gained, count = (getattr(self, metric) - getattr(other, metric)).sum(1), self.drafts.sum(1)
        mean = gained.sum() / max(1, count.sum())
        spread = gained - mean * count
        units = len(count)
        error = np.sqrt((spread**2).sum() * units / max(1, units - 1)) / max(1, count.sum())
        return float(mean), float(error)


class Bench:
    """Conversations and the target's head, ready to score one way of reading after another.

    Args:
        spots: harvested with every tap that will be asked for.
        head: (V, H).
        steps: drafts a chain.
    """

    def __init__(self, spots: Sequence[Spot], head: Tensor, steps: int) -> None:
        self.spots, self.head, self.steps = spots, head.float(), steps
        self._batches: dict[tuple[tuple[int, ...], int], list[tuple[list[int], Batch]]] = {}
        self._totals: dict[int, Tensor] = {}
        self._taught: dict[tuple[bytes, int, int, int], Tensor] = {}

    @torch.no_grad()
    def score(self, drafter: Drafter, taps: tuple[int, ...], targets: Tensor, shift: int = 0) -> Score:
        """Score a drafter that reads `taps` of index t + shift and whose drafts mean `targets` int64 (D,)."""
        nats, logs, drafts, right = (np.zeros((len(self.spots), self.steps)) for _ in range(4))
        for members, batch in self._packed(taps, shift):
            teachers = teaching_rows(batch)
            total, owner = self._total(members[0], batch), owners(batch)
            for step, (rows, everywhere) in enumerate(unroll_steps(drafter, batch)):
                normed = everywhere[rows.active]
                values, plain, hits = self._measure(
                    drafter, batch, total, rows, normed, teachers[step], targets, (members[0], step)
                )
                for place, number in enumerate(members):
                    own = owner[rows.active] == place
                    nats[number, step] = float(values[own].double().sum())
                    logs[number, step] = float(plain[own].double().sum())
                    right[number, step] = float(hits[own].sum())
                    drafts[number, step] = int(own.sum())
        return Score(nats, logs, drafts, right)

    @torch.no_grad()
    def teacher_gap(self, drafter: Drafter, taps: tuple[int, ...], targets: Tensor) -> tuple[float, float]:
        """Mean KL(teacher || drafter) over the draft vocabulary at the first step: with the head's true input, and with
        the state before the target's final norm in its place."""
        rows_of_head, sums, count = self.head[targets], [0.0, 0.0], 0
        for members, batch in self._packed(taps, 0):
            teacher = teaching_rows(batch)[0]
            unnormed = torch.cat([self.spots[number].unnormed[: len(self._window(number))] for number in members])
            rows, everywhere = next(iter(unroll_steps(drafter, batch)))
            normed = everywhere[rows.active]
            log_q = drafter.lm_head(normed).float().log_softmax(-1)
            for place, states in enumerate((batch.final, unnormed)):
                log_p = (states[teacher] @ rows_of_head.T).log_softmax(-1)
                sums[place] += float((log_p.exp() * (log_p - log_q)).sum())
            count += len(rows.labels)
        return sums[0] / max(1, count), sums[1] / max(1, count)

    @torch.no_grad()
    def mask_evidence(self, drafter: Drafter, taps: tuple[int, ...], targets: Tensor) -> dict[str, tuple[float, int]]:
        """Mean score of first-step drafts, and their number: of a turn's first draft, of later ones, and of the one fed
        with a turn's last token, whose label lies behind the turn, where an aligned mask never trains."""
        found: dict[str, list[float]] = {"first": [], "later": [], "behind": []}
        for spot in self.spots:
            window = spot.window(taps, with_added=True)
            everywhere = torch.ones_like(window.generated)
            batch = pack([replace(window, generated=everywhere, turn=torch.zeros_like(window.turn))], 1)
            rows, everywhere = next(iter(unroll_steps(drafter, batch)))
            normed = everywhere[rows.active]
            values, _, _ = self._measure(
                drafter, batch, self._normaliser(batch), rows, normed, teaching_rows(batch)[0], targets
            )
            made = spot.generated.tolist()
            for t, value in zip(batch.queries[rows.active].tolist(), values.tolist(), strict=True):
                if t + 1 in spot.ends:
                    found["behind"].append(value)
                elif made[t + 1] and made[t + 2]:
                    found["later" if made[t] else "first"].append(value)
        return {name: (float(np.mean(values)) if values else 0.0, len(values)) for name, values in found.items()}

    def _measure(
        self,
        drafter: Drafter,
        batch: Batch,
        total: Tensor,
        rows: StepRows,
        normed: Tensor,
        teachers: Tensor,
        targets: Tensor,
        place: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score, expected log-probability, and whether it is right, of each draft of a step; all (n,)."""
        usable, floor = (targets >= 0) & (targets < len(self.head)), FLOOR / len(self.head)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for first in range(0, len(normed), HEAD_ROWS):
            part = slice(first, first + HEAD_ROWS)
            label, logits = rows.labels[part], drafter.lm_head(normed[part]).float()
            log_p = self._teacher(batch, total, teachers[part], targets, (*place, first) if place else None)
            p, q = log_p.exp() * usable, logits.softmax(-1)
            outside = (1 - p.sum(-1)).clamp(min=0)
            ratio = ((p + q) / 2).clamp(min=1e-30).log() - log_p
            parts.append(
                (
                    (p * ratio).sum(-1) - outside * np.log(2),
                    (p * ((1 - FLOOR) * q + floor).log()).sum(-1) + outside * np.log(floor),
                    (targets[logits.argmax(-1)] == label).float(),
                )
            )
        score, logs, right = (torch.cat(part) for part in zip(*parts, strict=True))
        return score, logs, right

    def _teacher(self, batch: Batch, total: Tensor, rows: Tensor, targets: Tensor, place: Place | None) -> Tensor:
        """log p (n, D) of the draft vocabulary at rows of a batch; kept for the next way of reading where there is room."""
        key = (targets.numpy().tobytes(), *place) if place else None
        if key is not None and key in self._taught:
            return self._taught[key]
        columns = self.head[targets.clamp(0, len(self.head) - 1)]
        log_p = batch.final[rows] @ columns.T - total[rows, None]
        if key is not None and sum(kept.numel() for kept in self._taught.values()) + log_p.numel() <= KEPT_ELEMENTS:
            self._taught[key] = log_p
        return log_p

    def _window(self, number: int) -> Tensor:
        spot = self.spots[number]
        return spot.ids[: len(spot.ids) - spot.added]

    def _packed(self, taps: tuple[int, ...], shift: int) -> list[tuple[list[int], Batch]]:
        key = taps, shift
        if key not in self._batches:
            self._batches.clear()  # the taps of one way at a time
            groups: list[list[int]] = [[]]
            for number, spot in enumerate(self.spots):
                if not bool((spot.generated[1:] & spot.generated[:-1]).any()):
                    continue
                if groups[-1] and sum(len(self._window(n)) for n in groups[-1]) + len(spot.ids) > BATCH_TOKENS:
                    groups.append([])
                groups[-1].append(number)
            self._batches[key] = [
                (members, pack([self.spots[n].window(taps, shift) for n in members], self.steps))
                for members in groups
                if members
            ]
        return self._batches[key]

    def _total(self, first: int, batch: Batch) -> Tensor:
        """log of the sum of exp of all logits, for the rows of `batch.final` that teach."""
        if first not in self._totals:
            self._totals[first] = self._normaliser(batch)
        return self._totals[first]

    def _normaliser(self, batch: Batch) -> Tensor:
        total = torch.zeros(len(batch.final))
        for rows in batch.lessons.taught.split(HEAD_ROWS):
            total[rows] = torch.logsumexp(batch.final[rows] @ self.head.T, dim=-1)
        return total


def owners(batch: Batch) -> Tensor:
    """int64 (queries,): which of the batch's windows each query belongs to."""
    counts = torch.tensor(batch.segments.query_bounds).diff()
    return torch.arange(len(counts)).repeat_interleave(counts).to(batch.queries.device)


def teaching_rows(batch: Batch) -> list[Tensor]:
    """For each step, the row of `batch.final` that teaches each of its drafts."""
    lessons = batch.lessons
    teacher = torch.empty_like(lessons.order)
    teacher[lessons.order] = lessons.taught[lessons.place]
    return list(teacher.split([len(rows.labels) for rows in batch.steps]))


def spectrum(weight: Tensor) -> float:
    """The largest singular value as a multiple of what independent random entries of the same spread would have.

    Such a (m, n) matrix has sigma (sqrt m + sqrt n), whatever the entries' distribution (Bai and Yin, 1993): about 1 for
    a matrix that nothing was learnt into, more once training has added directions to it.
    """
    rows, columns = weight.shape
    centred: Any = weight.double() - weight.double().mean()
    edge = float(centred.std()) * (rows**0.5 + columns**0.5)
    return float(torch.linalg.matrix_norm(centred, 2)) / edge if edge else 0.0
