"""`draftsmith evaluate`: the accept length of any drafter that we can read, replayed on a held-out store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftsmith.configs.console import closing, console, out, table
from draftsmith.configs.files import write_json
from draftsmith.configs.schema import RunConfig
from draftsmith.configs.target import Target, read_target
from draftsmith.convert.canonical import CanonicalDrafter
from draftsmith.convert.engine_forward import load_drafter
from draftsmith.convert.read import read_drafter
from draftsmith.convert.tensors import read_array
from draftsmith.data.conversations import read_conversations
from draftsmith.data.store import HarvestReader
from draftsmith.train.evaluate import Chains, Evaluation, replay, summarize
from draftsmith.train.inputs import check_store


def evaluate(
    config: RunConfig, *, drafter: Path | None = None, store: Path | None = None, as_json: bool = False
) -> Path:
    """Replay greedy chains and write what they say.

    Args:
        drafter: a checkpoint or converted folder; default: the run's best checkpoint.
        store: default: the run's held-out store.
        as_json: print the result on standard output instead of a table.

    Returns:
        The JSON file in the run's folder: `evaluate.json`, or `evaluate-DRAFTER-on-STORE.json` with the names of the
        folders that were given.
    """
    target = read_target(config.target.path)
    reader = HarvestReader(store or config.store("heldout"))
    canonical = read_drafter(drafter or config.training, target)
    check_store(reader, target, canonical.spec.taps)
    chains = drafter_chains(canonical, target, reader, config)
    categories = _categories(config, reader) if store is None else None
    evaluation = summarize(chains, config.evaluate.draft_steps, categories)
    parts = [
        "evaluate",
        *([drafter.resolve().name] if drafter else []),
        *(["on", store.resolve().name] if store else []),
    ]
    result = config.folder / f"{'-'.join(parts)}.json"
    content: dict[str, Any] = {
        "drafter": str(canonical.origin),
        "dialect": canonical.dialect,
        "store": str(reader.path),
        **evaluation.model_dump(mode="json"),
    }
    write_json(result, content)
    if as_json:
        out.print_json(data=content)
    else:
        _show(evaluation)
    closing(
        f"{result} (drafter: {canonical.origin})",
        f"draftsmith convert {config.training} --target {config.target.path} --out {config.drafter_folder}"
        if drafter is None
        else None,
    )
    return result


def drafter_chains(
    canonical: CanonicalDrafter, target: Target, reader: HarvestReader, config: RunConfig
) -> dict[int, Chains]:
    """Load a drafter in float32 and replay the store's conversations with it."""
    drafter = load_drafter(canonical, target)
    d2t = torch.from_numpy(read_array(canonical.tensors["d2t"]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = config.evaluate
    return replay(drafter.to(device), torch.arange(len(d2t)) + d2t, reader, settings.draft_steps, settings.batch_tokens)


def _categories(config: RunConfig, reader: HarvestReader) -> dict[int, str]:
    """Prompt category of each conversation of the store, where the run's conversations are still there."""
    file = config.conversations("heldout")
    if not file.is_file():
        return {}
    named = {conversation.id: conversation.category for conversation in read_conversations(file)}
    return {index: named[name] for index, name in enumerate(reader.ids) if name in named}


def _show(evaluation: Evaluation) -> None:
    steps = evaluation.draft_steps
    columns = ["chains", *(f"accept_{i}" for i in range(steps)), f"accept_length@{steps}", "95 % interval"]
    lines = [("as served", evaluation.as_served), ("all positions", evaluation.all_positions)]
    lines += [(f"context {name}", value) for name, value in evaluation.by_context.items()]
    lines += sorted(evaluation.by_category.items(), key=lambda item: -item[1].accept_length)
    rows = [
        [
            f"{name} ({value.chains:,})",
            *(f"{share:.3f}" for share in value.accept_per_position),
            f"{value.accept_length:.3f}",
            f"{value.interval[0]:.3f} - {value.interval[1]:.3f}",
        ]
        for name, value in lines
    ]
    out.print(
        table(
            f"accept length on {evaluation.conversations} held-out conversations, greedy, bonus token included",
            columns,
            rows,
        )
    )
    console.print(f"labels outside the draft vocabulary: {evaluation.outside_share:.1%}", highlight=False)
