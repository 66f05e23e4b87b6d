"""One pass of the target's trunk over several token sequences.

Hooks copy the residual stream where it enters each tapped layer, real rows only; no other layer's output is kept, no
cache, and no head is computed except for rows whose argmax is asked for. Batches are right-padded without an attention
mask: under causal attention no real token ever sees padding behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.configs.errors import DraftsmithError
from draftsmith.data.codec import Codec
from draftsmith.data.rows import RowSource
from draftsmith.data.target_model import LoadedTarget


class Trunk(RowSource):
    """Runs tasks.

    Args:
        taps: layer-input indices.
        codec: of the rows.
        chunk: a single sequence longer than this runs in pieces of this many tokens with a cache; none: in one pass.
    """

    def __init__(self, target: LoadedTarget, taps: Sequence[int], codec: Codec, chunk: int | None = None) -> None:
        super().__init__(codec, target.head, target.device)
        self.target, self.taps, self.chunk = target, tuple(taps), chunk
        self._norm_checked = False

    def states(self, rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """taps (T, K, H) and final (T, H) in the target's dtype on its device, T being the tokens of all rows.

        Raises:
            DraftsmithError: the trunk's output is not its final norm's output, a tapped layer did not run or saw another
                number of rows.
        """
        if len(rows) == 1 and self.chunk is not None and len(rows[0]) > self.chunk:
            return self._in_chunks(rows[0], self.chunk)
        width = max(map(len, rows))
        ids, places = np.zeros((len(rows), width), dtype=np.int64), []
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
            places.append(np.arange(index * width, index * width + len(row)))
        return self._pass(ids, None if len(rows) == 1 else np.concatenate(places), {"use_cache": False})

    def _in_chunks(self, row: np.ndarray, chunk: int) -> tuple[Tensor, Tensor]:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.target.model.config.get_text_config())
        arguments = {"use_cache": True, self.target.cache_argument: cache}
        parts = [
            self._pass(row[None, start : start + chunk].astype(np.int64), None, arguments)
            for start in range(0, len(row), chunk)
        ]
        return torch.cat([taps for taps, _ in parts]), torch.cat([final for _, final in parts])

    def _pass(self, ids: np.ndarray, places: np.ndarray | None, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Run ids (B, W) and keep the rows at `places` of B x W."""
        device = self.target.device
        index = None if places is None else self._upload(places)
        seen: dict[Any, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tuple(tensor.shape[:2]) != ids.shape:
                raise DraftsmithError(
                    "a layer's rows are not the tokens that were asked for", where=type(self.target.trunk).__name__,
                    found=tuple(tensor.shape), expected=f"{ids.shape} and the hidden size",
                )  # fmt: skip
            flat = tensor.flatten(0, 1)
            return flat.clone() if index is None else flat.index_select(0, index.to(flat.device))

        with ExitStack() as hooks:
            for tap in self.taps:
                handle = self.target.layers[tap].register_forward_pre_hook(
                    _take_input(seen, tap, keep), with_kwargs=True
                )
                hooks.callback(handle.remove)
            if not self._norm_checked:
                hook = self.target.norm.register_forward_hook(lambda _, __, output: seen.__setitem__("norm", output))
                hooks.callback(hook.remove)
            output = self.target.trunk(input_ids=self._upload(ids), **arguments).last_hidden_state
        self._check(seen, output)
        final = keep(output).to(device)
        return torch.stack([seen[tap].to(device) for tap in self.taps], dim=1), final

    def _check(self, seen: dict[Any, Tensor], final: Tensor) -> None:
        missing = [tap for tap in self.taps if tap not in seen]
        norm = seen.get("norm")
        other = not self._norm_checked and (norm is None or not torch.equal(norm.to(final.device), final))
        if other and norm is not None and bool(torch.isnan(final).any()):
            other = False  # NaN differs from itself; such rows are refused by name later
        if missing or other:
            raise DraftsmithError(
                "the trunk's last hidden state is not what its final norm gives, or a tapped layer did not run",
                where=type(self.target.trunk).__name__,
                found=f"no call of layers {missing}" if missing else "another value",
                expected="embeddings -> layers -> norm",
            )
        self._norm_checked = True


def _take_input(seen: dict[Any, Tensor], tap: int, keep: Callable[[Tensor], Tensor]) -> Any:
    """A pre-hook that copies the layer's first argument, the residual stream, before the layer can change it in place."""

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen[tap] = keep(arguments[0] if arguments else named["hidden_states"])

    return hook
