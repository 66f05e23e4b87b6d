"""Compute hidden states with vLLM's `extract_hidden_states`, task by task, for a harvest in another process.

harvest_common.py says how it talks. Layer i means the residual stream that enters layer i; the number of layers means what
leaves the last one, before the final norm. Runs under the engine's own Python.
"""

from pathlib import Path
from typing import Any

import harvest_common

CONNECTOR = "StatesToFile"
FLUSHES = 16
"""Steps after a task within which the connector must have written everything."""


class States:
    """An engine inside this process."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        speculation = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": job["layers"]}},
        }
        connector = {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": "vllm_states",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": job["folder"], "use_synchronization_lock": False},
        }
        self._engine = LLM(
            **{
                "model": job["target"],
                "dtype": job["dtype"],
                "max_model_len": job["longest"] + 2,  # the token that ends a request, and its draft
                "max_num_batched_tokens": max(job["batch_tokens"], 256),
                "enforce_eager": True,
                "enable_prefix_caching": False,
                "skip_tokenizer_init": True,
                "seed": 0,
                **job["options"],
                "speculative_config": speculation,
                "kv_transfer_config": connector,
            }
        )
        scheduler = self._engine.llm_engine.vllm_config.scheduler_config
        room = min(scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens or job["longest"])
        if not scheduler.enable_chunked_prefill and room < job["longest"]:
            raise RuntimeError(  # it would wait for room for ever
                f"vLLM computes this target's texts whole, and the longest, of {job['longest']} tokens, does not fit into a "
                f"batch of {room}: set harvest.batch_tokens to {job['longest']} or more"
            )

    def compute(self, rows: list[list[int]]) -> dict[str, list]:
        """A file for each sequence, and the token that the engine writes after it."""
        from vllm import SamplingParams

        answers = self._engine.generate(
            [{"prompt_token_ids": row} for row in rows],
            SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True),
            use_tqdm=False,
        )
        files = [Path(answer.kv_transfer_params["hidden_states_path"]) for answer in answers]
        for _ in range(FLUSHES):  # the connector hears of a finished request in the step after
            if all(file.is_file() for file in files):
                break
            self._engine.llm_engine.step()
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise RuntimeError(f"vLLM wrote no states of {len(missing)} of {len(files)} sequences")
        return {"files": [str(file) for file in files], "next": [answer.outputs[0].token_ids[0] for answer in answers]}


def start(job: dict[str, Any]) -> tuple[str, harvest_common.Compute]:
    import vllm

    return vllm.__version__, States(job).compute


if __name__ == "__main__":
    harvest_common.run(start)
