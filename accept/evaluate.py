"""`draftsmith evaluate`: the accept length of any drafter that we can read, replayed on a held-out store.

One pass drafts chains of up to eight tokens from every supervised index; every shallower depth, the walk that an engine
would take at it, and both rules of sampled verification follow from the same pass.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.accept.overlap import first_prompts, trained_on, warn_of_trained
from draftsmith.accept.report import interval_text, write_evaluation
from draftsmith.accept.sampled import Sampled, SampledObserver
from draftsmith.configs.console import closing, console, out, table
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import read_json, write_json
from draftsmith.configs.schema import RunConfig
from draftsmith.configs.target import Target, read_target
from draftsmith.convert.canonical import CanonicalDrafter
from draftsmith.convert.engine_forward import load_drafter
from draftsmith.convert.identity import weight_digests
from draftsmith.convert.read import read_drafter
from draftsmith.convert.tensors import read_array
from draftsmith.data.conversations import read_conversations
from draftsmith.data.store import HarvestReader
from draftsmith.train.evaluate import CONTEXT_BUCKETS, Acceptance, Chains, Evaluation, Observer, replay, summarize
from draftsmith.train.inputs import check_store
from draftsmith.train.stale import warn_of_stale_heldout

DEPTHS = 8
"""The deepest chain that is reported."""


class Measured(Evaluation):
    """`Evaluation` at the configured depth, and what the same pass says of other depths and of sampling.

    Attributes:
        depths: K -> acceptance as served at that depth, for K = 1..8.
        depths_all_positions: K -> acceptance of chains from every index.
        acc_deep: acc_i to the deepest of them.
        sampled: one entry a temperature.
        context_length: the target's; buckets of `by_context` reach up to it.
        tokens: rows of the conversations replayed. seconds: the pass took so long, reading included.
    """

    depths: dict[int, Acceptance]
    depths_all_positions: dict[int, Acceptance]
    acc_deep: list[float]
    sampled: list[Sampled]
    context_length: int
    tokens: int
    seconds: float
    tokens_per_second: float


def evaluate(
    config: RunConfig,
    *,
    drafter: Path | None = None,
    store: Path | None = None,
    temperatures: tuple[float, ...] = (1.0,),
    as_json: bool = False,
) -> Path:
    """Replay chains and write what they say.

    Args:
        drafter: a checkpoint or converted folder; default: the run's best checkpoint.
        store: default: the run's held-out store.
        temperatures: of sampled verification; none: greedy figures alone.
        as_json: print the result on standard output instead of tables.

    Returns:
        The JSON file in the run's folder: `evaluate.json`, or `evaluate-DRAFTER-on-STORE.json` with the names of the
        folders that were given.
    """
    check_temperatures(temperatures)
    target = read_target(config.target.path)
    reader = HarvestReader(store or config.store("heldout"))
    canonical = read_drafter(drafter or config.training, target)
    check_store(reader, target, canonical.spec.taps)
    if store is None:
        warn_of_stale_heldout(config, reader)
    trained = trained_on(config, dict(first_prompts(reader)))
    warn_of_trained(trained)
    measured = measure(
        canonical, target, reader, config, temperatures, categories_of(config, reader) if store is None else None
    )
    parts = [
        "evaluate",
        *([drafter.resolve().name] if drafter else []),
        *(["on", store.resolve().name] if store else []),
    ]
    result = config.folder / f"{'-'.join(parts)}.json"
    content: dict[str, Any] = {
        "drafter": str(canonical.origin),
        "dialect": canonical.dialect,
        "weights": weight_digests(canonical),
        "store": str(reader.path),
        "trained_on": trained,
        **measured.model_dump(mode="json"),
    }
    write_json(result, content)
    _, page = write_evaluation(read_json(result, what="the evaluation"), result)
    if as_json:
        out.print_json(data=content)
    else:
        _show(measured)
    closing(
        f"{result} and {page.name} (drafter: {canonical.origin})",
        f"draftsmith convert {config.training} --target {config.target.path} --out {config.drafter_folder}"
        if drafter is None
        else None,
    )
    return result


def check_temperatures(temperatures: tuple[float, ...]) -> None:
    """Stop at a temperature that is none; greedy is not temperature 0 here but the figures that are always there."""
    if not all(0 < temperature < float("inf") for temperature in temperatures):
        raise DraftsmithError(
            "a temperature must be above 0; greedy figures are always there",
            where="--temperature", found=list(temperatures), expected="for instance 1.0",
        )  # fmt: skip


def measure(
    canonical: CanonicalDrafter,
    target: Target,
    reader: HarvestReader,
    config: RunConfig,
    temperatures: tuple[float, ...] = (),
    categories: dict[int, str] | None = None,
) -> Measured:
    """Load a drafter in float32 and replay the store's conversations with it, all depths in one pass."""
    began, settings = time.monotonic(), config.evaluate
    deepest = max(DEPTHS, settings.draft_steps)
    drafter, targets = load_drafter(canonical, target).to(device()), draft_targets(canonical)
    observer = None
    if temperatures:
        greedy = [conversation.greedy for conversation in reader.manifest.stored]
        head = target.require("head").load()
        observer = SampledObserver(drafter, targets, head, greedy, temperatures, deepest)
    chains = replay(drafter, targets, reader, deepest, settings.batch_tokens, observe=observer)
    seconds = time.monotonic() - began
    tokens = sum(reader.lengths)
    capped = {
        depth: {number: chain.capped(depth) for number, chain in chains.items()} for depth in range(1, deepest + 1)
    }
    by_depth = {depth: summarize(part, depth) for depth, part in capped.items() if depth <= DEPTHS}
    return Measured(
        **summarize(capped[settings.draft_steps], settings.draft_steps, categories).model_dump(),
        depths={depth: found.as_served for depth, found in by_depth.items()},
        depths_all_positions={depth: found.all_positions for depth, found in by_depth.items()},
        acc_deep=by_depth[DEPTHS].acc,
        sampled=observer.result() if observer else [],
        context_length=target.context_length,
        tokens=tokens,
        seconds=round(seconds, 3),
        tokens_per_second=round(tokens / seconds, 1),
    )


