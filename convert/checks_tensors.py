"""Checks of the weights: names, shapes, dtypes, values, and the draft vocabulary's maps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.canonical import EMBEDDING, O_BIAS, expected_shapes, key_faults, shape_faults
from draftsmith.convert.check import Check, Subject, failed, passed, warned
from draftsmith.convert.tensors import (
    FLOATS,
    TORCH_NAMES,
    FileTensor,
    from_ref,
    read_array,
    read_rows,
    same_values,
    to_float32,
)
from draftsmith.convert.vocab_map import d2t_fault, t2d_fault

HEAD_SAMPLE = 256
"""Rows of lm_head that are compared with the target's."""

HEAD_MARGIN = 0.3
"""Cosine by which the wrong rows must be nearer than the right ones."""


def check_tensors(subject: Subject) -> Iterator[Check]:
    """Every check of this file, in the order of the report."""
    if subject.raw is None:
        yield failed("tensors.files", subject.raw_fault or "the weights cannot be read", subject.convert_command)
        return
    yield passed("tensors.files", f"{len({t.file for t in subject.raw})} file(s), headers whole, nothing left out")
    yield _prefix(subject.raw)
    yield _keys(subject)
    yield _shapes(subject)
    yield _dtypes(subject)
    yield from _vocabulary(subject)
    yield _norms(subject)
    yield from _embedding(subject)
    if subject.deep:
        yield _values(subject)
        yield _head_rows(subject)


def _prefix(raw: list[FileTensor]) -> Check:
    name = "tensors.prefix"
    wrong = sorted(tensor.name for tensor in raw if tensor.name.startswith("model."))
    if wrong:
        return failed(
            name,
            f"{len(wrong)} names begin with model. ({wrong[0]}, ...): vLLM makes model.model. of it and stops, SGLang "
            "does not find model.lm_head",
            "rename them without model.",
        )
    return passed(name, "no name begins with model.")


def _keys(subject: Subject) -> Check:
    name = "tensors.keys"
    if subject.spec is None:
        return failed(name, f"cannot be told: {subject.spec_fault}", subject.convert_command)
    expected = set(expected_shapes(subject.spec)) | ({EMBEDDING} & subject.tensors.keys())
    if subject.spec.fc_bias:
        expected.add(O_BIAS)  # which SGLang then builds too
    faults = key_faults(_names(subject), expected)
    if subject.spec.draft_vocab_size == subject.spec.vocab_size:
        faults = [fault for fault in faults if fault not in ("missing: d2t", "missing: t2d")]
    if faults == ["missing: t2d"]:
        return warned(
            name,
            "missing: t2d; engines do without, but nothing then proves that d2t fits lm_head",
            subject.convert_command,
        )
    if faults:
        return failed(
            name,
            "; ".join(faults) + ". SGLang says nothing: what is missing stays random, what is unknown is dropped",
            subject.convert_command,
        )
    return passed(name, f"{len(expected)} tensors, none missing, none unknown")


def _names(subject: Subject) -> list[str]:
    """Canonical names with their duplicates; a `model.` prefix is reported by its own check."""
    names = []
    for tensor in subject.raw or []:
        bare = tensor.name.removeprefix("model.")
        names.append("midlayer." + bare.removeprefix("layers.0.") if bare.startswith("layers.0.") else bare)
    return names


def _shapes(subject: Subject) -> Check:
    name = "tensors.shapes"
    if subject.spec is None:
        return failed(name, f"cannot be told: {subject.spec_fault}", subject.convert_command)
    floats = {key: shape for key, shape in expected_shapes(subject.spec).items() if key not in ("d2t", "t2d")}
    if EMBEDDING in subject.tensors:
        floats[EMBEDDING] = (subject.spec.vocab_size, subject.spec.hidden_size)
    faults = [fault for fault in shape_faults(subject.tensors, floats) if not fault.startswith("dtype")]
    if faults:
        return failed(name, "; ".join(faults), subject.convert_command)
    return passed(name, "as config.json says")


