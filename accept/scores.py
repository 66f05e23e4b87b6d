"""How well a way to read a drafter's weights fits the target: its distance to the target's distribution along chains.

The score of a draft is -KL(p || (p + q) / 2) in nats: p the target's distribution, q the drafter's over its own tokens. It
lies between -log 2 and 0, so that tokens outside the draft vocabulary and hopeless positions cost a bounded amount. On
SmolLM2-135M it tells taps one layer off (28 conversations, 8,400 drafts) with 4.8 standard errors of the paired
difference, where the log-probability has 2.0 and acceptance 3.3: a few hopeless positions drown the former.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftsmith.accept.spot import Spot
from draftsmith.train.batch import Batch, pack
from draftsmith.train.model import Drafter
from draftsmith.train.unroll import unroll_steps

BATCH_TOKENS = 2048
FLOOR = 0.01
KEPT_ELEMENTS = 1 << 27
HEAD_ELEMENTS = 1 << 24
"""Of one product with a head over the draft vocabulary."""

TILE_ELEMENTS = 1 << 17
"""Of what is made of such a product in one go, so that it stays in a processor's cache."""


@dataclass(frozen=True)
class Drafts:
    """Drafts of one step: what the draft head reads (n, hidden), the row of `final` that teaches each, and its label."""

    normed: Tensor
    teachers: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Lesson:
    """The target's distribution at some rows.

    Attributes:
        p: (rows, D), over the draft vocabulary; 0 where a draft id means no token.
        negentropy: (rows,), sum of p log p. outside: (rows,), what falls on tokens outside the draft vocabulary.
    """

    p: Tensor
    negentropy: Tensor
    outside: Tensor


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
        self._lessons: dict[tuple[bytes, int, int], Lesson] = {}

    @torch.no_grad()
    def score(self, drafter: Drafter, taps: tuple[int, ...], targets: Tensor, shift: int = 0) -> Score:
        """Score a drafter that reads `taps` of index t + shift and whose drafts mean `targets` int64 (D,)."""
        nats, logs, drafts, right = (np.zeros((len(self.spots), self.steps)) for _ in range(4))
        for members, batch in self._packed(taps, shift):
            teachers, owner = teaching_rows(batch), owners(batch)
            steps = [
                Drafts(everywhere[rows.active], teachers[step], rows.labels)
                for step, (rows, everywhere) in enumerate(unroll_steps(drafter, batch))
            ]
            total = torch.cat([self.spots[n].total[: len(self._window(n))] for n in members])
            measured = self._measure(drafter, batch.final, total, steps, targets, members[0])
            for step, (rows, values) in enumerate(zip(batch.steps, measured, strict=True)):
                for place, number in enumerate(members):
                    own = owner[rows.active] == place
                    sums = values[:, own].double().sum(1).tolist()
                    nats[number, step], logs[number, step], right[number, step] = sums
                    drafts[number, step] = int(own.sum())
        return Score(nats, logs, drafts, right)

    @torch.no_grad()
    def teacher_gap(self, drafter: Drafter, taps: tuple[int, ...], targets: Tensor) -> tuple[float, float, float]:
        """Mean KL(teacher || drafter) over the draft vocabulary at the first step: with the head's true input, with the
        state before the target's final norm in its place, and of a drafter that gives all tokens the same probability."""
        rows_of_head, sums, count = self.head[targets], [0.0, 0.0, 0.0], 0
        for members, batch in self._packed(taps, 0):
            teacher = teaching_rows(batch)[0]
            unnormed = torch.cat([self.spots[number].unnormed[: len(self._window(number))] for number in members])
            rows, everywhere = next(iter(unroll_steps(drafter, batch)))
            normed = everywhere[rows.active]
            log_q = drafter.lm_head(normed).float().log_softmax(-1)
            for place, states in enumerate((batch.final, unnormed)):
                log_p = (states[teacher] @ rows_of_head.T).log_softmax(-1)
                sums[place] += float((log_p.exp() * (log_p - log_q)).sum())
                if place == 0:
                    sums[2] += float((log_p.exp() * (log_p + np.log(len(targets)))).sum())
            count += len(rows.labels)
        return sums[0] / max(1, count), sums[1] / max(1, count), sums[2] / max(1, count)

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
            made, sorts = spot.generated.tolist(), dict[int, str]()
            for t in batch.queries[rows.active].tolist():
                if t + 1 in spot.ends:
                    sorts[t] = "behind"
                elif made[t + 1] and made[t + 2]:
                    sorts[t] = "later" if made[t] else "first"
            asked = torch.tensor([t in sorts for t in batch.queries[rows.active].tolist()])
            one = Drafts(everywhere[rows.active][asked], teaching_rows(batch)[0][asked], rows.labels[asked])
            (measured,) = self._measure(drafter, batch.final, spot.total, [one], targets)
            for sort, value in zip(sorts.values(), measured[0].tolist(), strict=True):
                found[sort].append(value)
        return {name: (float(np.mean(values)) if values else 0.0, len(values)) for name, values in found.items()}

    def _measure(
        self,
        drafter: Drafter,
        final: Tensor,
        total: Tensor,
        steps: Sequence[Drafts],
        targets: Tensor,
        batch: int | None = None,
    ) -> list[Tensor]:
        """Score, expected log-probability, and whether it is right, of the drafts of each step: (3, n) each.

        Args:
            final, total: the rows that teach, and their log of the sum of exp of all logits.
            batch: a number of these rows, under which what they teach is kept for the next way of reading.
        """
        found = [torch.zeros(3, len(one.labels)) for one in steps]
        taught = torch.cat([one.teachers for one in steps]).unique()
        for first, rows in enumerate(taught.split(max(1, HEAD_ELEMENTS // len(targets)))):
            lesson = self._lesson(final[rows], total[rows], targets, None if batch is None else (batch, first))
            for one, values in zip(steps, found, strict=True):
                mine = ((one.teachers >= rows[0]) & (one.teachers <= rows[-1])).nonzero()[:, 0]
                if len(mine):
                    logits, place = (
                        drafter.lm_head(one.normed[mine]).float(),
                        torch.searchsorted(rows, one.teachers[mine]),
                    )
                    values[:, mine] = _compare(lesson, place, logits, targets, one.labels[mine], len(self.head))
        return found

    def _lesson(self, final: Tensor, total: Tensor, targets: Tensor, place: tuple[int, int] | None) -> Lesson:
        """What rows of the target teach about the draft vocabulary; kept under `place` where there is room."""
        key = (targets.numpy().tobytes(), *place) if place else None
        if key is not None and key in self._lessons:
            return self._lessons[key]
        log_p = final @ self.head[targets.clamp(0, len(self.head) - 1)].T - total[:, None]
        p = log_p.exp() * ((targets >= 0) & (targets < len(self.head)))
        lesson = Lesson(p, (p * log_p).sum(-1), (1 - p.sum(-1)).clamp(min=0))
        if key is not None and sum(kept.p.numel() for kept in self._lessons.values()) + p.numel() <= KEPT_ELEMENTS:
            self._lessons[key] = lesson
        return lesson

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


def _compare(lesson: Lesson, place: Tensor, logits: Tensor, targets: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
    """(3, n) of `Bench._measure` from the draft head's logits (n, D); `place` int64 (n,) says which row teaches each."""
    found, floor = torch.empty(3, len(labels)), FLOOR / vocabulary
    size = max(1, TILE_ELEMENTS // len(targets))
    for first in range(0, len(labels), size):
        part = slice(first, first + size)
        p, q = lesson.p[place[part]], logits[part].softmax(-1)
        found[0, part] = (p + q).mul_(0.5).clamp_(min=1e-30).log_().mul_(p).sum(-1)
        found[1, part] = q.mul_(1 - FLOOR).add_(floor).log_().mul_(p).sum(-1)
        found[2, part] = (targets[logits[part].argmax(-1)] == labels[part]).float()
    outside = lesson.outside[place]
    found[0] -= lesson.negentropy[place] + outside * np.log(2)
    found[1] += outside * np.log(floor)
    return found


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
    centred = weight.double() - weight.double().mean()
    edge = float(centred.std()) * (rows**0.5 + columns**0.5)
    square = centred @ centred.T if rows < columns else centred.T @ centred
    return float(torch.linalg.eigvalsh(square)[-1].clamp(min=0).sqrt()) / edge if edge else 0.0
