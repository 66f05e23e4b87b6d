"""What serve_sglang.py and serve_vllm.py share: command line, processes, result file. How they count: counting.py.

Imports the standard library only: it runs under an engine's own Python, where draftsmith is not installed.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from child import ChildError, run_in_child
from counting import Served, first_divergences, summarise_counters, summarise_run

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
    device: str
    options: dict[str, Any]

    @property
    def log(self) -> Path:
        """Where the engines' own output goes."""
        return self.out.with_suffix(".log")

    @property
    def progress(self) -> Path:
        """One word a line for who waits: starting, ready, served; first with the drafter, then without."""
        return self.out.with_suffix(".progress")

    def reached(self, word: str) -> None:
        """Note a stage in `progress`."""
        with self.progress.open("a") as handle:
            handle.write(word + "\n")


Serve = Callable[[Job, Path | None], Served]  # (job, drafter or None for the plain engine)


def asked_for_gpu() -> bool:
    """Whether the command line says --device cuda: needed before anything is imported."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="cpu")
    return parser.parse_known_args()[0].device == "cuda"


def installed(*packages: str) -> str:
    """Version of the first of these packages that is here."""
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    raise PackageNotFoundError(packages[0])


def run_with(**environment: str) -> None:
    """Start this process anew under an environment that Python and engines read as they start, unless it has it.

    `environment` is what the engine needs on a CPU; on a GPU the engine's own Python needs no help of ours.
    """
    wanted = {"HF_HUB_OFFLINE": "1"}
    if not asked_for_gpu():
        wanted |= {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive", **environment}
        wanted["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, "-W", "ignore", *sys.argv])


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
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default cpu")
    parser.add_argument("--options", default="{}", help='JSON object of the engine\'s own arguments: {"tp_size": 8}')
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
    try:
        options = json.loads(arguments.options)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        fail(f"--options {arguments.options}: expected a JSON object of the engine's arguments")
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
        device=arguments.device,
        options=options,
    )
    job.log.write_text("")
    job.progress.write_text("")
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


def run(engine: str, engine_version: str, job: Job, serve: Serve) -> None:
    """Serve in child processes, one engine after the other, and write the result file.

    The engine package must be imported already: children are forked, so that it is imported once for both runs.
    """
    deadline = time.monotonic() + job.timeout
    spec = base = None
    try:
        if job.drafter is not None:
            job.reached("starting")
            spec = run_in_child(lambda: serve(job, job.drafter), job.log, deadline, f"{engine} with the drafter")
            job.reached("served")
        if job.drafter is None or job.compare:
            job.reached("starting")
            base = run_in_child(lambda: serve(job, None), job.log, deadline, f"{engine} without a drafter")
            job.reached("served")
    except ChildError as error:
        fail(f"{error}\n(time limit: --timeout {job.timeout:g})")
    finally:
        job.progress.unlink(missing_ok=True)
    divergences = first_divergences(base.outputs, spec.outputs) if spec and base else None
    result = {
        "engine": engine,
        "version": engine_version,
        "dtype": job.dtype,
        "device": job.device,
        "steps": job.steps,
        "spec": {**summarise_counters(spec, job.steps), **summarise_run(spec)} if spec else None,
        "base": summarise_run(base) if base else None,
        "identical": None if divergences is None else not divergences,
        "first_divergence": divergences or [],
    }
    write_atomically(job.out, json.dumps(result, indent=1) + "\n")
    print(_headline(engine, engine_version, result))


def _headline(engine: str, engine_version: str, result: dict[str, Any]) -> str:
    parts = [f"{engine} {engine_version} {result['dtype']}"]
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
