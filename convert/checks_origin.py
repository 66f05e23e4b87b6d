"""Checks of where the drafter comes from: the record beside it, the target and the store it was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import read_json, sha256_json
from draftsmith.convert.check import Check, Subject, failed, passed, warned
from draftsmith.convert.dialects import SGLANG
from draftsmith.convert.foreign import canonical_name
from draftsmith.convert.layouts import SGLANG_LAYOUT, SPECULATORS_LAYOUT
from draftsmith.convert.record import RECORD, Record
from draftsmith.convert.tensors import digest_tensor
from draftsmith.convert.write import config_differences


def check_origin(subject: Subject) -> Iterator[Check]:
    """Every check of this file, in the order of the report."""
    if subject.record is None:
        yield warned(
            "record.present",
            f"no {RECORD}: taps, RoPE and target of training are taken on trust",
            "convert the training checkpoint",
        )
    else:
        yield _config(subject, subject.record)
        yield _tensors(subject, subject.record)
        yield _fingerprint(subject, subject.record)
    if subject.store is not None:
        yield from _store(subject)


def _config(subject: Subject, record: Record) -> Check:
    name = "record.config"
    layout = SPECULATORS_LAYOUT if subject.speculators else SGLANG_LAYOUT
    try:
        expected = layout.config(record.spec, subject.target, record.dtype)
    except DraftsmithError as error:
        return failed(name, error.problem, error.mend)
    # The verifier's name is a path of the machine that converted.
    found, expected = (
        {key: value for key, value in config.items() if key != "speculators_config"}
        for config in (subject.written, expected)
    )
    lines = config_differences(found, expected)
    if lines:
        return warned(name, "edited since conversion: " + "; ".join(lines), subject.convert_command)
    return passed(name, "config.json is what conversion wrote")


def _tensors(subject: Subject, record: Record) -> Check:
    name = "record.tensors"
    recorded = {canonical_name(SGLANG, name): entry for name, entry in record.tensors.items()}
    other = sorted(recorded.keys() ^ subject.tensors.keys())
    if other:
        return failed(
            name, f"not the tensors that conversion wrote: {', '.join(other)}", "convert again or fetch again"
        )
    if not subject.deep:
        return passed(name, f"the {len(record.tensors)} tensors that conversion wrote (bytes: --deep)")
    changed = sorted(key for key, tensor in subject.tensors.items() if digest_tensor(tensor) != recorded[key].xxh3)
    if changed:
        return failed(name, f"bytes changed since conversion: {', '.join(changed)}", "convert again or fetch again")
    return passed(name, f"{len(record.tensors)} tensors, every byte as conversion wrote it")


def _fingerprint(subject: Subject, record: Record) -> Check:
    found = subject.target.fingerprint()
    return _compare("target.fingerprint", record.trained_on, found, f"the target {subject.target.path}", "training")


def _compare(name: str, trained: Mapping[str, Any], found: Mapping[str, Any], what: str, whose: str) -> Check:
    """Another tokenizer changes what ids mean, another config or index what the states are."""
    common = sorted(trained.keys() & found.keys())
    different = [key for key in common if trained[key] != found[key]]
    if "tokenizer" in different:
        return failed(name, f"{what} has another tokenizer than {whose}", "serve the target that was trained on")
    if different:
        return warned(
            name,
            f"{what} is not that of {whose}: {', '.join(different)} differ",
            "serve the target that was trained on",
        )
    if not common:
        return warned(name, f"{whose} recorded no target to compare with")
    return passed(name, f"{what} is that of {whose} ({', '.join(common)})")


def _store(subject: Subject) -> Iterator[Check]:
    assert subject.store is not None
    file = subject.store / "manifest.json"
    manifest = read_json(file, what="the store's manifest", mend="name a store that harvest wrote")
    listed = manifest.get("taps")
    taps = tuple(listed) if isinstance(listed, list) else ()
    ours = subject.trained_taps or (subject.spec.taps if subject.spec else None)
    convention = manifest.get("tap_convention")
    if convention != "layer-input":
        yield failed("store.taps", f"the store counts taps by {convention}, expected layer-input", "harvest again")
    elif taps != ours:
        yield failed(
            "store.taps",
            f"the store holds taps {list(taps)}, the drafter reads {list(ours or ())}",
            "name the store it was trained on",
        )
    else:
        yield passed("store.taps", f"the store holds taps {list(taps)}, as the drafter reads them")
    harvested = manifest.get("target")
    yield _compare(
        "store.target", harvested if isinstance(harvested, dict) else {}, subject.target.fingerprint(),
        f"the target {subject.target.path}", "the harvest",
    )  # fmt: skip
    trained = subject.record.store_manifest if subject.record else None
    if trained == sha256_json(manifest):
        yield passed("store.manifest", "the very store that training read")
    elif trained:
        yield warned("store.manifest", "not the store that training read (its manifest differs)")