def _dtypes(subject: Subject) -> Check:
    name = "tensors.dtype"
    wanted = TORCH_NAMES.get(str(subject.config.get("dtype") or subject.config.get("torch_dtype")))
    found = {key: t.dtype for key, t in subject.tensors.items() if key not in ("d2t", "t2d")}
    wrong = {key: dtype for key, dtype in found.items() if dtype not in FLOATS}
    if wrong:
        return failed(
            name, "; ".join(f"{key} is {dtype}" for key, dtype in sorted(wrong.items())), subject.convert_command
        )
    other = sorted(key for key, dtype in found.items() if dtype != wanted)
    if other:
        return warned(
            name, f"config.json says {wanted}, but {other[0]} is {found[other[0]]} ({len(other)} such); engines cast"
        )
    return passed(name, f"{wanted} throughout")


def _vocabulary(subject: Subject) -> Iterator[Check]:
    spec, tensors = subject.spec, subject.tensors
    if spec is None:
        yield failed("vocab.sizes", f"cannot be told: {subject.spec_fault}", subject.convert_command)
        return
    sizes = {"vocab_size": (spec.vocab_size, subject.target.vocab_size)}
    if "lm_head.weight" in tensors:
        sizes["rows of lm_head"] = (tensors["lm_head.weight"].shape[0], spec.draft_vocab_size)
    if "d2t" in tensors:
        sizes["entries of d2t"] = (tensors["d2t"].shape[0] if tensors["d2t"].shape else 0, spec.draft_vocab_size)
    wrong = [f"{label} {ours:,}, expected {theirs:,}" for label, (ours, theirs) in sizes.items() if ours != theirs]
    yield (
        failed("vocab.sizes", "; ".join(wrong), subject.convert_command)
        if wrong
        else passed("vocab.sizes", f"{spec.draft_vocab_size:,} drafted of the target's {spec.vocab_size:,}")
    )
    if "d2t" not in tensors:
        if spec.draft_vocab_size < spec.vocab_size:
            yield failed(
                "vocab.d2t", "absent: engines take draft ids for target ids in silence", subject.convert_command
            )
        else:
            yield passed("vocab.d2t", "absent and not needed: the draft vocabulary is the target's")
        return
    if spec.draft_vocab_size == spec.vocab_size:
        yield failed(
            "vocab.d2t", "present, but the draft vocabulary is the target's: vLLM refuses it", subject.convert_command
        )
        return
    if tensors["d2t"].dtype not in ("I64", "I32"):
        yield failed(
            "vocab.d2t",
            f"dtype {tensors['d2t'].dtype}, expected I64: token ids would be fractions",
            subject.convert_command,
        )
        return
    d2t = read_array(tensors["d2t"])
    fault = d2t_fault(d2t, spec.draft_vocab_size, spec.vocab_size)
    ordered = np.sort(d2t.astype(np.int64).reshape(-1) + np.arange(d2t.size)) - np.arange(d2t.size)
    if fault is None:
        yield passed("vocab.d2t", "offsets, ascending, within the vocabulary")
    elif subject.record is None and d2t_fault(ordered, spec.draft_vocab_size, spec.vocab_size) is None:
        yield warned(
            "vocab.d2t",
            f"{fault} for tools that cut logits by t2d; engines take any order, if lm_head's rows have the same",
            subject.convert_command,
        )
    else:
        yield failed("vocab.d2t", fault, subject.convert_command)
        return
    if "t2d" in tensors:
        if tensors["t2d"].dtype != "BOOL":
            yield failed("vocab.t2d", f"dtype {tensors['t2d'].dtype}, expected BOOL", subject.convert_command)
            return
        disagreement = t2d_fault(read_array(tensors["t2d"]), ordered, spec.vocab_size)
        yield (
            failed("vocab.t2d", disagreement, subject.convert_command)
            if disagreement
            else passed("vocab.t2d", "agrees with d2t")
        )


def _norms(subject: Subject) -> Check:
    name = "tensors.norms"
    norms = {
        key: t for key, t in subject.tensors.items() if "norm" in key and t.dtype in FLOATS and 0 < len(t.shape) < 2
    }
    values = {key: to_float32(read_array(tensor), tensor.dtype) for key, tensor in norms.items()}
    broken = sorted(key for key, value in values.items() if not np.isfinite(value).all())
    if broken:
        return failed(name, f"NaN or infinity in {', '.join(broken)}", subject.convert_command)
    if values and all((value == 1).all() for value in values.values()):
        return warned(
            name,
            "every norm weight is exactly one: untrained, or lost on the way and filled in",
            subject.convert_command,
        )
    return passed(name, f"{len(values)} norm weights finite")


