"""What serve_sglang.py and serve_vllm.py share: command line, counters, comparison, result file.

Imports the standard library only: it runs under an engine's own Python, where draftsmith is not installed.

How the engines count (read in SGLang 0.5.23 and vLLM 0.32.0, and confirmed by tests/engines). A *verify step* is one
target forward over the last token and `steps` drafts; it accepts the longest prefix of the drafts that equals what the
target itself would produce. Both engines agree on everything below.

- The first generated token comes from the prefill and belongs to no verify step. A request that ends with it (a stop
  token, or max_new_tokens 1) has no verify steps at all.
- Every later token belongs to a verify step, the last one included. A step always drafts `steps` tokens, also when
  fewer than that may still be produced, and its accepted drafts are counted *before* the output is cut at a stop token
  or at max_new_tokens: accepted drafts beyond the end count in full (SGLang: batch_result_processor.py
  `_resolve_spec_v2_tokens`; vLLM: scheduler.py `update_from_output`, which trims in `_update_request_with_output`
  afterwards). What the target "would produce" after a stop token is its plain continuation, and the drafter continues
  past it too.
- So with a steps-per-request histogram h (h[i] = verify steps with i accepted drafts), the tokens of a request are at
  most 1 + sum_i h[i] * (i + 1), and fewer by what the last step accepted beyond the end. Drop the last step, or let a
  predictor look past the end, to compare exactly; `per_step` of vLLM's outputs lists every step in order.
- Neither engine drafts fewer tokens near max_new_tokens. Near the context limit vLLM does (read, not run), so both
  serve scripts leave `CONTEXT_SLACK` positions unused unless --context-length says otherwise.

accept_length is 1 + accepted_drafts / verify_steps, from those counters. SGLang's own `spec_accept_length` (completion
tokens / verify steps) counts the prefill's token and cuts the last step, and is not used.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from child import ChildError, run_in_child

CONTEXT_SLACK = 64


@dataclass(frozen=True)
class Prompt:
    id: str
    input_ids: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Job:
    """One invocation of a serve script, checked."""

    target: Path
    drafter: Path | None
    prompts: list[Prompt]
    stop_token_ids: list[int]
    out: Path
    steps: int
    dtype: str
    max_running: int
    context_length: int
    compare: bool
    timeout: float

    @property
    def log(self) -> Path:
        """Where the engines' own output goes."""
        return self.out.with_suffix(".log")


@dataclass
class Output:
    """What one request came back with. histogram[i] counts its verify steps with i accepted drafts."""

    id: str
    output_ids: list[int]
    verify_steps: int | None = None
    histogram: list[int] | None = None
    per_step: list[int] | None = None


@dataclass
class Served:
    """What a serve function returns: outputs in the order of the prompts, and the clock."""

    outputs: list[Output]
    start_seconds: float
    seconds: float
    counters: dict[str, Any] = field(default_factory=dict)


Serve = Callable[[Job, Path | None], Served]  # (job, drafter or None for the plain engine)


