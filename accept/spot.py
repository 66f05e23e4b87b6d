"""The target's states of a few conversations, harvested on the spot: any layers, and the final state before its norm."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.conversations import Conversation, read_conversations
from draftsmith.data.harvest import plan_batches
from draftsmith.data.target_model import LoadedTarget, load_target
from draftsmith.train.batch import Window, turns
from draftsmith.train.evaluate import HEAD_ROWS

BATCH_TOKENS = 2048


@dataclass(frozen=True)
class Spot:
    """One conversation's states in float32, and what followed its turns.

    Attributes:
        ids: int64 (T,). generated: bool (T,).
        layers: tap -> (T, H), the residual stream entering that layer.
        final: (T, H), the input of the head. unnormed: (T, H), the input of the final norm.
        argmax: int64 (T,), the most likely next token. total: (T,), log of the sum of exp of all logits.
        greedy: the text is the target's greedy answer.
        ends: indices of end-of-turn tokens that the target wrote itself; a turn that was cut has none.
        added: tokens at the end that are not the conversation's own, but what stands behind a turn elsewhere.
    """

    id: str
    ids: Tensor
    generated: Tensor
    layers: dict[int, Tensor]
    final: Tensor
    unnormed: Tensor
    argmax: Tensor
    total: Tensor
    greedy: bool
    ends: tuple[int, ...]
    added: int

    @property
    def prompt(self) -> list[int]:
        """Tokens before the first generated one."""
        wrote = self.generated.nonzero()[:, 0]
        return self.ids[: int(wrote[0]) if len(wrote) else len(self.ids)].tolist()

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
    found: dict[int, Spot] = {}
    for batch in plan_batches([len(row) for row in rows], BATCH_TOKENS):
        layers, unnormed, final = _forward(target, [rows[index] for index in batch], taps)
        for place, index in enumerate(batch):
            length, mask = len(rows[index]), torch.zeros(len(rows[index]), dtype=torch.bool)
            own = chosen[index].generated_mask()[:length]
            mask[: len(own)] = own
            read = final[place, :length]
            found[index] = Spot(
                chosen[index].id, torch.tensor(rows[index]), mask,
                {tap: states[place, :length] for tap, states in layers.items()}, read, unnormed[place, :length],
                *_read_out(target, read), chosen[index].greedy, _ends(chosen[index], length), added[index],
            )  # fmt: skip
    return [found[index] for index in range(len(chosen))]


@torch.no_grad()
def _forward(
    target: LoadedTarget, rows: Sequence[Sequence[int]], taps: Sequence[int]
) -> tuple[dict[int, Tensor], Tensor, Tensor]:
    """Streams entering the tapped layers, and the final norm's input and output, (rows, longest, H) in float32 each.

    Padded on the right without a mask: under causal attention no token sees the padding behind it.
    """
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    seen: dict[int, Tensor] = {}

    def take(key: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen[key] = (arguments[0] if arguments else named["hidden_states"]).float().cpu()

        return hook

    with ExitStack() as hooks:
        for key, module in [*((tap, target.layers[tap]) for tap in taps), (-1, target.norm)]:
            hooks.callback(module.register_forward_pre_hook(take(key), with_kwargs=True).remove)
        final = target.trunk(input_ids=ids.to(target.device), use_cache=False).last_hidden_state
    unnormed = seen.pop(-1)
    return seen, unnormed, final.float().cpu()


@torch.no_grad()
def _read_out(target: LoadedTarget, final: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely next token, and the log of the sum of exp of all logits, of each row of `final`; both (T,)."""
    best, total = [], []
    for rows in final.split(HEAD_ROWS):
        logits = target.head(rows.to(target.device)).float()
        best.append(logits.argmax(-1).cpu())
        total.append(logits.logsumexp(-1).cpu())
    return torch.cat(best), torch.cat(total)


def _ends(conversation: Conversation, length: int) -> tuple[int, ...]:
    finished = zip(conversation.spans, conversation.finish, strict=True)
    return tuple(end - 1 for (_, end), finish in finished if finish == "stop" and end <= length)


def _behind_a_turn(conversations: Sequence[Conversation], most: int = 3) -> list[int]:
    """The tokens that the chat template puts behind a turn's end-of-turn token, from a conversation that goes on after a
    turn; behind a turn that was cut the template writes the end-of-turn token too."""
    stops = {c.input_ids[end] for c in conversations for end in _ends(c, len(c.input_ids))}
    for conversation in conversations:
        for (_, end), finish in zip(conversation.spans, conversation.finish, strict=True):
            following = list(conversation.input_ids[end : end + most + 1])
            if finish == "length":
                following = following[1:] if following and following[0] in stops else []
            if len(following) >= most:
                return following[:most]
    return []
