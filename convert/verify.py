"""Every static check of a converted drafter, without an engine and without a GPU; headers alone unless asked."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from draftsmith.configs.console import console, out
from draftsmith.configs.errors import NONSENSE, DraftsmithError, sensible
from draftsmith.configs.files import read_json
from draftsmith.configs.target import Target, read_target
from draftsmith.convert.check import Check, Subject, failed, warned
from draftsmith.convert.checks_config import check_config
from draftsmith.convert.checks_origin import check_origin
from draftsmith.convert.checks_serving import check_serving
from draftsmith.convert.checks_tensors import check_tensors
from draftsmith.convert.context import OVERRIDE
from draftsmith.convert.dialects import NESTED_IDS, SGLANG, SPECULATORS, TOP_IDS, flattened, is_speculators, look_up
from draftsmith.convert.engine_loader import Engine, engine_checks
from draftsmith.convert.foreign import canonical_name
from draftsmith.convert.launch import serving_lines
from draftsmith.convert.layer_ids import resolve_sglang, resolve_vllm
from draftsmith.convert.record import read_record
from draftsmith.convert.served import served_spec
from draftsmith.convert.source import drafter_files
from draftsmith.convert.tensors import FileTensor

COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}


def verify(
    drafter: Path,
    target: Path,
    *,
    store: Path | None = None,
    deep: bool = False,
    engines: tuple[Engine, ...] = (),
    pythons: Mapping[Engine, Path] | None = None,
) -> list[Check]:
    """Check a drafter folder against what SGLang 0.5.23 and vLLM 0.32.0 will do with it.

    Args:
        drafter: a folder with config.json and safetensors weights.
        target: the target's folder.
        store: a harvest whose taps and target must be the drafter's.
        deep: read every tensor (values, the embedding, recorded hashes); else headers, maps and norms only.
        engines: ask these engines themselves too, each in its own virtual environment (`engine_loader`).
        pythons: their interpreters, where they are not in the usual places.

    Raises:
        DraftsmithError: the folders themselves, or their config.json, cannot be read.
    """
    return run_checks(examine(drafter, read_target(target), store=store, deep=deep), engines, pythons or {})


def run_checks(subject: Subject, engines: tuple[Engine, ...], pythons: Mapping[Engine, Path]) -> list[Check]:
    """Every check of a drafter that was read; see `verify`."""
    checks = [
        check for part in (check_config, check_tensors, check_serving, check_origin) for check in _ask(part, subject)
    ]
    for engine in engines:
        checks += engine_checks(subject.folder, subject.target, engine, python=pythons.get(engine))
    return [*checks, *_environment()]


def _ask(part: Callable[[Subject], Iterator[Check]], subject: Subject) -> Iterator[Check]:
    """The checks of one part; a value of a kind that no check expects ends the part with a fault instead of all."""
    try:
        yield from part(subject)
    except NONSENSE as error:
        name = part.__name__.removeprefix("check_") + ".sense"
        yield failed(name, f"a value makes no sense: {type(error).__name__}: {error}", subject.convert_command)
    except DraftsmithError as error:
        yield failed(part.__name__.removeprefix("check_") + ".sense", _one_line(error), error.mend)


def verify_command(
    drafter: Path,
    target: Path,
    *,
    store: Path | None = None,
    deep: bool = False,
    engines: tuple[Engine, ...] = (),
    pythons: Mapping[Engine, Path] | None = None,
    as_json: bool = False,
) -> bool:
    """Run `verify` and print it, with the lines that launch both engines; True if nothing failed."""
    subject = examine(drafter, read_target(target), store=store, deep=deep)
    checks = run_checks(subject, engines, pythons or {})
    counts = Counter(str(check.status) for check in checks)
    lines = serving_lines(drafter, subject.target, subject.written)
    good = counts["fail"] == 0
    if as_json:
        report = {"drafter": str(drafter), "ok": good, "checks": [asdict(check) for check in checks], "launch": lines}
        out.print(json.dumps(report, indent=2), markup=False, highlight=False)
        return good
    out.print(report_table(drafter, checks))
    for check in checks:
        if check.status == "fail" and check.mend:
            out.print(Text.assemble(("mend ", "red"), f"{check.name}: {check.mend}"))
    if good:
        for engine, line in lines.items():
            out.print(Text.assemble((f"{engine}: ", "green"), line))
    summary = ", ".join(
        f"{counts[status]} {word}" for status, word in (("pass", "passed"), ("warn", "warned"), ("fail", "failed"))
    )
    console.print(Text.assemble(("good " if good else "refused ", "green" if good else "red"), f"{drafter}: {summary}"))
    return good


def report_table(drafter: Path, checks: list[Check]) -> Table:
    """One row a check."""
    view = Table(title=f"verify {drafter}", title_justify="left")
    for column in ("check", "", "what was found"):
        view.add_column(column, overflow="fold")
    for check in checks:
        view.add_row(check.name, Text(check.status, style=COLOURS[check.status]), Text(check.message))
    return view


def examine(folder: Path, target: Target, *, store: Path | None, deep: bool) -> Subject:
    """Read what the checks look at; faults of the weights and of the dimensions become findings, not errors.

    Raises:
        DraftsmithError: the folder or its config.json cannot be read, or makes no sense.
    """
    with sensible("the drafter", folder, "correct its config.json, or fetch the folder again"):
        return _examine(folder, target, store=store, deep=deep)


def _examine(folder: Path, target: Target, *, store: Path | None, deep: bool) -> Subject:
    if not folder.is_dir():
        raise DraftsmithError(
            "the drafter folder does not exist", where=folder, mend="draftsmith convert ... --out " + str(folder)
        )
    mend = "convert a training checkpoint first: draftsmith convert CHECKPOINT --target TARGET --out FOLDER"
    written = read_json(folder / "config.json", what="the drafter's config.json", mend=mend)
    raw: list[FileTensor] | None = None
    raw_fault: str | None = None
    try:
        with sensible("the weights", folder):
            raw = drafter_files(folder)
    except DraftsmithError as error:
        raw_fault = _one_line(error)
    tensors = {canonical_name(SGLANG, tensor.name.removeprefix("model.")): tensor for tensor in raw or []}
    config = flattened(SPECULATORS, written) if is_speculators(written) else written
    subject = Subject(
        folder, target, written, config, raw, raw_fault, tensors, read_record(folder), None, None, store, deep
    )
    # Taps and RoPE have checks of their own; here they only have to stand for something.
    taps = subject.trained_taps or _served_taps(subject)
    bias = "fc.bias" in tensors
    try:
        with sensible("config.json", folder):
            spec = served_spec(config, target, folder / "config.json", taps=taps, rope=target.rope, fc_bias=bias)
    except DraftsmithError as error:
        return replace(subject, spec_fault=_one_line(error))
    return replace(subject, spec=spec)


def _served_taps(subject: Subject) -> tuple[int, ...]:
    found, target = look_up(subject.config, TOP_IDS if subject.speculators else NESTED_IDS), subject.target
    ids = found if isinstance(found, list) and found and all(type(item) is int for item in found) else None
    if subject.speculators:
        return resolve_vllm("v1", ids, None, target.num_layers)
    return resolve_sglang(target.architecture, ids, target.num_layers)


def _one_line(error: DraftsmithError) -> str:
    found = f" (found {error.found})" if error.found is not None else ""
    return "; ".join(part.strip() for part in error.problem.splitlines()) + found


def _environment() -> list[Check]:
    """Switches of SGLang in this shell that would fake or hide a result."""
    said = {
        "SGLANG_SIMULATE_ACC_LEN": "SGLang would report an invented accept length",
        OVERRIDE: "SGLang would only warn of a drafter whose context is too short",
    }
    return [
        warned("environment", f"{name} is set: {effect}", f"unset {name}")
        for name, effect in said.items()
        if os.environ.get(name)
    ]