def fail(message: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse_job(engine: str) -> Job:
    """Read and check the command line; every fault ends the process with one line and exit code 2."""
    parser = argparse.ArgumentParser(
        description=f"Serve prompts greedily with {engine}, with an EAGLE-3 drafter or not."
    )
    parser.add_argument("--target", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--drafter", type=Path, help="folder of the EAGLE-3 drafter; without it the target runs alone")
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        help='{"prompts": [{"id": str, "input_ids": [int], "max_new_tokens": int}], "stop_token_ids": [int]}',
    )
    parser.add_argument("--out", type=Path, required=True, help="result file; the engine's output goes beside it, .log")
    parser.add_argument("--steps", type=int, default=3, help="drafts per verify step, a chain (default 3)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="default float32")
    parser.add_argument("--max-running", type=int, default=8, help="requests served at once (default 8)")
    parser.add_argument("--context-length", type=int, help="default: the longest prompt + new tokens, and some slack")
    parser.add_argument("--compare", action="store_true", help="serve again without the drafter and compare the tokens")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for everything (default 900)")
    arguments = parser.parse_args()

    if "SGLANG_SIMULATE_ACC_LEN" in os.environ:
        fail(
            "SGLANG_SIMULATE_ACC_LEN is set: the engine would fake acceptance. Unset it: unset SGLANG_SIMULATE_ACC_LEN"
        )
    for name in ("target", "drafter"):
        folder = getattr(arguments, name)
        if folder is not None and not (folder / "config.json").is_file():
            fail(f"--{name} {folder}: no config.json there; expected a folder with config.json and model.safetensors")
    if arguments.compare and arguments.drafter is None:
        fail("--compare needs --drafter: there is nothing to compare the target with")
    if arguments.steps < 1 or arguments.max_running < 1:
        fail(f"--steps {arguments.steps} --max-running {arguments.max_running}: both must be at least 1")
    prompts, stop_token_ids = read_prompts(arguments.prompts)
    longest = max(len(prompt.input_ids) + prompt.max_new_tokens for prompt in prompts)
    context_length = arguments.context_length or longest + CONTEXT_SLACK
    if context_length < longest:
        fail(f"--context-length {context_length}: a prompt and its new tokens need {longest}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    job = Job(
        target=arguments.target.resolve(),
        drafter=arguments.drafter.resolve() if arguments.drafter else None,
        prompts=prompts,
        stop_token_ids=stop_token_ids,
        out=arguments.out.resolve(),
        steps=arguments.steps,
        dtype=arguments.dtype,
        max_running=arguments.max_running,
        context_length=context_length,
        compare=arguments.compare,
        timeout=arguments.timeout,
    )
    job.log.write_text("")
    return job


def read_prompts(path: Path) -> tuple[list[Prompt], list[int]]:
    """The prompts and stop token ids of a prompts file; a fault is named with its place in the file."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        fail(f"--prompts {path}: {error}")
    if not isinstance(document, dict) or not isinstance(document.get("prompts"), list) or not document["prompts"]:
        fail(f'--prompts {path}: expected {{"prompts": [at least one], "stop_token_ids": [int]}}')

    def token_ids(value: Any, name: str, may_be_empty: bool) -> list[int]:
        is_ids = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
        if not is_ids or not (value or may_be_empty):
            fail(f"--prompts {path}: {name} must be {'a' if may_be_empty else 'a non-empty'} list of token ids")
        return value

    prompts, seen = [], set()
    for index, entry in enumerate(document["prompts"]):
        where = f"prompts[{index}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str) or entry["id"] in seen:
            fail(f"--prompts {path}: {where}.id must be a string that no other prompt has")
        seen.add(entry["id"])
        new_tokens = entry.get("max_new_tokens")
        if type(new_tokens) is not int or new_tokens < 1:
            fail(f"--prompts {path}: {where}.max_new_tokens must be an integer above 0, found {new_tokens!r}")
        prompts.append(Prompt(entry["id"], token_ids(entry.get("input_ids"), f"{where}.input_ids", False), new_tokens))
    return prompts, token_ids(document.get("stop_token_ids", []), "stop_token_ids", True)


def run(engine: str, version: str, job: Job, serve: Serve) -> None:
    """Serve in child processes, one engine after the other, and write the result file.

    The engine package must be imported already: children are forked, so that it is imported once for both runs.
    """
    deadline = time.monotonic() + job.timeout
    spec = base = None
    try:
        if job.drafter is not None:
            spec = run_in_child(lambda: serve(job, job.drafter), job.log, deadline, f"{engine} with the drafter")
        if job.drafter is None or job.compare:
            base = run_in_child(lambda: serve(job, None), job.log, deadline, f"{engine} without a drafter")
    except ChildError as error:
        fail(f"{error}\n(time limit: --timeout {job.timeout:g})")
    divergences = first_divergences(base.outputs, spec.outputs) if spec and base else None
    result = {
        "engine": engine,
        "version": version,
        "dtype": job.dtype,
        "steps": job.steps,
        "spec": {**summarise_counters(spec, job.steps), **_summarise_run(spec)} if spec else None,
        "base": _summarise_run(base) if base else None,
        "identical": None if divergences is None else not divergences,
        "first_divergence": divergences or [],
    }
    write_atomically(job.out, json.dumps(result, indent=1) + "\n")
    print(_headline(engine, version, result))


def summarise_counters(served: Served, steps: int) -> dict[str, Any]:
    """Totals over requests. accept_per_position[i] = verify steps that accepted more than i drafts / verify steps."""
    histogram = [sum(output.histogram[i] for output in served.outputs) for i in range(steps + 1)]
    verify_steps = sum(histogram)
    accepted = sum(count * i for i, count in enumerate(histogram))
    reported = {"verify_steps": verify_steps, "accepted_drafts": accepted, **served.counters}
    if (reported["verify_steps"], reported["accepted_drafts"]) != (verify_steps, accepted):
        raise RuntimeError(
            f"the engine's counters contradict each other: histograms say {verify_steps} verify steps and {accepted} "
            f"accepted drafts, the totals {reported['verify_steps']} and {reported['accepted_drafts']}"
        )
    divisor = max(verify_steps, 1)
    return {
        "accept_length": 1 + accepted / divisor,
        "accept_per_position": [sum(histogram[i + 1 :]) / divisor for i in range(steps)],
        "verify_steps": verify_steps,
        "accepted_drafts": accepted,
        "histogram": histogram,
    }


def _summarise_run(served: Served) -> dict[str, Any]:
    tokens = sum(len(output.output_ids) for output in served.outputs)
    return {
        "tokens": tokens,
        "seconds": round(served.seconds, 3),
        "tokens_per_second": round(tokens / served.seconds, 2),
        "start_seconds": round(served.start_seconds, 2),
        "outputs": [{k: v for k, v in asdict(output).items() if v is not None} for output in served.outputs],
    }


def first_divergences(base: list[Output], spec: list[Output]) -> list[dict[str, Any]]:
    """For every request whose tokens differ: where first, and both tokens there (None past the end of the shorter)."""
    found = []
    for plain, drafted in zip(base, spec, strict=True):
        if plain.output_ids == drafted.output_ids:
            continue
        shared = min(len(plain.output_ids), len(drafted.output_ids))
        index = next((i for i in range(shared) if plain.output_ids[i] != drafted.output_ids[i]), shared)
        tokens = [ids[index] if index < len(ids) else None for ids in (plain.output_ids, drafted.output_ids)]
        found.append({"id": plain.id, "index": index, "base": tokens[0], "spec": tokens[1]})
    return found


def _headline(engine: str, version: str, result: dict[str, Any]) -> str:
    parts = [f"{engine} {version} {result['dtype']}"]
    if result["spec"]:
        parts.append(
            f"accept length {result['spec']['accept_length']:.3f} at {result['steps']} drafts, "
            f"{result['spec']['tokens_per_second']:.1f} tokens/s"
        )
    if result["base"]:
        parts.append(f"without a drafter {result['base']['tokens_per_second']:.1f} tokens/s")
    if result["identical"] is not None:
        differing, requests = len(result["first_divergence"]), len(result["base"]["outputs"])
        parts.append("outputs identical" if not differing else f"outputs differ in {differing} of {requests} requests")
    return "; ".join(parts)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the whole new one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as handle:
        handle.write(text)
    written = Path(handle.name)
    written.chmod(0o644)
    written.replace(path)
