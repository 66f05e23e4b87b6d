"""`draftsmith serve-check`: serve held-out prompts with a real engine, and set its counters beside the prediction.

The verdict is good when the engine's greedy answers are the same with and without the drafter (asserted in float32, where
they must be), its acceptance is the predicted one, and there is any. If not, the folder is checked and probed, and the
likely cause named. A drafter that slows its engine down is warned of: that may be the machine's fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from draftsmith.accept.compare import Comparison, compare, difference_text, predicted_steps, worst_difference
from draftsmith.accept.evaluate import drafter_chains
from draftsmith.accept.known import evaluation_of
from draftsmith.accept.local import serve_locally
from draftsmith.accept.overlap import trained_on, warn_of_trained
from draftsmith.accept.remote import serve_remotely
from draftsmith.accept.report import write_served
from draftsmith.accept.requests import Request, heldout_requests, prompts_document
from draftsmith.configs.console import closing, console, out, table
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import write_json
from draftsmith.configs.schema import RunConfig
from draftsmith.configs.target import Target, read_target
from draftsmith.convert.engine_loader import TITLES, Engine
from draftsmith.convert.read import read_drafter
from draftsmith.convert.verify import verify
from draftsmith.data.store import HarvestReader
from draftsmith.train.inputs import check_store

PROBED = 24
"""Conversations of the probe behind a difference."""

IDLE = 1.05
"""Below this served accept length next to nothing of what is drafted is right: no prediction makes that good."""


class ServeCheck(BaseModel):
    """serve-check-ENGINE.json.

    Attributes:
        good: the verdict.
        identical: greedy answers with and without the drafter are equal; None if that was not asked.
        tokens_per_second: with and without the drafter; None where nothing was served without.
        causes: what explains a bad verdict, likeliest first.
        warnings: what a person should know of, whatever the verdict.
        trained_on: ids of conversations whose prompts stand in the training text; None where that is not there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    engine: str
    version: str
    drafter: str
    dtype: str | None
    requests: int
    comparison: Comparison
    identical: bool | None
    first_divergence: list[dict[str, Any]]
    tokens_per_second: dict[str, float | None]
    good: bool
    verdict: str
    causes: list[str]
    warnings: list[str] = []
    trained_on: list[str] | None = None


def serve_check(
    engine: Engine,
    config: RunConfig,
    *,
    drafter: Path | None = None,
    steps: int | None = None,
    conversations: int | None = None,
    url: str | None = None,
    plain_url: str | None = None,
    python: Path | None = None,
    start_limit: float = 300.0,
    limit: float = 1800.0,
    max_running: int = 24,
    device: Literal["cpu", "cuda"] = "cpu",
    options: Mapping[str, Any] | None = None,
    explain: bool = True,
    as_json: bool = False,
) -> ServeCheck:
    """Serve, compare, print, and write `serve-check-ENGINE.json` into the run's folder.

    Args:
        drafter: a converted folder; default: the run's. With `url` it only predicts: it must be what the server drafts with.
        steps: drafted tokens a chain; default: the configured depth. A running server's own depth counts.
        conversations: serve the first so many; default: all held-out ones.
        url, plain_url: servers that run already, with the drafter and (if there is one) without.
        python: the engine's Python or environment, for a local run.
        start_limit, limit: seconds for an engine to be ready, and for everything.
        device, options: of a local engine, and its own further arguments.

    Raises:
        DraftsmithError: the engine is not ready in time, dies, reports no counters; or the inputs do not fit together.
    """
    for option, number in (("--limit", conversations), ("--steps", steps), ("--max-running", max_running)):
        if number is not None and number < 1:
            raise DraftsmithError(
                "nothing can be served with that", where=option, found=number, expected="1 or more",
                mend=f"name a number from 1 on, or leave {option} out",
            )  # fmt: skip
    folder = drafter or config.drafter_folder
    target = read_target(config.target.path)
    canonical = read_drafter(folder, target)
    reader = HarvestReader(config.store("heldout"))
    check_store(reader, target, canonical.spec.taps)
    requests = heldout_requests(config, conversations)
    asked: dict[str, Sequence[int]] = {}
    for one in requests:
        asked.setdefault(one.conversation, one.input_ids)
    trained = trained_on(config, asked)
    warn_of_trained(trained)
    prompts, depth = prompts_document(config, requests), steps or config.evaluate.draft_steps
    result_file = config.folder / f"serve-check-{engine}.json"
    served_file = result_file.with_suffix(".served.json")
    if url is not None:
        result = serve_remotely(
            engine, url, plain_url, prompts, steps=depth, start_limit=start_limit, limit=limit, concurrency=max_running
        )
        depth = result["steps"]
    else:
        console.print(
            f"serve-check: {len(requests)} requests with {TITLES[engine]}, {depth} drafts a chain, log "
            f"{served_file.with_suffix('.log')}", highlight=False,
        )  # fmt: skip
        result = serve_locally(
            engine, target=target.path, drafter=folder, prompts=prompts, out=served_file,
            steps=depth, python=python, start_limit=start_limit, limit=limit, max_running=max_running,
            device=device, options=options,
        )  # fmt: skip
    chains = drafter_chains(canonical, target, reader, config, draft_steps=depth, quiet=True)
    predicted = predicted_steps(chains, {name: n for n, name in enumerate(reader.ids)}, requests, depth)
    comparison = compare(predicted, requests, result["spec"], depth)
    found = conclude(engine, folder, result, comparison, requests).model_copy(update={"trained_on": trained})
    if not found.good and explain:
        found = found.model_copy(update={"causes": likely_causes(config, target, folder, comparison, found)})
    write_json(result_file, found.model_dump(mode="json"))
    _, page = write_served(
        found.model_dump(mode="json"), result_file, evaluation_of(config, canonical.origin, reader.path, chains, depth)
    )
    if as_json:
        out.print_json(data=found.model_dump(mode="json"))
    else:
        show(found)
    closing(f"{result_file} and {page.name}")
    return found


