"""What an engine itself says of a drafter: its own loader on the CPU, and three recurrent drafts of its own class.

The engine lives in a virtual environment of its own, where this package is not installed: a script of
`draftsmith/engines` runs there and leaves a report, which becomes checks here.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import draftsmith
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import read_json
from draftsmith.configs.target import Target
from draftsmith.convert.check import Check, failed, passed, warned
from draftsmith.convert.read import read_drafter
from draftsmith.convert.record import read_record

Engine = Literal["sglang", "vllm"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
TITLES: Mapping[Engine, str] = {"sglang": "SGLang", "vllm": "vLLM"}

TOLERANCE = 1e-4
"""Largest difference of the forwards, as a share of the engine's largest value; equal networks stay below 2e-6."""

TIME_LIMIT = 900.0
"""Seconds for one engine with one drafter; importing the engine takes most of the usual half minute."""


def parse_engines(names: list[str]) -> tuple[Engine, ...]:
    """`sglang`, `vllm` or `both`, any number of times, to engines in a fixed order.

    Raises:
        DraftsmithError: another name.
    """
    for name in names:
        if name not in (*ENGINES, "both"):
            raise DraftsmithError(
                "no such engine", where="--engine", found=name, expected=", ".join((*ENGINES, "both"))
            )
    return tuple(engine for engine in ENGINES if engine in names or "both" in names)


def parse_pythons(values: list[str], engines: tuple[Engine, ...]) -> dict[Engine, Path]:
    """`ENGINE=PATH`, or a bare PATH for the only engine.

    Raises:
        DraftsmithError: a bare path for more than one engine or none, or a name that is not among `engines`.
    """
    found: dict[Engine, Path] = {}
    for value in values:
        named = [engine for engine in engines if value.startswith(f"{engine}=")]
        if not named and len(engines) != 1:
            raise DraftsmithError(
                "it is not said which engine this Python belongs to",
                where="--engine-python",
                found=value,
                expected="ENGINE=PATH for an engine that --engine names",
            )
        engine = named[0] if named else engines[0]
        found[engine] = Path(value.removeprefix(f"{engine}=")).expanduser()
    return found


def engine_checks(
    folder: Path, target: Target, engine: Engine, *, python: Path | None = None, limit: float = TIME_LIMIT
) -> list[Check]:
    """Load a drafter with `engine` and draft with it, beside our own forward.

    Args:
        folder: a converted drafter.
        python: the engine's interpreter or virtual environment; default: see `find_python`.
        limit: seconds after which the engine is ended.

    Returns:
        `engine.NAME.load` (every tensor reaches a parameter, every parameter is written, the draft ids' target ids),
        `engine.NAME.context` and, unless the load failed too early, `engine.NAME.forward`.
    """
    load, title = f"engine.{engine}.load", TITLES[engine]
    mend = f"build it with scripts/setup_engine.sh {engine}, or name one: --engine-python PATH"
    interpreter, looked = find_python(engine, python)
    if interpreter is None:
        return [failed(load, f"no Python with {title} in {', '.join(looked)}", mend)]
    with tempfile.TemporaryDirectory(prefix="draftsmith-audit-") as scratch:
        out = Path(scratch) / "audit.json"
        fault = _run(engine, interpreter, folder, target, out, limit)
        if fault is not None:
            return [failed(load, f"{title} could not be asked: {fault}", mend)]
        answer = read_json(out, what="the engine's report")
        return report_checks(engine, answer["version"], answer["reports"][0], folder, target)


def report_checks(engine: Engine, version: str, report: Mapping[str, Any], folder: Path, target: Target) -> list[Check]:
    """The checks that one drafter's part of an audit amounts to; the file that its "golden" names must still be there."""
    checks = [_load_check(engine, version, report, folder, target)]
    if "config" in report:
        checks.append(_context_check(engine, report["config"], target))
    if report.get("golden") or report.get("forward_error"):
        checks.append(_forward_check(engine, report, folder, target))
    return checks


def find_python(engine: Engine, given: Path | None = None) -> tuple[Path | None, list[str]]:
    """The engine's interpreter, None if there is none, and the places that were looked at.

    In this order: `given`; $DRAFTSMITH_SGLANG_PYTHON or $DRAFTSMITH_VLLM_PYTHON; $DRAFTSMITH_VENVS/ENGINE; .venvs/ENGINE
    under the current folder; .venvs/ENGINE of the repository that this package is installed from. A folder stands for
    its bin/python.
    """
    variable = f"DRAFTSMITH_{engine.upper()}_PYTHON"
    if given is not None:
        candidates = [given]
    elif os.environ.get(variable):
        candidates = [Path(os.environ[variable])]
    else:
        roots = [Path.cwd() / ".venvs", Path(draftsmith.__file__).resolve().parents[2] / ".venvs"]
        if os.environ.get("DRAFTSMITH_VENVS"):
            roots.insert(0, Path(os.environ["DRAFTSMITH_VENVS"]))
        candidates = [root / engine for root in roots]
    pythons = [path / "bin" / "python" if path.is_dir() else path for path in candidates]
    found = next((path.absolute() for path in pythons if path.is_file() and os.access(path, os.X_OK)), None)
    return found, [str(path) for path in dict.fromkeys(pythons)]


