"""The target's states of a few conversations, harvested on the spot: any layers, and the final state before its norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.conversations import Conversation, read_conversations
from draftsmith.data.harvest import forward_states, plan_batches
from draftsmith.data.target_model import load_target
from draftsmith.train.batch import Window, turns

BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Spot:
    """One conversation's states in float32, and what followed its turns.

    Attributes:
        ids: int64 (T,). generated: bool (T,).
        layers: tap -> (T, H), the residual stream entering that layer.
        final: (T, H), the input of the head. unnormed: (T, H), the input of the final norm.
        greedy: the text is the target's greedy answer.
        added: tokens at the end that are not the conversation's own, but what stands behind a turn elsewhere.
    """

    id: str
    ids: Tensor
    generated: Tensor
    layers: dict[int, Tensor]
    final: Tensor
    unnormed: Tensor
    argmax: Tensor
    greedy: bool
    added: int

    def window(self, taps: Sequence[int], shift: int = 0, *, with_added: bool = False) -> Window:
        """The rows as training would see them; `shift` feeds the features of index t + shift at t."""
        length = len(self.ids) if with_added else len(self.ids) - self.added
        rows = (torch.arange(length) + shift).clamp(0, length - 1)
        return Window(
            ids=self.ids[:length],
            generated=self.generated[:length],
            turn=torch.from_numpy(turns(self.generated[:length].numpy())),
            taps=torch.stack([self.layers[tap][rows] for tap in taps], dim=1),
            final=self.final[:length],
            argmax=self.argmax[:length],
            start=0,
            stop=length,
            greedy=self.greedy,
        )


def harvest_spot(config: RunConfig, taps: Sequence[int], limit: int, longest: int) -> list[Spot]:
    """Run the target in float32 over the first `limit` held-out conversations, each cut to `longest` tokens.

    Raises:
        DraftsmithError: there are no conversations.
    """
    chosen: list[Conversation] = []
    for conversation in read_conversations(config.conversations("heldout")):
        chosen.append(conversation)
        if len(chosen) == limit:
            break
    if not chosen:
        raise DraftsmithError(
            "there is no held-out conversation to probe with", where=config.conversations("heldout"),
            mend="draftsmith synthesize CONFIG --split heldout",
        )  # fmt: skip
    behind = _behind_a_turn(chosen)
    rows, added = [], []
    for conversation in chosen:
        ids = list(conversation.input_ids[:longest])
        whole = len(ids) == len(conversation.input_ids) and conversation.spans[-1][1] == len(ids)
        extra = behind if whole and conversation.finish[-1] == "stop" else []
        rows.append(ids + extra)
        added.append(len(extra))
    target = load_target(config.target, "float32")
    unnormed: list[Tensor] = []
    handle = target.norm.register_forward_pre_hook(lambda module, inputs: unnormed.append(inputs[0].cpu()))
    found: dict[int, Spot] = {}
    try:
        for batch in plan_batches([len(row) for row in rows], BATCH_TOKENS):
            unnormed.clear()
            states = forward_states(target, [rows[index] for index in batch], taps)
            for place, (index, (tapped, final, argmax)) in enumerate(zip(batch, states, strict=True)):
                length, mask = len(rows[index]), torch.zeros(len(rows[index]), dtype=torch.bool)
                own = chosen[index].generated_mask()[:length]
                mask[: len(own)] = own
                found[index] = Spot(
                    chosen[index].id, torch.tensor(rows[index]), mask,
                    {tap: tapped[:, k].float() for k, tap in enumerate(taps)},
                    final.float(), unnormed[0][place, :length].float(), argmax, chosen[index].greedy, added[index],
                )  # fmt: skip
    finally:
        handle.remove()
    return [found[index] for index in range(len(chosen))]


def _behind_a_turn(conversations: Sequence[Conversation], most: int = 3) -> list[int]:
    """The tokens that the chat template puts behind a finished turn, from a conversation that goes on after one."""
    for conversation in conversations:
        for (_, end), finish in zip(conversation.spans, conversation.finish, strict=True):
            if finish == "stop" and end + most <= len(conversation.input_ids):
                return list(conversation.input_ids[end : end + most])
    return []


class SpotReader:
    """Spots as `replay` reads a store: conversations by number, with chosen taps."""

    def __init__(self, spots: Sequence[Spot], taps: Sequence[int], shift: int = 0) -> None:
        self._spots, self._taps, self._shift = spots, taps, shift
        self.path = Path("harvested on the spot")
        self.ids = [spot.id for spot in spots]
        self.lengths = [len(spot.ids) - spot.added for spot in spots]

    def __len__(self) -> int:
        return len(self._spots)

    def __getitem__(self, index: int) -> Any:
        spot = self._spots[index]
        return _Row(spot.window(self._taps, self._shift))

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """input_ids and generated of a conversation."""
        spot, length = self._spots[index], self.lengths[index]
        return spot.ids[:length], spot.generated[:length]


class _Row:
    """A window under the names of a harvested conversation."""

    def __init__(self, window: Window) -> None:
        self.input_ids, self.generated, self.taps = window.ids, window.generated, window.taps
        self.final, self.argmax, self.greedy = window.final, window.argmax, window.greedy