def conclude(
    engine: Engine, folder: Path, result: Mapping[str, Any], comparison: Comparison, requests: Sequence[Request]
) -> ServeCheck:
    """The verdict, in words."""
    must_equal = result["dtype"] == "float32"
    differs = result["identical"] is False
    faults = []
    if differs and must_equal:
        faults.append(
            f"{len(result['first_divergence'])} of {len(requests)} answers differ from those without the drafter"
        )
    if not comparison.agrees:
        faults.append(f"predicted and served acceptance differ, {worst_difference(comparison)}")
    base = result["base"]
    with_, without = result["spec"]["tokens_per_second"], base["tokens_per_second"] if base else None
    length, warnings = comparison.served.accept_length, []
    idle = length < IDLE
    verdict = "; ".join(faults) if faults else "served as predicted"
    if idle:
        verdict += "; the drafter drafts nothing that is right" if faults else ", and it drafts nothing that is right"
        warnings.append(
            f"accept_length@{comparison.steps} is {length:.3f} as served, where 1 is a drafter that is never right"
        )
    if without is not None and with_ < without:
        warnings.append(f"slower with the drafter: {with_:.1f} tokens/s with, {without:.1f} without")
    return ServeCheck(
        engine=engine,
        version=result["version"],
        drafter=str(folder),
        dtype=result["dtype"],
        requests=len(requests),
        comparison=comparison,
        identical=result["identical"],
        first_divergence=list(result["first_divergence"])[:8],
        tokens_per_second={"with": with_, "without": without},
        good=not faults and not idle,
        verdict=verdict,
        causes=[],
        warnings=warnings,
    )


def likely_causes(
    config: RunConfig, target: Target, folder: Path, comparison: Comparison, found: ServeCheck
) -> list[str]:
    """What explains the difference: faults of the folder, then what a probe finds, then what is left."""
    from draftsmith.accept.network import read_network
    from draftsmith.accept.probe import judge
    from draftsmith.accept.spot import harvest_spot
    from draftsmith.accept.variants import needed_taps

    console.print("  looking for the cause: the folder's checks, then a probe", highlight=False)
    causes = [
        f"{check.name}: {check.message}" for check in verify(folder, target.path, deep=True) if check.status == "fail"
    ]
    try:
        network = read_network(folder, target)
        spots = harvest_spot(config, needed_taps(network), PROBED, 1024)
        probed = judge(str(folder), network, target, spots, min(3, comparison.steps))
        causes += [f"{finding.name}: {finding.cause} ({finding.number})" for finding in probed.findings]
    except DraftsmithError as error:
        causes.append(f"the drafter could not be probed: {error.problem}")
    if comparison.other_text > len(comparison.position_differences) and comparison.other_text * 10 > found.requests:
        causes.append(
            f"{comparison.other_text} of {found.requests} answers are not the harvested ones: another target, precision or "
            "chat template is served than was harvested"
        )
    if not causes and comparison.agrees and found.identical is not False:
        causes.append(
            "the drafter itself: the replay predicts the same, its folder passes every check and its description fits its "
            "weights; it has learnt next to nothing, or was trained on other text or another target"
        )
    if not causes:
        causes.append(
            "the folder passes every check and its description fits its weights: the engine itself computes something else "
            f"(draftsmith verify {folder} --target {target.path} --engine {found.engine})"
        )
    return causes


def show(found: ServeCheck) -> None:
    """The table and the verdict."""
    one = found.comparison
    pairs = [
        (
            f"accept_length@{one.steps}",
            one.predicted.accept_length,
            one.served.accept_length,
            one.within and one.within.accept_length,
        )
    ]
    for i, (p, s) in enumerate(zip(one.predicted.accept_per_position, one.served.accept_per_position, strict=True)):
        within = one.within.accept_per_position[i] if one.within else None
        pairs.append((f"first {i + 1} drafts right" if i else "first draft right", p, s, within))
    differences: list[float | None] = [one.length_difference, *one.position_differences]
    rows = [
        [name, f"{p:.3f}", f"{s:.3f}", "-" if w is None else f"{w:.3f}", difference_text(d)]
        for (name, p, s, w), d in zip(pairs, differences, strict=True)
    ]
    columns = ["", "predicted", "served", "served, within answers", "difference"]
    title = f"{TITLES[found.engine]} {found.version}: {found.requests} requests, {one.served.verify_steps:,} verify steps, bonus token included"  # type: ignore[index]
    out.print(table(title, columns, rows))
    with_, without = found.tokens_per_second["with"], found.tokens_per_second["without"]
    speed = f"{with_:.1f} tokens/s with the drafter" + (f", {without:.1f} without" if without else "")
    same = {
        True: "identical with and without the drafter",
        False: "DIFFERENT with and without the drafter",
        None: "not compared",
    }
    lines = [("tokens/s", speed), ("answers", same[found.identical])]
    if one.within is not None:
        lines.append(
            (
                "requests",
                f"{one.exact} exactly as predicted, {one.inexact} not, {one.other_text} with another text than harvested",
            )
        )
    for label, text in lines:
        out.print(f"  {label}: {text}", highlight=False)
    out.print(
        f"{'good' if found.good else 'BAD'}: {found.verdict}", style="green" if found.good else "red", highlight=False
    )
    for warning in found.warnings:
        out.print(f"  warning: {warning}", style="yellow", highlight=False, markup=False)
    for cause in found.causes:
        out.print(f"  likely cause: {cause}", highlight=False, markup=False)
