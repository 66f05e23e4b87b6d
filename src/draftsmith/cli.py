"""The front door: one sub-command a verb. What each verb does lives in its room and is imported when it runs."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftsmith import __version__
from draftsmith.configs.console import out, report_error, table
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import SPLITS, RunConfig, load_config, preset_names

app = typer.Typer(
    name="draftsmith",
    help="Raise EAGLE-3 drafters: harvest a target's hidden states, train the drafter, prove what engines will serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[str, typer.Argument(help=f"a YAML file or a preset ({', '.join(preset_names())})", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, e.g. train.epochs=3", metavar="[KEY=VALUE]...")
]
SplitOption = Annotated[str, typer.Option("--split", help="train, heldout or both")]


def _splits(name: str) -> list[Any]:
    if name == "both":
        return list(SPLITS)
    if name in SPLITS:
        return [name]
    raise DraftsmithError("no such split", where="--split", found=name, expected=", ".join((*SPLITS, "both")))


@app.command()
def plan(config: Config, overrides: Overrides = None) -> None:
    """Print what a run would do, before anything runs."""
    from draftsmith.configs.plan import describe, make_plan
    from draftsmith.data.summary import planned_conversations

    run = load_config(config, overrides or [])
    result = make_plan(run, *planned_conversations(run))
    out.print(table(f"plan of {run.name}", ["what", "value"], [list(row) for row in describe(result, run)], left=True))


@app.command()
def synthesize(config: Config, overrides: Overrides = None, split: SplitOption = "both") -> None:
    """The target answers the prompts; goes on from what is there."""
    from draftsmith.data.synthesize import synthesize as run_verb

    run = load_config(config, overrides or [])
    for name in _splits(split):
        run_verb(run, name)


@app.command()
def inspect(
    config: Config,
    overrides: Overrides = None,
    split: Annotated[str, typer.Option("--split", help="train or heldout")] = "train",
    conversation: Annotated[str | None, typer.Option(help="its id; default: the first")] = None,
    json: Annotated[bool, typer.Option("--json", help="print everything as JSON on standard output")] = False,
) -> None:
    """Show a conversation as it will be trained on: roles, tokens, mask and labels."""
    from draftsmith.train.inspect import inspect as run_verb

    run = load_config(config, overrides or [])
    names = _splits(split)
    if len(names) > 1:
        raise DraftsmithError("one split at a time", where="--split", found=split, expected=" or ".join(SPLITS))
    run_verb(run, names[0], conversation, as_json=json)


@app.command()
def vocab(
    config: Config,
    overrides: Overrides = None,
    store: Annotated[Path | None, typer.Option(help="count over this store, not over the conversations")] = None,
) -> None:
    """Count generated tokens and choose the draft vocabulary (d2t, t2d)."""
    from draftsmith.data.vocab import build_vocab

    build_vocab(load_config(config, overrides or []), store)


@app.command()
def harvest(config: Config, overrides: Overrides = None, split: SplitOption = "both") -> None:
    """Run the target over the conversations and store its hidden states."""
    from draftsmith.data.harvest import harvest as run_verb

    run = load_config(config, overrides or [])
    for name in _splits(split):
        run_verb(run, name)


store_app = typer.Typer(help="Look into stores of hidden states, and put them together or apart.", no_args_is_help=True)
app.add_typer(store_app, name="store")
StoreFolder = Annotated[Path, typer.Argument(help="the folder of a finished store", metavar="STORE")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON on standard output")]


@store_app.command()
def check(
    store: StoreFolder,
    target: Annotated[Path | None, typer.Option(help="its target's folder: adds the teacher guard")] = None,
    json: AsJson = False,
) -> None:
    """Read every byte: hashes, counts, finite values, repeated rows, and the teacher guard; exit code 1 if one fails."""
    from draftsmith.data.store_command import check_command

    guard = None
    if target is not None:
        from draftsmith.train.store_guard import teacher_of

        guard = teacher_of(target)
    if not check_command(store, guard, as_json=json):
        raise typer.Exit(1)


@store_app.command()
def stats(
    store: StoreFolder,
    vocab: Annotated[Path | None, typer.Option(help="a draft vocabulary: tells what it covers")] = None,
    png: Annotated[Path | None, typer.Option(help="draw lengths and coverage into this file")] = None,
    json: AsJson = False,
) -> None:
    """Tokens, generated share, lengths, coverage of the draft vocabulary."""
    from draftsmith.data.store_command import stats_command

    stats_command(store, vocab, png, as_json=json)


@store_app.command()
def merge(
    out: Annotated[Path, typer.Argument(help="the folder to write")],
    stores: Annotated[list[Path], typer.Argument(help="finished stores of one target, harvested alike")],
) -> None:
    """Put several stores into one."""
    from draftsmith.data.store_edit import merge as run_verb

    run_verb(stores, out)


@store_app.command()
def split(
    store: StoreFolder,
    train: Annotated[Path, typer.Argument(help="the folder to write")],
    heldout: Annotated[Path, typer.Argument(help="the folder to write")],
    share: Annotated[float, typer.Option(help="of the conversations that are held out")] = 0.05,
    seed: int = 0,
) -> None:
    """Hold out whole conversations."""
    from draftsmith.data.store_edit import split as run_verb

    run_verb(store, train, heldout, share=share, seed=seed)


@store_app.command()
def attach(
    url: Annotated[str, typer.Argument(help="where harvest.location put a split: s3://BUCKET/PREFIX/train")],
    store: Annotated[Path, typer.Argument(help="the folder to make; only the manifest is copied")],
) -> None:
    """Use a store whose shards lie on shared storage."""
    from draftsmith.data.store_writer import attach as run_verb

    run_verb(url, store)


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    init_from: Annotated[
        Path | None,
        typer.Option(help="start from this drafter, in any form that can be converted, with its vocabulary"),
    ] = None,
) -> None:
    """Train the drafter in this process (several: accelerate launch -m draftsmith.train --config CONFIG)."""
    start = [f"train.init_from={init_from}"] if init_from else []
    run: RunConfig = load_config(config, [*(overrides or []), *start])
    from draftsmith.train.command import run as run_verb

    run_verb(run, launched=False)


@app.command()
def evaluate(
    config: Config,
    overrides: Overrides = None,
    drafter: Annotated[
        Path | None, typer.Option(help="a checkpoint or converted folder; default: the run's best checkpoint")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="a store; default: the run's held-out one")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="of sampled verification, any number of times; default: 1.0")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON on standard output")] = False,
) -> None:
    """Predict the accept length for 1 to 8 drafts by replaying chains on held-out conversations."""
    from draftsmith.accept.evaluate import evaluate as run_verb

    temperatures = tuple(temperature or (1.0,))
    run_verb(
        load_config(config, overrides or []), drafter=drafter, store=store, temperatures=temperatures, as_json=json
    )


@app.command()
def convert(
    drafter: Annotated[Path, typer.Argument(help="a drafter in any known form, a checkpoint, or a training folder")],
    target: Annotated[Path, typer.Option(help="the target's folder")],
    out_dir: Annotated[Path, typer.Option("--out", help="the folder to write")],
    to: Annotated[str, typer.Option(help="sglang (vLLM loads it too), vllm (speculators format) or eagle")] = "sglang",
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; default: the target's")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace an existing folder")] = False,
    ids_are: Annotated[
        str | None, typer.Option(help="what the drafter's layer ids mean: layer-input, layer-output or sglang-served")
    ] = None,
    rope_theta: Annotated[float | None, typer.Option(help="the RoPE base that training used")] = None,
    rope_scaling: Annotated[
        str | None, typer.Option(help="keep or none: was the config's scaling trained with?")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="the drafter's config.json, if not beside the weights")] = None,
    vocab: Annotated[Path | None, typer.Option(help="a safetensors file with d2t, to add or to shrink to")] = None,
    d2t_is: Annotated[str | None, typer.Option(help="offsets or absolute: how the drafter's d2t is to be read")] = None,
    head_from_target: Annotated[bool, typer.Option(help="take the target's rows for a missing lm_head")] = False,
    repair_double_norm: Annotated[
        bool, typer.Option(help="fold Model-Optimizer's second norm into hidden_norm")
    ] = False,
) -> None:
    """Read a drafter of any known form, mend it, and write it as engines load it."""
    from draftsmith.convert.foreign import ReadOptions
    from draftsmith.convert.write import convert as run_verb

    options = ReadOptions.checked(
        ids_are=ids_are,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        config=config,
        vocab=vocab,
        d2t_is=d2t_is,
        head_from_target=head_from_target,
        repair_double_norm=repair_double_norm,
    )
    run_verb(drafter, target, out_dir, to=to, dtype=dtype, overwrite=overwrite, options=options)


@app.command()
def verify(
    drafter: Annotated[Path, typer.Argument(help="a converted drafter")],
    target: Annotated[Path, typer.Option(help="the target's folder")],
    store: Annotated[Path | None, typer.Option(help="the store it was trained on")] = None,
    deep: Annotated[bool, typer.Option(help="read every tensor: NaN, constants, the embedding")] = False,
    engine: Annotated[
        list[str] | None, typer.Option(help="load and run it with the engine itself: sglang, vllm or both")
    ] = None,
    engine_python: Annotated[
        list[str] | None, typer.Option(help="the engine's Python or virtual environment; for both: ENGINE=PATH")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the checks as JSON on standard output")] = False,
) -> None:
    """Check a drafter folder against what engines will do with it; exit code 1 if a check fails."""
    from draftsmith.convert.engine_loader import parse_engines, parse_pythons
    from draftsmith.convert.verify import verify_command

    engines = parse_engines(engine or [])
    pythons = parse_pythons(engine_python or [], engines)
    if not verify_command(drafter, target, store=store, deep=deep, engines=engines, pythons=pythons, as_json=json):
        raise typer.Exit(1)


@app.command()
def export(
    drafter: Annotated[Path, typer.Argument(help="a converted drafter")],
    destination: Annotated[
        str, typer.Argument(help="a folder, s3://BUCKET/PREFIX or another fsspec URL, or hf://NAMESPACE/NAME[@BRANCH]")
    ],
    target: Annotated[
        Path | None, typer.Option(help="the target's folder; default: the one that training or conversion recorded")
    ] = None,
    version: Annotated[str | None, typer.Option(help="name of this version; default: a hash of its content")] = None,
) -> None:
    """Deliver a drafter: whole or not at all, versions side by side, `latest` flipped at the end."""
    from draftsmith.convert.export import export as run_verb

    run_verb(drafter, destination, target, version=version)


@app.command()
def forecast(
    acceptance: Annotated[str, typer.Argument(help="evaluate.json, or accept_i with commas: 0.7,0.45,0.28")],
    decode_ms: Annotated[float | None, typer.Option(help="one token of the target without a drafter")] = None,
    draft_ms: Annotated[float | None, typer.Option(help="one draft step")] = None,
    verify_ms: Annotated[
        str | None, typer.Option(help="one verify: 30, or positions:milliseconds like 2:22,4:30")
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="a JSON table of these costs by batch size")] = None,
    log: Annotated[
        list[Path] | None, typer.Option(help="an engine's log, with the drafter or without; any number of times")
    ] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="measure a running server with the drafter; once a depth")
    ] = None,
    plain_url: Annotated[str | None, typer.Option(help="a running server without the drafter")] = None,
    engine: Annotated[str, typer.Option(help="what runs at --url: sglang or vllm")] = "sglang",
    batch: Annotated[list[int] | None, typer.Option(help="batch sizes of the measurement; default: 1, 4, 16")] = None,
    steps: Annotated[int, typer.Option(help="the deepest chain")] = 8,
    png: Annotated[Path | None, typer.Option(help="draw speed-up by depth into this file")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the forecast as JSON on standard output")] = False,
) -> None:
    """Speed-up for every depth from acceptance and measured costs, and whether to deploy at all."""
    from draftsmith.accept.forecast_command import forecast_command
    from draftsmith.convert.engine_loader import parse_engines

    forecast_command(
        acceptance, decode_ms=decode_ms, draft_ms=draft_ms, verify_ms=verify_ms, costs=costs, logs=log or [],
        engine=parse_engines([engine])[0], url=url or [], plain_url=plain_url, batches=batch or (1, 4, 16), most=steps,
        png=png, as_json=json,
    )  # fmt: skip


@app.command("serve-check")
def serve_check(
    engine: Annotated[str, typer.Argument(help="sglang or vllm")],
    config: Config,
    overrides: Overrides = None,
    drafter: Annotated[Path | None, typer.Option(help="a converted drafter; default: the run's")] = None,
    steps: Annotated[int | None, typer.Option(help="drafted tokens a chain; default: evaluate.draft_steps")] = None,
    limit: Annotated[int | None, typer.Option(help="serve the first N held-out conversations; default: all")] = None,
    url: Annotated[str | None, typer.Option(help="a server that runs already, with the drafter")] = None,
    plain_url: Annotated[str | None, typer.Option(help="one without the drafter, to compare answers and speed")] = None,
    engine_python: Annotated[Path | None, typer.Option(help="the engine's Python or virtual environment")] = None,
    start_timeout: Annotated[float, typer.Option(help="seconds for an engine to be ready")] = 300.0,
    timeout: Annotated[float, typer.Option(help="seconds for everything")] = 1800.0,
    max_running: Annotated[int, typer.Option(help="requests at once")] = 24,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="of a local engine: cpu (float32) or cuda (bfloat16)")
    ] = "cpu",
    engine_options: Annotated[str, typer.Option(help='its further arguments, as JSON: {"tp_size": 8}')] = "{}",
    explain: Annotated[bool, typer.Option(help="look for the cause of a bad verdict")] = True,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON on standard output")] = False,
) -> None:
    """Serve held-out prompts with a real engine, beside the prediction; exit code 1 if they differ or it drafts nothing right."""
    from draftsmith.accept.serve_check import serve_check as run_verb
    from draftsmith.convert.engine_loader import parse_engines

    engines = parse_engines([engine])
    if len(engines) != 1:
        raise DraftsmithError("one engine at a time", where="ENGINE", found=engine, expected="sglang or vllm")
    found = run_verb(
        engines[0], load_config(config, overrides or []), drafter=drafter, steps=steps, conversations=limit, url=url,
        plain_url=plain_url, python=engine_python, start_limit=start_timeout, limit=timeout, max_running=max_running,
        device=device, options=_engine_options(engine_options), explain=explain, as_json=json,
    )  # fmt: skip
    if not found.good:
        raise typer.Exit(1)


def _engine_options(text: str) -> dict[str, object]:
    try:
        options = jsonlib.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise DraftsmithError("not a JSON object", where="--engine-options", found=text, expected='{"tp_size": 8}')
    return options


@app.command()
def probe(
    drafter: Annotated[Path, typer.Argument(help="a converted folder or a training checkpoint")],
    config: Config,
    overrides: Overrides = None,
    store: Annotated[Path | None, typer.Option(help="judge this store's states too; default: the held-out one")] = None,
    limit: Annotated[int, typer.Option(help="held-out conversations, at most")] = 48,
    steps: Annotated[int, typer.Option(help="drafts a chain")] = 3,
    json: Annotated[bool, typer.Option("--json", help="print the result as JSON on standard output")] = False,
) -> None:
    """Which taps, norms, RoPE and draft vocabulary was a drafter trained with? Exit code 1 if not those it describes."""
    from draftsmith.accept.probe import probe as run_verb

    found = run_verb(
        load_config(config, overrides or []), drafter, store=store, conversations=limit, steps=steps, as_json=json
    )
    if not found.as_described:
        raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        out.print(f"draftsmith {__version__}")
        raise typer.Exit


def main() -> None:
    """Run a verb; a DraftsmithError becomes one message and exit code 2."""
    try:
        app()
    except DraftsmithError as error:
        report_error(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