def drafter_chains(
    canonical: CanonicalDrafter,
    target: Target,
    reader: HarvestReader,
    config: RunConfig,
    observe: Observer | None = None,
    *,
    draft_steps: int | None = None,
    quiet: bool = False,
) -> dict[int, Chains]:
    """Load a drafter in float32 and replay the store's conversations with it, at the configured depth unless told another."""
    drafter, settings = load_drafter(canonical, target).to(device()), config.evaluate
    steps = settings.draft_steps if draft_steps is None else draft_steps
    return replay(drafter, draft_targets(canonical), reader, steps, settings.batch_tokens, observe=observe, quiet=quiet)


def draft_targets(canonical: CanonicalDrafter) -> Tensor:
    """int64 (D,): target id of each draft id."""
    d2t = torch.from_numpy(read_array(canonical.tensors["d2t"]))
    return torch.arange(len(d2t)) + d2t


def device() -> torch.device:
    """Where replays run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def categories_of(config: RunConfig, reader: HarvestReader) -> dict[int, str]:
    """Prompt category of each conversation of the store, where the run's conversations are still there."""
    file = config.conversations("heldout")
    if not file.is_file():
        return {}
    named = {conversation.id: conversation.category for conversation in read_conversations(file)}
    return {index: named[name] for index, name in enumerate(reader.ids) if name in named}


def context_buckets(by_context: dict[str, Any], context_length: int) -> dict[str, Any]:
    """Every bucket up to the target's limit in order, None where no chain started in it."""
    return {name: by_context.get(name) for low, _, name in CONTEXT_BUCKETS if low < context_length}


def _show(measured: Measured) -> None:
    steps = measured.draft_steps
    lines = [("as served", measured.as_served), ("all positions", measured.all_positions)]
    contexts = context_buckets(measured.by_context, measured.context_length)
    lines += [(f"context {name}", value) for name, value in contexts.items() if value]
    lines += sorted(measured.by_category.items(), key=lambda item: -item[1].accept_length)
    rows = [
        [
            f"{name} ({value.chains:,})",
            *(f"{share:.3f}" for share in value.accept_per_position),
            f"{value.accept_length:.3f}",
            interval_text(value.interval),
        ]
        for name, value in lines
    ]
    columns = ["chains", *(f"accept_{i}" for i in range(steps)), f"accept_length@{steps}", "95 % interval"]
    title = f"accept length on {measured.conversations} held-out conversations, greedy, bonus token included"
    out.print(table(title, columns, rows))
    rows = []
    for depth, served in measured.depths.items():
        row = [str(depth), f"{served.accept_length:.3f}", interval_text(served.interval)]
        row += [
            f"{served.accept_per_position[-1]:.3f}",
            interval_text(served.position_intervals[-1] if served.position_intervals else None),
        ]
        for entry in measured.sampled:
            row += [f"{rule.accept_length[depth - 1]:.3f}" for rule in (entry.rejection, entry.target_only)]
        rows.append(row)
    columns = ["drafts (K)", "greedy, as served", "95 % interval", "all K right", "95 % interval"]
    for entry in measured.sampled:
        columns += [f"rejection sampling, T {entry.temperature:g}", f"target only, T {entry.temperature:g}"]
    out.print(table("accept_length@K, bonus token included; sampled ones over all positions", columns, rows))
    if any(entry.text != "sampled" for entry in measured.sampled):
        console.print(
            "  the text is not sampled: sampled figures take its greedy tokens for typical ones", highlight=False
        )
    empty = [name for name, value in contexts.items() if value is None]
    console.print(
        f"labels outside the draft vocabulary: {measured.outside_share:.1%}; {measured.tokens:,} tokens in "
        f"{measured.seconds:.1f} s, {measured.tokens_per_second:,.0f} tokens/s"
        + (f"; no chain starts in context {', '.join(empty)}" if empty else ""),
        highlight=False,
    )
