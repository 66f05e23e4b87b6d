"""The teacher guard: before any training, the stored final states must reproduce the target's own text.

On greedy text argmax(lm_head(N[t])) must equal x[t+1] for nearly every generated position; on sampled text the mean
log-probability of x[t+1] must match what was recorded at generation, which servers record at temperature 1 (vLLM) or at
that of sampling (SGLang, unless told otherwise): the reading that fits the whole sample counts. A wrong last layer, a missing or doubled norm, a
shift or a truncated file all fail, and the guard tries the likely causes to name the one that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.configs.errors import DraftsmithError
from draftsmith.data.store import HarvestedConversation, HarvestReader

SAMPLE_POSITIONS = 4096
"""Generated positions that are checked; at an agreement of 0.97 the standard error is 0.003."""

LOGPROB_TOLERANCE = 0.05
"""Nats a token; rounding of bf16 states moves the mean by less than 0.01."""


@dataclass(frozen=True)
class TeacherReport:
    """Share of greedy positions reproduced, and mean log-probability against the recorded one on sampled text."""

    agreement: float | None
    greedy_positions: int
    logprob_gap: float | None
    sampled_positions: int


def check_teacher(
    reader: HarvestReader, head: Tensor, norm: Tensor, eps: float, threshold: float, device: torch.device | None = None
) -> TeacherReport:
    """Check a spread of conversations.

    Args:
        reader: the store.
        head: (V, H), the target's head.
        norm: (H,), weight of the target's final norm, used only to name the cause of a failure.
        eps: of that norm.
        threshold: least agreement on greedy text.
        device: where the head's products are made; none: where the head lies.

    Raises:
        DraftsmithError: below the threshold, with the agreement under the likely causes.
    """
    sample, head = _sample(reader), head.to(device or head.device).float()
    hits = positions = 0
    gap_sums, sampled = torch.zeros(2, dtype=torch.float64), 0
    for conversation in sample:
        rows = _rows(conversation)
        if conversation.greedy:
            hits += int((_choose(conversation.final[rows], head) == conversation.input_ids[rows + 1]).sum())
            positions += len(rows)
        elif conversation.mean_logprob is not None:
            readings = (1.0, conversation.temperature)
            measured = _logprobs(conversation.final[rows], head, conversation.input_ids[rows + 1], readings)
            gap_sums += (measured - conversation.mean_logprob).abs() * len(rows)
            sampled += len(rows)
    agreement = hits / positions if positions else None
    gap = float(gap_sums.min()) / sampled if sampled else None
    if agreement is None and gap is None:
        raise DraftsmithError(
            "the teacher cannot be checked: no conversation is greedy and none has a recorded log-probability",
            where=reader.path,
            mend="harvest conversations that draftsmith synthesize wrote",
        )
    if agreement is not None and agreement < threshold:
        raise DraftsmithError(
            f"the teacher guard stops this run: the stored final states reproduce {agreement:.1%} of the target's own tokens",
            where=reader.path,
            found=f"{agreement:.4f} over {positions:,} generated positions",
            expected=f"at least {threshold:.2f} (train.guard_threshold)",
            mend=_cause(sample, head, norm, eps, threshold),
        )
    if gap is not None and not gap <= LOGPROB_TOLERANCE:  # a gap that is not a number is none that fits
        raise DraftsmithError(
            "the teacher guard stops this run: the stored final states give sampled tokens another log-probability than generation recorded",
            where=reader.path,
            found=f"mean gap {gap:.3f} nats over {sampled:,} positions",
            expected=f"at most {LOGPROB_TOLERANCE}",
            mend=_cause(sample, head, norm, eps, threshold),
        )
    return TeacherReport(agreement, positions, gap, sampled)


def _sample(reader: HarvestReader) -> list[HarvestedConversation]:
    """Conversations spread evenly over the store, about SAMPLE_POSITIONS generated tokens together."""
    stride = max(1, len(reader) // 64)
    sample, positions = [], 0
    for index in range(0, len(reader), stride):
        sample.append(reader[index])
        positions += int(sample[-1].generated.sum())
        if positions >= SAMPLE_POSITIONS:
            break
    return sample


def _rows(conversation: HarvestedConversation) -> Tensor:
    """Indices t with x[t+1] generated."""
    return conversation.generated[1:].nonzero()[:, 0]


def _choose(final: Tensor, head: Tensor) -> Tensor:
    """The head's most likely token at each row of `final`, on the host."""
    parts = [(part.to(head.device).float() @ head.t()).argmax(-1).cpu() for part in final.split(512)]
    return torch.cat(parts) if len(final) else torch.empty(0)


def _logprobs(final: Tensor, head: Tensor, ids: Tensor, temperatures: Sequence[float]) -> Tensor:
    """float64 (temperatures,): mean log-probability of `ids` after the rows of `final`, on the host."""
    sums = torch.zeros(len(temperatures), dtype=torch.float64)
    for part, chosen in zip(final.split(512), ids.split(512), strict=True):
        logits, places = part.to(head.device).float() @ head.t(), chosen[:, None].to(head.device)
        sums += torch.tensor([float(torch.log_softmax(logits / t, -1).gather(1, places).sum()) for t in temperatures])
    return sums / len(ids)


def _cause(sample: list[HarvestedConversation], head: Tensor, norm: Tensor, eps: float, threshold: float) -> str:
    """Agreement under each likely fault on the first few conversations; the one that fits is named."""

    def normed(states: Tensor) -> Tensor:
        wide = states.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * norm.float()

    def agreement(change: str) -> float:
        hits = total = 0
        for conversation in sample[:8]:
            final, ids, rows = conversation.final.float(), conversation.input_ids, _rows(conversation)
            if change == "un-normed":
                final = normed(final)
            elif change == "shifted-late":
                final = final.roll(-1, 0)
            elif change == "shifted-early":
                final = final.roll(1, 0)
            rows = rows[(rows > 0) & (rows < len(ids) - 2)]
            hits += int((_choose(final[rows], head) == ids[rows + 1]).sum())
            total += len(rows)
        return hits / total if total else 0.0

    explanations = {
        "un-normed": "the states were stored before the target's final norm",
        "shifted-late": "the states are shifted: row t holds the state of t-1",
        "shifted-early": "the states are shifted: row t holds the state of t+1",
    }
    scores = {change: agreement(change) for change in explanations}
    best = max(scores, key=lambda change: scores[change])
    tried = ", ".join(f"{change} {score:.1%}" for change, score in scores.items())
    if scores[best] >= min(threshold, 0.9):
        return f"{explanations[best]} (agreement then {scores[best]:.1%}); harvest again"
    return (
        f"none of {tried} explains it: a layer other than the last, a norm applied twice, another target's head, or text that "
        "this target did not write; harvest again with this target"
    )