def _run(engine: Engine, python: Path, folder: Path, target: Target, out: Path, limit: float) -> str | None:
    """Run the engine's script; what went wrong if it left no report."""
    script = Path(draftsmith.__file__).resolve().parent / "engines" / f"{engine}_load_audit.py"
    command = [str(python), str(script), "--target", str(target.path.resolve()), "--drafter", str(folder.resolve())]
    try:
        done = subprocess.run([*command, "--out", str(out), "--forward"], capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"no answer within {limit:g} seconds; {_tail(out.with_suffix('.log'))}"
    except OSError as error:
        return f"{python} does not start: {error}"
    if out.is_file():
        return None
    said = (done.stderr or done.stdout).strip().splitlines()
    return f"{python} ended with {done.returncode}: {said[-1] if said else _tail(out.with_suffix('.log'))}"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return f"it last said: {lines[-1]}" if lines else "it said nothing"


def _load_check(engine: Engine, version: str, report: Mapping[str, Any], folder: Path, target: Target) -> Check:
    name, title = f"engine.{engine}.load", f"{TITLES[engine]} {version}"
    if report["faults"]:
        return failed(
            name,
            f"{title}: " + "; ".join(report["faults"]),
            f"write the folder afresh: draftsmith convert CHECKPOINT --target {target.path} --out {folder} --overwrite",
        )
    config = report["config"]
    return passed(
        name,
        f"{title} loads it as {config['class'].rpartition('.')[2]}: every tensor reaches a parameter, every parameter "
        f"is written, {config['draft_vocab_size']:,} draft ids of {config['vocab_size']:,}",
    )


def _context_check(engine: Engine, config: Mapping[str, Any], target: Target) -> Check:
    name, derived, wanted = f"engine.{engine}.context", config["context_length"], target.context_length
    if derived >= wanted:
        return passed(name, f"{TITLES[engine]} derives {derived:,} tokens, the target's {wanted:,}")
    found = f"{TITLES[engine]} derives {derived:,} tokens, the target has {wanted:,}"
    mend = f"set max_position_embeddings to {wanted} in config.json"
    return failed(name, found, mend) if engine == "sglang" else warned(name, found, mend)


def _forward_check(engine: Engine, report: Mapping[str, Any], folder: Path, target: Target) -> Check:
    """The other side is the network of draftsmith.json, where there is one; else what config.json means to us."""
    name, title = f"engine.{engine}.forward", TITLES[engine]
    mend = (
        "training and config.json describe two networks: compare norms, taps, RoPE and flags with draftsmith.json, "
        "or convert the checkpoint again"
    )
    if "forward_error" in report:
        return failed(name, f"{title}'s forward stops: {report['forward_error']}", mend)
    from safetensors.torch import load_file

    from draftsmith.convert.engine_forward import compare, load_drafter

    golden = load_file(report["golden"])
    try:
        drafter = load_drafter(read_drafter(folder, target), target)
    except DraftsmithError as error:
        return failed(name, f"{title} drafts, but the drafter cannot be read here: {error.problem}", error.mend)
    features, ours = golden["features"].shape[1], len(drafter.spec.taps) * drafter.spec.target_hidden_size
    if features != ours:
        return failed(name, f"{title} reads {features} features a token, training had {ours}", mend)
    differences = compare(drafter, golden)
    worst = max(differences, key=lambda difference: difference.relative)
    for difference in differences:
        if difference.relative > TOLERANCE:
            return failed(
                name,
                f"{title} computes something else from {difference.step} on: {difference.what} differ by "
                f"{difference.absolute:.3g}, {difference.relative:.2%} of the largest; at worst {worst.relative:.2%} "
                f"({worst.step}, {worst.what})",
                mend,
            )
    return passed(
        name,
        f"{title}'s class and {'the trained network' if read_record(folder) else 'our reading of config.json'} agree over prefill and {len(golden['logits']) - 1} recurrent drafts: "
        f"logits and hidden states within {worst.relative:.1e} of the largest value ({worst.step}, {worst.what})",
    )
