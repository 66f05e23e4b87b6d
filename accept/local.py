"""Start a real engine here, let it serve prompts with and without the drafter, and end it, whatever happens.

The engine runs under its own Python, by a script of `draftsmith/engines`, which notes in a progress file when an engine
is ready and when it has served. Each start has a time limit, and so has the whole.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import draftsmith
from draftsmith.accept.processes import running, tail
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import read_json, write_json
from draftsmith.convert.engine_loader import TITLES, Engine, find_python

POLL_SECONDS = 0.1

MEMORY = ", as a system does that is out of memory"


def serve_locally(
    engine: Engine,
    *,
    target: Path,
    drafter: Path,
    prompts: Mapping[str, Any],
    out: Path,
    steps: int,
    python: Path | None,
    start_limit: float,
    limit: float,
    max_running: int,
    device: Literal["cpu", "cuda"] = "cpu",
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Serve `prompts` twice, with the drafter and without, and return the script's result.

    Args:
        prompts: a document as `prompts_document` makes it.
        out: the result file; the engine's output goes beside it, `.log`.
        python: the engine's interpreter or environment; default: see `find_python`.
        start_limit: seconds in which each engine must be ready.
        limit: seconds for everything.
        device: on a CPU engines serve in float32, where greedy answers must be the same with and without the drafter; on a
            GPU in bfloat16, where they need not.
        options: the engine's own arguments, besides those that the script sets.

    Raises:
        DraftsmithError: no such engine here, it is never ready, it dies, it takes too long, or reports no counters.
            No process is left.
    """
    if "SGLANG_SIMULATE_ACC_LEN" in os.environ:
        raise DraftsmithError(
            "the engine would fake acceptance", where="environment", found="SGLANG_SIMULATE_ACC_LEN",
            mend="unset SGLANG_SIMULATE_ACC_LEN",
        )  # fmt: skip
    interpreter, looked = find_python(engine, python)
    if interpreter is None:
        raise DraftsmithError(
            f"there is no Python with {TITLES[engine]}", where=", ".join(looked),
            mend=f"scripts/setup_engine.sh {engine}, or name one: --engine-python PATH",
        )  # fmt: skip
    prompt_file, log, progress = (out.with_suffix(suffix) for suffix in (".prompts.json", ".log", ".progress"))
    write_json(prompt_file, prompts)
    out.unlink(missing_ok=True)
    progress.unlink(missing_ok=True)
    script = Path(draftsmith.__file__).resolve().parent / "engines" / f"serve_{engine}.py"
    command = [str(interpreter), str(script), "--target", str(target.resolve()), "--drafter", str(drafter.resolve())]
    command += ["--prompts", str(prompt_file), "--out", str(out), "--steps", str(steps)]
    command += ["--device", device, "--dtype", "float32" if device == "cpu" else "bfloat16"]
    command += ["--options", json.dumps(dict(options or {}))]
    command += ["--max-running", str(max_running), "--timeout", f"{limit:g}", "--compare"]
    said = out.with_suffix(".script.log")
    try:
        with running(command, said) as process:
            _wait(process, engine, progress, log, said, start_limit, limit)
        result = read_json(out, what="the served result")
        check_counters(engine, result, log)
        return result
    except OSError as error:
        raise DraftsmithError(f"{TITLES[engine]}'s Python does not start: {error}", where=interpreter) from None
    finally:
        if said.is_file() and said.stat().st_size:
            with log.open("ab") as whole:
                whole.write(said.read_bytes())
        for file in (prompt_file, said, progress):
            file.unlink(missing_ok=True)