def _embedding(subject: Subject) -> Iterator[Check]:
    name = "tensors.embedding"
    spec, own = subject.spec, subject.tensors.get(EMBEDDING)
    differs = spec is not None and spec.hidden_size != spec.target_hidden_size
    if own is None:
        if not differs:
            yield passed(name, "absent: engines share the target's, which it was trained on")
        return
    if differs:
        yield passed(name, "the drafter's own, which a drafter of another width needs")
        return
    if not subject.deep:
        yield warned(
            name, "present; SGLang replaces it by the target's, vLLM keeps it if it differs", "draftsmith verify --deep"
        )
        return
    if subject.target.embedding is None:
        yield warned(name, "present, but the target's folder has no embedding to compare it with")
    elif same_values(own, from_ref(subject.target.embedding)):
        yield passed(name, "equals the target's")
    else:
        yield failed(
            name, "differs from the target's: SGLang replaces it in silence, vLLM keeps it: two different drafters",
            subject.convert_command,
        )  # fmt: skip


def _head_rows(subject: Subject) -> Check:
    """A head cut out of the target's by the offsets instead of the ids that they stand for drafts other tokens."""
    name, spec = "tensors.head_rows", subject.spec
    head, d2t, theirs = subject.tensors.get("lm_head.weight"), subject.tensors.get("d2t"), subject.target.head
    if spec is None or head is None or d2t is None or theirs is None or head.shape[1:] != theirs.shape[1:]:
        return passed(name, "not compared: no d2t, or no head of the same width in the target's folder")
    offsets = read_array(d2t).astype(np.int64).reshape(-1)
    if head.shape[0] != offsets.size or d2t_fault(offsets, offsets.size, spec.vocab_size):
        return passed(name, "not compared: d2t is no right map")
    drafts = np.unique(np.linspace(0, offsets.size - 1, HEAD_SAMPLE).astype(np.int64))
    ours = read_rows(head, drafts)
    likeness = {
        label: _mean_cosine(ours, read_rows(from_ref(theirs), rows))
        for label, rows in (("ids", offsets[drafts] + drafts), ("offsets", offsets[drafts]))
    }
    said = f"cosine to the target's rows {likeness['ids']:.2f}, at the bare offsets {likeness['offsets']:.2f}"
    if likeness["offsets"] > likeness["ids"] + HEAD_MARGIN:
        return failed(
            name, f"rows of lm_head are the target's rows at d2t instead of at arange + d2t ({said})",
            "convert the checkpoint from before its vocabulary was cut: draftsmith convert ... --vocab FILE",
        )  # fmt: skip
    return passed(name, said)


def _mean_cosine(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> float:
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return float(np.mean((first * second).sum(axis=1) / np.maximum(lengths, 1e-12)))


def _values(subject: Subject) -> Check:
    name = "tensors.values"
    broken, constant = [], []
    for key, tensor in sorted(subject.tensors.items()):
        if tensor.dtype not in FLOATS:
            continue
        low, high, finite = np.inf, -np.inf, True
        try:
            for piece in tensor.pieces():
                values = to_float32(piece, tensor.dtype)
                finite = finite and bool(np.isfinite(values).all())
                low, high = min(low, float(values.min())), max(high, float(values.max()))
        except DraftsmithError as error:
            return failed(name, error.problem, subject.convert_command)
        if not finite:
            broken.append(key)
        elif low == high and len(tensor.shape) > 1:
            constant.append(f"{key} (all {low:g})")
    if broken or constant:
        parts = [f"NaN or infinity in {', '.join(broken)}"] if broken else []
        parts += [f"one value throughout: {', '.join(constant)}"] if constant else []
        return failed(name, "; ".join(parts), subject.convert_command)
    return passed(name, "all values finite, no matrix constant")
