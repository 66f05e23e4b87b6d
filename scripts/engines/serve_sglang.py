"""Serve prompts greedily with SGLang, with an EAGLE-3 drafter or without, and write tokens and counters.

On a CPU it runs under an engine environment of ours (scripts/serve_sglang.sh builds it), with sglang_cpu beside this file
on PYTHONPATH; what is real there and what is stood in for: scripts/engines/sglang_cpu/sgl_kernel/__init__.py. On a GPU
(`--device cuda`) it runs under any Python that has SGLang, as it is. How accepted drafts are counted: counting.py.
"""

import time
from pathlib import Path
from typing import Any

import child
import serve_common
from counting import Output, Served
from serve_common import Job
from sglang_engine import engine_class


def serve(job: Job, drafter: Path | None) -> Served:
    """Start an engine, serve every prompt, shut it down."""
    speculation: dict[str, Any] = {}
    if drafter is not None:
        speculation = {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(drafter),
            "speculative_draft_model_quantization": "unquant",
            "speculative_num_steps": job.steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": job.steps + 1,
        }
    began = time.monotonic()
    arguments = {
        "model_path": str(job.target),
        "dtype": job.dtype,
        "device": job.device,
        "context_length": job.context_length,
        "max_running_requests": job.max_running,
        "max_total_tokens": job.max_running * (job.context_length + serve_common.CONTEXT_SLACK),
        "disable_radix_cache": True,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "grammar_backend": "none",
        "random_seed": 0,
        "log_level": "error",
        **speculation,
        **job.options,
    }
    engine = engine_class(job.device)(**arguments)
    try:
        if job.device == "cuda":  # the first requests compile kernels
            first = min(len(job.prompts), job.max_running)
            engine.generate(
                input_ids=[prompt.input_ids for prompt in job.prompts[:first]],
                sampling_params={"temperature": 0, "max_new_tokens": 16},
            )
        ready = time.monotonic()
        job.reached("ready")
        answers = engine.generate(
            input_ids=[prompt.input_ids for prompt in job.prompts],
            sampling_params=[
                {
                    "temperature": 0,
                    "max_new_tokens": prompt.max_new_tokens,
                    "stop_token_ids": job.stop_token_ids,
                    "ignore_eos": False,
                }
                for prompt in job.prompts
            ],
        )
        done = time.monotonic()
    finally:
        engine.shutdown()
    return Served(
        outputs=[
            _output(prompt.id, answer, job.steps if drafter else None)
            for prompt, answer in zip(job.prompts, answers, strict=True)
        ],
        start_seconds=ready - began,
        seconds=done - ready,
    )


def _output(prompt_id: str, answer: dict, steps: int | None) -> Output:
    """A request's tokens, and its counters from meta_info (absent when it never reached a verify step)."""
    tokens, meta = list(answer["output_ids"]), answer["meta_info"]
    if steps is None:
        return Output(prompt_id, tokens)
    histogram = list(meta.get("spec_correct_drafts_histogram", []))
    histogram += [0] * (steps + 1 - len(histogram))
    verify_steps, accepted = meta.get("spec_verify_ct", 0), meta.get("spec_num_correct_drafts", 0)
    if sum(histogram) != verify_steps or sum(i * count for i, count in enumerate(histogram)) != accepted:
        raise RuntimeError(f"SGLang's counters of request {prompt_id} contradict each other: {meta}")
    return Output(prompt_id, tokens, verify_steps, histogram)


def main() -> None:
    job = serve_common.parse_job("SGLang")
    child.end_on_signals()
    if job.device == "cpu":
        with child.output_to(job.log):  # imported before the engines are forked, so that it is done once for both
            import sglang.srt.managers.scheduler
            import sglang.srt.models.registry  # noqa: F401
    serve_common.run("sglang", serve_common.installed("sglang"), job, serve)


if __name__ == "__main__":
    serve_common.run_with(
        SGLANG_USE_CPU_ENGINE="1",
        PYTHONPATH=str(Path(__file__).resolve().parent / "sglang_cpu"),
        TOKENIZERS_PARALLELISM="false",
    )
    main()
