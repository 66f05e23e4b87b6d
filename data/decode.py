"""The target answers a batch of prompts: left-padded prefill, then one token a step with a key-value cache.

Notable choices: finished rows leave the batch, so that one long answer does not make the others wait; key-value memory
grows in blocks instead of being copied at every step; a sampled token depends on nothing but its own row's logits and
its own random numbers. Logits are computed in the model's own dtype and widened to float32 afterwards, as `generate` does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from draftsmith.data.target_model import LoadedTarget

BLOCK = 64
"""Positions by which the key-value memory grows."""

COMPACT_SHARE = 8
"""Rows are dropped when a batch's finished rows reach one in this many."""


@dataclass(frozen=True)
class Answer:
    """One generated turn: its ids (end-of-turn token included), their summed log-probability, and how it ended."""

    ids: list[int]
    logprob: float
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Sampler:
    """How a token is chosen. Temperature 0 is greedy; otherwise inverse-transform sampling within `top_p`."""

    temperature: float = 0.0
    top_p: float = 1.0

    def choose(self, logits: torch.Tensor, uniform: torch.Tensor | None) -> torch.Tensor:
        """Ids int64 (B,) from float32 logits (B, V); `uniform` (B,) in [0, 1) decides when sampling."""
        if self.temperature == 0.0 or uniform is None:
            return logits.argmax(dim=-1)
        probabilities, order = torch.softmax(logits / self.temperature, dim=-1).sort(dim=-1, descending=True)
        total = probabilities.cumsum(dim=-1)
        kept = total - probabilities < self.top_p
        total = torch.where(kept, total, total.new_zeros(())).cummax(dim=-1).values
        rank = torch.searchsorted(total, uniform.to(total)[:, None] * total[:, -1:], right=True)
        rank = torch.minimum(rank, kept.sum(dim=-1, keepdim=True) - 1)
        return order.gather(-1, rank)[:, 0]


@torch.inference_mode()
def answer_batch(
    target: LoadedTarget,
    prompts: Sequence[Sequence[int]],
    stop_ids: Collection[int],
    limits: Sequence[int],
    sampler: Sampler,
    seeds: Sequence[int],
) -> list[Answer]:
    """Answer every prompt.

    Args:
        prompts: token ids, one list a row.
        stop_ids: a row ends with the first of these, which belongs to its answer.
        limits: most new tokens, a row.
        seeds: seed of each row's random numbers; without use when greedy.
    """
    rows = _Rows(target, prompts, limits)
    stops = torch.tensor(sorted(stop_ids), device=target.device)
    draws = _uniforms(seeds, max(limits)).to(target.device) if sampler.temperature > 0 else None
    ids: list[list[int]] = [[] for _ in prompts]
    logprobs = [0.0] * len(prompts)
    finish: list[Literal["stop", "length"]] = ["length"] * len(prompts)
    hidden = rows.prefill()
    for step in range(max(limits)):
        logits = target.head(hidden).to(target.device).float()
        uniform = draws[rows.alive.to(target.device), step] if draws is not None else None
        chosen = sampler.choose(logits, uniform)
        gained = -torch.nn.functional.cross_entropy(logits, chosen, reduction="none")
        stopped = torch.isin(chosen, stops)
        for row, token, logprob, stop in zip(
            rows.alive.tolist(), chosen.tolist(), gained.tolist(), stopped.tolist(), strict=True
        ):
            if rows.finished[row]:
                continue
            ids[row].append(token)
            logprobs[row] += logprob
            if stop:
                finish[row] = "stop"
            rows.finished[row] = stop or len(ids[row]) == limits[row]
        if all(rows.finished):
            break
        hidden = rows.advance(chosen)
    return [Answer(*parts) for parts in zip(ids, logprobs, finish, strict=True)]


class _Rows:
    """The batch inside the model: cache, attention mask and positions of the rows that are still computed."""

    def __init__(self, target: LoadedTarget, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        self._target = target
        self.alive = torch.arange(len(prompts))
        self.finished = [False] * len(prompts)
        width = max(map(len, prompts))
        self._ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width + max(limits), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            self._ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self._mask = mask.to(target.device)
        self._position = torch.tensor([len(prompt) for prompt in prompts], device=target.device)[:, None]
        self._width = width
        self._cache = DynamicCache(config=target.model.config.get_text_config())
        self._cache.layers = [_BlockLayer() if type(layer) is DynamicLayer else layer for layer in self._cache.layers]

    def prefill(self) -> torch.Tensor:
        """Final hidden states (B, H) at the last prompt token."""
        mask = self._mask[:, : self._width]
        return self._forward(self._ids.to(self._target.device), mask, (mask.cumsum(dim=-1) - 1).clamp(min=0))

    def advance(self, chosen: torch.Tensor) -> torch.Tensor:
        """Feed the chosen ids (B,), after dropping finished rows when they are many; final hidden states (B', H)."""
        dead = sum(self.finished[row] for row in self.alive.tolist())
        if dead * COMPACT_SHARE >= len(self.alive):
            keep = torch.tensor([i for i, row in enumerate(self.alive.tolist()) if not self.finished[row]])
            self.alive = self.alive[keep]
            self._cache.batch_select_indices(keep)  # of the CPU: layers may lie on several devices
            keep = keep.to(self._target.device)
            chosen, self._mask, self._position = chosen[keep], self._mask[keep], self._position[keep]
        self._width += 1
        hidden = self._forward(chosen[:, None], self._mask[:, : self._width], self._position)
        self._position = self._position + 1
        return hidden

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        arguments: dict[str, Any] = {self._target.cache_argument: self._cache}
        output = self._target.trunk(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **arguments
        )
        hidden: torch.Tensor = output.last_hidden_state[:, -1]
        return hidden


class _BlockLayer(DynamicLayer):
    """transformers' growing cache layer with room for BLOCK positions ahead, so that a step copies one position only."""

    keys: torch.Tensor
    values: torch.Tensor
    _room_keys: torch.Tensor | None = None
    _room_values: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values (B, heads, new, dim); all of them so far (B, heads, T, dim)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._room_keys, self.keys = _append(self._room_keys, self.keys, key_states)
        self._room_values, self.values = _append(self._room_values, self.values, value_states)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)
        self._room_keys = self._room_values = None


def _append(room: torch.Tensor | None, held: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write `new` behind `held`, a view of `room`; a bigger room is made when it does not fit."""
    length = held.shape[-2] if held.dim() == 4 else 0
    total = length + new.shape[-2]
    if room is None or total > room.shape[-2]:
        bigger = new.new_empty(*new.shape[:2], total + BLOCK, new.shape[-1])
        if length:
            bigger[:, :, :length] = held
        room = bigger
    room[:, :, length:total] = new
    return room, room[:, :, :total]


def _uniforms(seeds: Sequence[int], count: int) -> torch.Tensor:
    """float64 (rows, count) in [0, 1), each row from its own seed."""
    rows = [torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows)