def _wait(
    process: subprocess.Popen[bytes],
    engine: Engine,
    progress: Path,
    log: Path,
    said: Path,
    start_limit: float,
    limit: float,
) -> None:
    """Return when the script has ended well."""
    title, began = TITLES[engine], time.monotonic()
    stages, since = 0, began
    while (code := process.poll()) is None:
        words = progress.read_text().split() if progress.is_file() else []
        if len(words) != stages:
            stages, since = len(words), time.monotonic()
        waiting_for_start = not words or words[-1] == "starting"
        now = time.monotonic()
        if waiting_for_start and now - since > start_limit:
            raise DraftsmithError(
                f"{title} was not ready within {start_limit:g} seconds", where=log, found=_last(log, said),
                mend="read the log; a slow machine needs --start-timeout SECONDS",
            )  # fmt: skip
        if now - began > limit:
            raise DraftsmithError(
                f"{title} did not finish within {limit:g} seconds", where=log, found=_last(log, said),
                mend="serve fewer conversations with --limit N, or allow more with --timeout SECONDS",
            )  # fmt: skip
        time.sleep(POLL_SECONDS)
    if code != 0:
        how, found = f"exit code {code}", _last(log, said)
        if code < 0:
            how = f"killed by signal {-code} ({_signal_name(-code)})"
            found = f"{how}{MEMORY if -code == signal.SIGKILL else ''}; it said last\n    {found}"
        raise DraftsmithError(
            f"{title} ended before it had served everything, {how}", where=log, found=found,
            mend="read the log; draftsmith verify DRAFTER --target TARGET --engine " + engine + " says whether it loads",
        )  # fmt: skip


def check_counters(engine: Engine, result: Mapping[str, Any], where: object) -> None:
    """Stop at a result from which acceptance cannot be read: no answers, no counters, or not those of every answer."""
    spec = result.get("spec")
    for part, how in ((spec, "with the drafter"), (result.get("base"), "without the drafter")):
        answers = part.get("outputs") if isinstance(part, Mapping) else None
        if answers and not any(answer["output_ids"] for answer in answers):
            raise DraftsmithError(
                f"{TITLES[engine]} answered nothing at all {how}", where=where, found=f"{len(answers)} empty answers",
                expected="the tokens of an answer to each prompt", mend="read the engine's log",
            )  # fmt: skip
    needed = ("accept_length", "accept_per_position", "verify_steps", "outputs")
    missing = [name for name in needed if not isinstance(spec, Mapping) or spec.get(name) is None]
    if missing or not spec or not spec["verify_steps"]:
        raise DraftsmithError(
            f"{TITLES[engine]} reported no counters of speculative decoding", where=where,
            found=f"no {', '.join(missing)}" if missing else "0 verify steps",
            expected="verify steps and accepted drafts of every request",
            mend="serve with the drafter: draftsmith verify prints the launch line",
        )  # fmt: skip
    known = [output for output in spec["outputs"] if output.get("histogram") is not None]
    lacking = [o["id"] for o in spec["outputs"] if len(o["output_ids"]) > 1 and not sum(o.get("histogram") or [])]
    if known and lacking:  # the first token alone comes without a verify step
        raise DraftsmithError(
            f"{TITLES[engine]} reported counters of some requests only", where=where,
            found=f"none for {len(lacking)} of {len(spec['outputs'])} requests: {', '.join(lacking[:4])}",
            expected="verify steps of every answer of two tokens or more",
            mend="serve with the drafter, in every replica: draftsmith verify prints the launch line",
        )  # fmt: skip
    steps = len(spec["accept_per_position"])
    for output in spec["outputs"]:
        deepest = max((i for i, count in enumerate(output.get("histogram") or []) if count), default=0)
        if deepest > steps:
            raise DraftsmithError(
                f"{TITLES[engine]} counts more accepted drafts than a chain has", where=f"{where}, request {output['id']}",
                found=f"a verify step with {deepest} accepted drafts", expected=f"{steps} at most",
                mend="name the depth that the engine serves with: --steps N",
            )  # fmt: skip


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "no name"


def _last(log: Path, said: Path) -> str:
    return tail(said if said.is_file() and said.stat().st_size else log)
