"""What a run would do, computed before anything runs: taps, drafter, tokens, disk, memory, steps."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.configs.costs import (
    SUSTAINED,
    SYNTHESIS_RATE,
    TargetCost,
    gpu_hours,
    harvest_flops,
    target_cost,
    training_flops,
)
from draftsmith.configs.drafter import DrafterSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import PRESETS, RunConfig
from draftsmith.configs.target import Target, default_drafter, parse_target, read_target

MASTER_BYTES = 16
"""Bytes a trained parameter: float32 weight, gradient and the two moments of AdamW."""


@dataclass(frozen=True)
class Plan:
    """Figures of a run. Tokens are exact where conversations exist and an upper bound before."""

    target: Target
    target_from_facts: bool
    spec: DrafterSpec
    conversations: int
    tokens: int
    tokens_exact: bool
    store_bytes: int
    weight_bytes: int
    training_bytes: int
    optimiser_steps: int
    cost: TargetCost
    generated: int
    """Tokens still to be generated, at most; 0 where conversations exist."""
    harvest_hours: float
    training_hours: float
    """Of one GPU at costs.SUSTAINED; training at most."""


def make_plan(config: RunConfig, conversations: int, turns: int, tokens: int | None) -> Plan:
    """Plan a run.

    Args:
        config: the run.
        conversations: training conversations there are or will be.
        turns: assistant turns in them.
        tokens: their tokens if they exist already; else a bound is taken from the synthesize section.
    """
    target, from_facts = planned_target(config)
    spec = default_drafter(
        target, min(config.vocab.size, target.vocab_size), taps=config.target.taps, **config.drafter.model_dump()
    )
    bound = conversations * config.synthesize.max_prompt_tokens + turns * config.synthesize.max_new_tokens
    count = bound if tokens is None else tokens
    cost = target_cost(target)
    frozen = target.vocab_size * target.hidden_size + spec.draft_vocab_size * target.hidden_size
    return Plan(
        target=target,
        target_from_facts=from_facts,
        spec=spec,
        conversations=conversations,
        tokens=count,
        tokens_exact=tokens is not None,
        store_bytes=int(count * state_bytes(config.harvest.codec, len(spec.taps), target.hidden_size)),
        weight_bytes=spec.parameter_count() * 2,
        training_bytes=spec.parameter_count() * MASTER_BYTES + frozen * 4,
        optimiser_steps=config.train.epochs * -(-count // config.train.batch_tokens),
        cost=cost,
        generated=0 if tokens is not None else turns * config.synthesize.max_new_tokens,
        harvest_hours=gpu_hours(harvest_flops(cost, count)),
        training_hours=gpu_hours(config.train.epochs * training_flops(spec, count, config.train.unroll_steps)),
    )


def state_bytes(codec: str, taps: int, hidden: int) -> float:
    """Bytes that the store holds of one token, its id and mask included."""
    return 9 + (2 * (taps + 1) * hidden if codec == "bf16" else (taps + 1 + 2 / 32) * hidden + 4 * taps)


def planned_target(config: RunConfig) -> tuple[Target, bool]:
    """The run's target; where its folder does not exist yet, the facts that ship with the preset (then True)."""
    name = config.target.facts
    if config.target.path.exists() or name is None:
        return read_target(config.target.path), False
    file = PRESETS / "facts" / f"{name}.json"
    if not file.is_file():
        known = ", ".join(sorted(entry.stem for entry in (PRESETS / "facts").glob("*.json")))
        raise DraftsmithError("no facts are shipped under that name", where="target.facts", found=name, expected=known)
    return parse_target(file, {}), True


def describe(plan: Plan, config: RunConfig) -> list[tuple[str, str]]:
    """The plan as label and text, in the order in which a person reads it."""
    target, spec = plan.target, plan.spec
    bound = "" if plan.tokens_exact else "at most "
    roughly = "about " if plan.tokens_exact else "at most "  # whole windows leave some of a step's tokens unused
    heads = f"{spec.num_attention_heads}/{spec.num_key_value_heads} heads of {spec.head_dim}"
    return [
        ("target", f"{target.architecture}, {target.num_layers} layers, hidden {target.hidden_size}, vocabulary {target.vocab_size:,}"),
        ("", f"context {target.context_length:,}, RoPE theta {target.rope.theta:g}" + (f", {target.rope.scaling}" if target.rope.scaling else "")),
        ("", f"{parameters(plan.cost.parameters)} parameters, {parameters(plan.cost.products)} at work for a token, {size(plan.cost.weight_bytes)} of weights to load"),
        ("", f"facts shipped with draftsmith; {config.target.path} does not exist yet" if plan.target_from_facts else str(target.path)),
        ("taps", f"{' / '.join(map(str, spec.taps))} (layer inputs)"),
        ("drafter", f"hidden {spec.hidden_size}, intermediate {spec.intermediate_size}, {heads}, draft vocabulary {spec.draft_vocab_size:,}"),
        ("", f"{spec.parameter_count():,} trainable parameters, {size(plan.weight_bytes)} served in bf16"),
        ("conversations", f"{plan.conversations:,} ({bound}{plan.tokens:,} tokens)"),
        ("disk", f"{bound}{size(plan.store_bytes)} of hidden states ({plan.store_bytes // max(1, plan.tokens):,} bytes a token)"),
        ("memory", f"{size(plan.training_bytes)} for weights, gradients and AdamW on one process, activations aside"),
        ("training", f"{config.train.epochs} epochs, {roughly}{plan.optimiser_steps:,} steps of {config.train.batch_tokens:,} tokens, {config.train.unroll_steps} unroll steps"),
        *([("hours", f"synthesis: at most {hours(plan.generated / SYNTHESIS_RATE / 3600)} at {SYNTHESIS_RATE:,} generated tokens/s")] if plan.generated else []),
        ("" if plan.generated else "hours", f"harvest: {bound}{hours(plan.harvest_hours)} of one GPU at {SUSTAINED / 1e12:.0f} TFLOP/s"),
        ("", f"training: at most {hours(plan.training_hours)} of one GPU at {SUSTAINED / 1e12:.0f} TFLOP/s, every token supervised"),
        ("writes", str(config.folder)),
    ]  # fmt: skip


def size(count: float) -> str:
    """Bytes for people: 1,234,567 -> `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def parameters(count: int) -> str:
    """1,026,400,000,000 -> `1,026.4 B`."""
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def hours(count: float) -> str:
    """Two digits below an hour, one decimal above."""
    return f"{count:,.1f}" if count >= 1 else f"{count:.2g}"
