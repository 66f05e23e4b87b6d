"""Drafters that were made to do harm, or cut off on their way: convert refuses them, runs nothing, writes nothing."""

from __future__ import annotations

import json
import pickle
import resource
import struct
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.verify import verify
from draftsmith.convert.write import convert
from tests.convert import foreign
from tests.convert.conftest import listing, make_target
from tests.convert.foreign import Variant
from tests.convert.storage_oracle import Evil

WEIGHTS = "model.safetensors"


@pytest.fixture
def place(tmp_path):
    """A target and a foreign drafter side by side; whatever else appears was written by the conversion."""
    make_target(tmp_path / "target")
    foreign.write_sglang(tmp_path / "models" / "drafter", Variant())
    return tmp_path


def refused(place, *words):
    """Neither convert nor verify accepts it, and not a byte of the place is other than before."""
    source, target, before = place / "models" / "drafter", place / "target", listing(place)
    for form in ("sglang", "vllm"):
        with pytest.raises(DraftsmithError) as caught:
            convert(source, target, place / "out" / form, to=form)
        assert all(word in str(caught.value) for word in words), caught.value
    with suppress(DraftsmithError):
        assert any(check.status == "fail" for check in verify(source, target, deep=True))
    assert listing(place) == before


def shards(place):
    """The weights in two shards with an index."""
    folder = place / "models" / "drafter"
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("kind", ["relative", "absolute", "parent", "folder"])
def test_an_index_never_leads_out_of_its_folder(place, kind):
    """The file that it names is there, and would be a good one."""
    folder = shards(place)
    save_file({"norm.weight": torch.ones(64, dtype=torch.bfloat16)}, place / "x")
    name = {"relative": "../../x", "absolute": str(place / "x"), "parent": "..", "folder": "../drafter/x"}[kind]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["norm.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(place, "outside its folder", name)


@pytest.mark.parametrize("form", ["zip", "legacy", "plain"])
def test_code_in_a_pickle_never_runs(place, form):
    folder, made = place / "models" / "drafter", place / "made"
    held = load_file(folder / WEIGHTS) | {"extra": Evil(made)}
    (folder / WEIGHTS).unlink()
    file = folder / "pytorch_model.bin"
    if form == "plain":
        file.write_bytes(pickle.dumps(held["extra"]))
    else:
        torch.save(held, file, _use_new_zipfile_serialization=form == "zip")
    refused(place, "code", file.name)
    assert not made.exists()
    torch.load(file, weights_only=False) if form != "plain" else pickle.loads(file.read_bytes())
    assert made.exists()  # so it was a real trap


@pytest.mark.parametrize("huge", ["header", "tensor", "map"])
def test_a_billion_in_a_header_is_refused_without_the_memory_for_it(place, huge):
    file = place / "models" / "drafter" / WEIGHTS
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    if huge == "header":
        file.write_bytes(struct.pack("<Q", 10**9) + data[8:])
    else:
        header["fc.weight" if huge == "tensor" else "d2t"]["shape"] = [10**9]
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(place, file.name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
@pytest.mark.parametrize("shard", [1, 2])
def test_a_shard_that_was_cut_off_is_named(place, share, shard):
    folder = shards(place)
    file = folder / f"model-0000{shard}-of-00002.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(int(file.stat().st_size * share))
    refused(place, file.name)


def test_a_missing_shard_is_named(place):
    file = shards(place) / "model-00002-of-00002.safetensors"
    file.unlink()
    refused(place, file.name)


def test_a_header_without_an_end_is_one_clear_error(place):
    text = b'{"a":' * 100_000
    (place / "models" / "drafter" / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text)
    refused(place, WEIGHTS)


def test_a_config_that_is_no_object_or_endless_is_one_clear_error(place):
    file = place / "models" / "drafter" / "config.json"
    for text in ("[]", "null", "{", '{"a":' * 100_000, "\x00\xff"):
        file.write_text(text, encoding="latin-1")
        refused(place, "config.json")
