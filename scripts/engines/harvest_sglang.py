"""Compute hidden states with SGLang, task by task, for a harvest in another process; harvest_common.py says how it talks.

Layer i means the residual stream that enters layer i; SGLang numbers what leaves a layer, so it is asked for one less.
Behind the layers stands the final state, after the norm. Runs under the engine's own Python; without a GPU, with the
operators of sglang_cpu (SGLANG_USE_CPU_ENGINE=1 and that folder on PYTHONPATH).
"""

import inspect
import os
from pathlib import Path
from typing import Any

import harvest_common
import sglang_states
from sglang_engine import engine_class

CONTEXT_SLACK = 64
"""Positions beyond the longest text: the token that ends a request, and SGLang's own reserve."""


class States:
    """An engine and its processes."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._folder = Path(job["folder"])
        self._folder.mkdir()
        on_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
        room = max(job["batch_tokens"], job["longest"] + CONTEXT_SLACK)
        self._engine = engine_class("cpu" if on_cpu else "cuda")(
            **{
                "model_path": job["target"],
                "dtype": job["dtype"],
                "context_length": job["longest"] + CONTEXT_SLACK,
                "max_prefill_tokens": room,
                "max_total_tokens": 2 * room,
                "disable_cuda_graph": True,  # hooks see nothing of a recorded graph
                "skip_tokenizer_init": True,
                "skip_server_warmup": True,
                "grammar_backend": "none",
                "random_seed": 0,
                "log_level": "error",
                **({"device": "cpu"} if on_cpu else {}),
                **job["options"],
                "disable_radix_cache": True,  # a text whose beginning is known would lack those rows
                "chunked_prefill_size": -1,  # every text in one piece
                "enable_return_aux_hidden_states": True,
                "speculative_algorithm": "EAGLE3",
                "return_aux_hidden_state_layer_ids": [layer - 1 for layer in job["layers"]],
                "forward_hooks": [
                    {
                        "name": "draftsmith",
                        "target_modules": ["logits_processor", "*.logits_processor"],
                        "hook_factory": "sglang_states:keep",
                        "config": {"folder": job["folder"], "layers": len(job["layers"])},
                    }
                ],
            }
        )

    def compute(self, rows: list[list[int]]) -> dict[str, list]:
        """A file for each sequence, and the token that the engine writes after it."""
        answers = self._engine.generate(
            input_ids=rows, sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        )
        files, missing = [], 0
        for number, row in enumerate(rows):
            file = sglang_states.file_of(self._folder, row)
            missing += not file.is_file()
            own = file.with_name(f"{number}.safetensors")  # equal texts have one file, and every reader deletes its own
            own.unlink(missing_ok=True)
            if file.is_file():
                os.link(file, own)
            files.append(str(own))
        if missing:
            raise RuntimeError(f"SGLang gave no states of {missing} of {len(rows)} sequences, or not in one piece")
        for row in rows:
            sglang_states.file_of(self._folder, row).unlink(missing_ok=True)
        return {"files": files, "next": [answer["output_ids"][0] for answer in answers]}


def start(job: dict[str, Any]) -> tuple[str, harvest_common.Compute]:
    import sglang
    from sglang.srt.server_args import ServerArgs

    lacking = {"return_aux_hidden_state_layer_ids", "forward_hooks"} - set(inspect.signature(ServerArgs).parameters)
    if lacking:
        raise RuntimeError(
            f"SGLang {sglang.__version__} cannot hand out layers: it lacks {', '.join(sorted(lacking))}; 0.5.23 has them"
        )
    return sglang.__version__, States(job).compute


if __name__ == "__main__":
    harvest_common.run(start)
