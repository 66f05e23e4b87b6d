"""Ask vLLM itself what it makes of drafter checkpoints: its real EAGLE-3 class, its real load_weights.

    vllm_load_audit.py --target DIR --out audit.json --drafter DIR [DIR ...]

vLLM refuses tensors that it does not know, but says nothing about missing ones. Here every parameter is filled with a
mark before load_weights, so that what was left unwritten can be read off. audit.json: {"reports": [one per drafter]};
every report lists "faults" in words (none: a good drafter), and the exit code is 1 when there is any.

Runs under the engine's Python: scripts/audit_vllm.sh sets that up.
"""

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import audit_common
import child
import serve_common
import torch

SHARED_BY_DESIGN = "model.embed_tokens.weight"  # vLLM takes the target's when the checkpoint has none
UNSET_ID = -1
TIME_LIMIT = 300  # seconds a drafter


def main() -> int:
    options = audit_common.parse(audit_common.argument_parser("vLLM"))
    child.end_on_signals()
    log = options.out.with_suffix(".log")
    log.write_text("")
    with child.output_to(log):  # imported before the audits are forked, so that it is done once for all of them
        import vllm
        import vllm.model_executor.models.llama_eagle3
        import vllm.v1.engine.core
        import vllm.v1.worker.cpu_worker

    reports = []
    for folder in options.drafter:
        work = functools.partial(audit, options.target, folder)
        try:
            reports.append(child.run_in_child(work, log, time.monotonic() + TIME_LIMIT, f"vLLM with {folder}"))
        except child.ChildError as error:
            serve_common.fail(str(error))
    return audit_common.finish(vllm.__version__, reports, options.out)


class _LoadedError(Exception):
    """Ends the engine's start once the drafter is loaded; carries what was found."""


def audit(target: Path, folder: Path) -> dict[str, Any]:
    """Start an engine up to the point where the drafter's weights are loaded."""
    from vllm import LLM
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    load_weights = Eagle3LlamaForCausalLM.load_weights

    def watched(model, weights):
        for parameter in model.parameters():
            parameter.data.fill_(float("nan") if parameter.is_floating_point() else UNSET_ID)
        load_weights(model, weights)
        raise _LoadedError(_unwritten(model), _target_id_faults(model, folder))

    Eagle3LlamaForCausalLM.load_weights = watched
    report: dict[str, Any] = {"drafter": str(folder), "faults": []}
    try:
        LLM(
            model=str(target),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=1,
            enforce_eager=True,
            skip_tokenizer_init=True,
            speculative_config={"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3},
        )
    except _LoadedError as found:
        report["never_written"], faults = found.args
        for name, amount in report["never_written"].items():
            report["faults"].append(f"{name}: {amount} elements are in no tensor of the checkpoint, left as they were")
        report["faults"] += faults
    except Exception as error:
        report["faults"].append(f"vLLM refuses it: {type(error).__name__}: {error}")
    return report


def _unwritten(model) -> dict[str, str]:
    """Parameters with elements that still hold their mark, apart from those that vLLM takes from the target."""
    left = {}
    for name, parameter in model.named_parameters():
        if name == SHARED_BY_DESIGN and not model.has_own_embed_tokens:
            continue
        marked = parameter.isnan() if parameter.is_floating_point() else parameter == UNSET_ID
        count = int(marked.sum())
        if count == parameter.numel() or (count and parameter.is_floating_point()):
            left[name] = f"{count} of {parameter.numel()}"
    return left


def _target_id_faults(model, folder: Path) -> list[str]:
    offsets = model.draft_id_to_target_id
    if offsets is None or bool((offsets == UNSET_ID).all()):
        return []
    return audit_common.target_id_faults(torch.arange(len(offsets)) + offsets.data, model.config.vocab_size, folder)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine must start inside the audited process
    sys.exit(main())
