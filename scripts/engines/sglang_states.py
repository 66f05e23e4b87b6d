"""A forward hook for SGLang's `forward_hooks`: hidden states of every sequence that is prefilled, one file each.

It watches the module that turns final states into logits, which SGLang hands the final states (after the norm), and, in its
capture mode, what it captured at the layers asked for; both are whole there, on every rank. Only the first rank writes.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file


def file_of(folder: Path, ids: list[int]) -> Path:
    """Where the states of a sequence lie: named by its token ids."""
    digest = hashlib.blake2b(np.array(ids, dtype="<i8").tobytes(), digest_size=16).hexdigest()
    return folder / f"{digest}.safetensors"


def keep(config: dict[str, Any]) -> Callable[..., None]:
    """A hook that writes `layers` captured states and the final one, hidden_states (T, layers + 1, H), and token_ids (T,)."""
    folder, layers = Path(config["folder"]), int(config["layers"])

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        input_ids, final, _, batch, captured = arguments[:5]
        first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if not first or not batch.forward_mode.is_extend():
            return
        if not isinstance(captured, torch.Tensor):
            captured = torch.cat(list(captured), dim=-1)
        taps = captured.unflatten(-1, (layers, final.shape[-1]))
        states = torch.cat([taps, final[:, None]], dim=1)
        start = 0
        for length in batch.extend_seq_lens_cpu:
            rows = slice(start, start + int(length))
            start = rows.stop
            ids = input_ids[rows].to("cpu", torch.int64)
            path = file_of(folder, ids.tolist())
            partial = path.with_suffix(".partial")
            save_file({"hidden_states": states[rows].cpu().contiguous(), "token_ids": ids.contiguous()}, str(partial))
            os.replace(partial, path)  # noqa: PTH105

    return hook
