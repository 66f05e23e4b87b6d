"""Checks of what an engine feeds the drafter: taps, the width of fc, RoPE, and the context length."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose
from typing import Any

from draftsmith.configs.drafter import RopeSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import read_rope
from draftsmith.convert.check import Check, Subject, failed, passed, warned
from draftsmith.convert.config_fields import config_rope
from draftsmith.convert.context import explain_context
from draftsmith.convert.dialects import MISSING, NESTED_IDS, TOP_IDS, look_up
from draftsmith.convert.layer_ids import resolve_sglang, resolve_vllm, rule_of
from draftsmith.convert.rope import amplitude, inverse_frequencies

TRAINED_RATIO = 4
"""Serving this many times the trained length is worth a warning: acceptance falls beyond it."""

LARGEST_HEAD = 4096
"""A head_dim beyond this is a slip of the pen."""


def check_serving(subject: Subject) -> Iterator[Check]:
    """Every check of this file, in the order of the report."""
    yield _class(subject)
    yield from _taps(subject)
    yield _width(subject)
    yield from _rope(subject)
    yield from _context(subject)


def _class(subject: Subject) -> Check:
    name, architecture = "taps.class", subject.target.architecture
    if rule_of(architecture) is None:
        return warned(
            name,
            f"SGLang 0.5.23 has no EAGLE-3 capture for {architecture}, or this tool does not know it: it stops at start "
            "if the class lacks set_eagle3_layers_to_capture",
        )
    return passed(name, f"{architecture} captures taps by the rule {rule_of(architecture)}")


def _taps(subject: Subject) -> Iterator[Check]:
    target, config = subject.target, subject.config
    ids: dict[str, list[int] | None] = {}
    for label, path in (("nested", NESTED_IDS), ("top", TOP_IDS), ("layer_ids", "eagle_config.layer_ids")):
        found: Any = look_up(config, path)
        bad = found is not MISSING and found is not None and not _integers(found)
        if bad:
            yield failed("taps.sglang", f"{path} is {found}, expected a list of integers", subject.convert_command)
            return
        ids[label] = None if found is MISSING else found
    wanted = subject.trained_taps
    resolved = {
        "taps.sglang": (
            "SGLang",
            resolve_sglang(target.architecture, ids["nested"], target.num_layers),
            f"nested ids {ids['nested']}",
        ),
        "taps.vllm-v1": (
            "vLLM's V1 runner",
            resolve_vllm("v1", ids["top"], ids["nested"], target.num_layers),
            f"top-level ids {ids['top']}",
        ),
        "taps.vllm-v2": (
            "vLLM's V2 runner",
            resolve_vllm("v2", ids["top"], ids["nested"], target.num_layers, layer_ids=ids["layer_ids"]),
            f"top-level ids {ids['top']}",
        ),
    }
    if subject.speculators:
        del resolved["taps.sglang"]
    truth = wanted or next(iter(resolved.values()))[1]
    source = "training" if wanted else next(iter(resolved.values()))[0]
    for name, (engine, taps, from_) in resolved.items():
        if taps != truth:
            yield failed(
                name,
                f"{engine} feeds taps {list(taps)} from {from_}; {source} has {list(truth)}",
                subject.convert_command,
            )
        elif max(taps) >= target.num_layers:
            yield failed(
                name, f"tap {max(taps)} of {target.num_layers} layers: most classes never capture it, and fc then misses an "
                "input", "train with taps below the number of layers",
            )  # fmt: skip
        else:
            yield passed(name, f"{engine} feeds taps {list(taps)} from {from_}")


def _integers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _width(subject: Subject) -> Check:
    name, config = "taps.width", subject.config
    fc = subject.tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2:
        return failed(name, "fc.weight is absent or no matrix: nothing joins the taps", subject.convert_command)
    nested = look_up(config, NESTED_IDS)
    taps = config.get("num_aux_hidden_states") or (len(nested) if _integers(nested) else 3)
    if type(taps) is not int:
        return failed(name, f"num_aux_hidden_states is {taps!r}, expected an integer", subject.convert_command)
    width = taps * subject.target.hidden_size
    if width == config.get("hidden_size"):
        return failed(
            name, f"{taps} taps of {subject.target.hidden_size} are as wide as the drafter ({width}): SGLang skips fc in "
            "silence", "train a drafter of another width or with another number of taps",
        )  # fmt: skip
    if fc.shape[1] != width:
        return failed(
            name,
            f"fc takes {fc.shape[1]} columns, {taps} taps of {subject.target.hidden_size} give {width}",
            subject.convert_command,
        )
    if _integers(nested) and len(nested) != taps:
        return failed(name, f"num_aux_hidden_states {taps}, but {len(nested)} layer ids", subject.convert_command)
    return passed(name, f"fc takes {width} columns: {taps} taps of {subject.target.hidden_size}")


def _rope(subject: Subject) -> Iterator[Check]:
    config_file = subject.folder / "config.json"
    try:
        agreed = config_rope(subject.config, config_file)
    except DraftsmithError as error:
        yield failed(
            "rope.spelling", f"{error.problem}" + (f": {error.found}" if error.found else ""), subject.convert_command
        )
        return
    yield passed("rope.spelling", f"theta {agreed.theta:g}, {_kind(agreed)}; every spelling agrees")
    engine = read_rope(dict(subject.config))
    dim = subject.config.get("head_dim")
    trained = subject.record.spec.rope if subject.record else None
    if not isinstance(dim, int) or not 0 < dim <= LARGEST_HEAD or dim % 2:
        yield failed("rope.frequencies", f"head_dim is {dim}", subject.convert_command)
    elif trained is None:
        yield warned(
            "rope.frequencies", f"nothing records what training used; the target has theta {subject.target.rope.theta:g}, "
            f"{_kind(subject.target.rope)}",
        )  # fmt: skip
    else:
        yield _frequencies(subject, engine, trained, dim)
    values = {"SGLang": amplitude(engine, sglang=True), "vLLM and transformers": amplitude(engine, sglang=False)}
    if not isclose(*values.values()):
        said = ", ".join(f"{label} {value:g}" for label, value in values.items())
        yield failed("rope.amplitude", f"engines scale cosine and sine differently: {said}", subject.convert_command)
    else:
        yield passed("rope.amplitude", f"cosine and sine times {values['SGLang']:g} in every engine")


def _frequencies(subject: Subject, engine: RopeSpec, trained: RopeSpec, dim: int) -> Check:
    name = "rope.frequencies"
    pairs = list(zip(inverse_frequencies(engine, dim), inverse_frequencies(trained, dim), strict=True))
    worst = max(abs(ours / theirs - 1) for ours, theirs in pairs)
    same_size = isclose(amplitude(engine, sglang=False), amplitude(trained, sglang=False))
    if worst > 1e-9 or not same_size:
        return failed(
            name, f"the config gives theta {engine.theta:g}, {_kind(engine)}; training used theta {trained.theta:g}, "
            f"{_kind(trained)} (frequencies differ by up to {worst:.1%})", subject.convert_command,
        )  # fmt: skip
    other = (
        ""
        if trained == subject.target.rope
        else f"; the target's own is theta {subject.target.rope.theta:g}, {_kind(subject.target.rope)}"
    )
    return passed(name, f"{dim // 2} frequencies equal those of training{other}")


def _kind(rope: RopeSpec) -> str:
    if rope.scaling is None:
        return "no scaling"
    return f"{rope.scaling['rope_type']} x{rope.scaling.get('factor')}"


def _context(subject: Subject) -> Iterator[Check]:
    report = explain_context(subject.config, subject.target)
    said = f"{report.derivation}; the target has {report.target:,}"
    if report.fits:
        if not subject.speculators:
            yield passed("context.sglang", f"{said}: {report.sglang}")
        yield passed("context.vllm", report.vllm)
        if report.drafter < subject.target.longest_context:
            yield warned(
                "context.stretched",
                f"the target's YaRN reaches {subject.target.longest_context:,} tokens, the drafter {report.drafter:,}: asked "
                "at launch for more, SGLang stops and vLLM proposes token 0, for what is changed at launch does not reach "
                "the drafter",
                subject.convert_command,
            )
    else:
        if not subject.speculators:
            yield failed("context.sglang", f"{said}: {report.sglang}", subject.convert_command)
        yield failed("context.vllm", report.vllm, subject.convert_command)
    trained = subject.record.trained_length if subject.record else None
    if trained and trained * TRAINED_RATIO < report.target:
        yield warned(
            "context.trained",
            f"trained on at most {trained:,} tokens, served up to {report.target:,}: acceptance falls beyond the first",
            "train on longer conversations (train.max_length)",
        )
    elif trained:
        yield passed("context.trained", f"trained on up to {trained:,} tokens")
