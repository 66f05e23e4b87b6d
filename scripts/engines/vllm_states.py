"""A vLLM connector that writes a finished request's hidden states into one file, on GPUs and on CPUs.

vLLM's own example connector copies on a CUDA stream, which a CPU does not have, and hands files over under a lock that is
not released before the engine's next step. Here a file is copied, written and renamed before the step ends, so that a
file that is there is whole.
"""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class _Written:
    """Stands for the event that a copy is over."""

    def query(self) -> bool:
        return True


class StatesToFile(example.ExampleHiddenStatesConnector):
    """Rows of the cache that vLLM's `extract_hidden_states` fills, as hidden_states (T, layers, H) and token_ids (T,)."""

    def _submit_async_write(self, pending: example.PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        first = torch.tensor(pending.block_ids, dtype=torch.long)[:, None] * self._block_size
        slots = (first + torch.arange(self._block_size)).flatten().to(self._kv_cache.device)
        rows = example.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        path = Path(pending.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file(
            {"hidden_states": rows.cpu().contiguous(), "token_ids": pending.token_ids.contiguous().clone()},
            str(partial),
        )
        os.replace(partial, path)  # noqa: PTH105
        self._req_copy_events[pending.req_id] = _Written()
