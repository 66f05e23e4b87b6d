"""Promises of the store: what was written is read, whole or not at all, and damage is named."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.data.store import HarvestedConversation, HarvestReader, Provenance
from draftsmith.data.store_writer import StoreWriter, plan_shards

LENGTHS = [5, 3, 9, 1, 4, 4]


def make(number: int, length: int) -> HarvestedConversation:
    generator = torch.Generator().manual_seed(number)
    return HarvestedConversation(
        id=f"c{number}",
        input_ids=torch.randint(0, 100, (length,), generator=generator),
        generated=torch.rand(length, generator=generator) < 0.5,
        taps=torch.randn(length, 3, 8, generator=generator).bfloat16(),
        final=torch.randn(length, 8, generator=generator).bfloat16(),
        argmax=torch.randint(0, 100, (length,), generator=generator),
        greedy=number % 2 == 0,
        mean_logprob=-float(number),
    )


ITEMS = [make(number, length) for number, length in enumerate(LENGTHS)]


def provenance(**changes: Any) -> Provenance:
    values: dict[str, Any] = {
        "target": {"config": "aa"},
        "target_mark": "aa",
        "taps": (2, 4, 5),
        "hidden_size": 8,
        "vocab_size": 100,
        "computed_in": "float32",
        "source": "ff",
        "planned": len(ITEMS),
        "max_length": 64,
        "shard_tokens": 10,
    }
    return Provenance(**(values | changes))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "store", provenance()) as writer:
        for item in ITEMS:
            writer.append(item)
    return tmp_path / "store"


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_every_conversation_is_read_back_exactly(store: Path) -> None:
    reader = HarvestReader(store)
    assert (len(reader), reader.ids, reader.lengths) == (6, ["c0", "c1", "c2", "c3", "c4", "c5"], LENGTHS)
    for number, (found, item) in enumerate(zip(reader, ITEMS, strict=True)):
        for name in ("input_ids", "generated", "taps", "final", "argmax"):
            tensor, expected = getattr(found, name), getattr(item, name)
            assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)
        assert (found.id, found.greedy, found.mean_logprob) == (item.id, item.greedy, item.mean_logprob)
        ids, generated = reader.tokens(number)
        assert torch.equal(ids, item.input_ids) and torch.equal(generated, item.generated)
    assert reader[-1].id == "c5"
    with pytest.raises(IndexError):
        reader[6]


def test_shards_hold_whole_conversations_up_to_the_limit(store: Path) -> None:
    # 5+3 | 9 (alone: 9+1 is 10, which still fits) -> 9+1 | 4+4, of at most 10 tokens
    manifest = HarvestReader(store).manifest
    assert [[one.length for one in shard.conversations] for shard in manifest.shards] == [[5, 3], [9, 1], [4, 4]]
    assert [list(shard) for shard in plan_shards(LENGTHS, 10)] == [[0, 1], [2, 3], [4, 5]]
    assert [list(shard) for shard in plan_shards([12, 1, 12], 10)] == [[0], [1], [2]]
    assert plan_shards([], 10) == []


def test_the_files_are_what_the_format_says(store: Path) -> None:
    names = ["manifest.json", *(f"shard-{n:05d}.safetensors" for n in range(3))]
    assert sorted(files(store)) == names
    tensors = load_file(store / names[2])
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "input_ids": (torch.int32, (10,)),
        "generated": (torch.bool, (10,)),
        "offsets": (torch.int64, (3,)),
        "taps": (torch.bfloat16, (10, 3, 8)),
        "final": (torch.bfloat16, (10, 8)),
        "argmax": (torch.int32, (10,)),
    }
    assert tensors["offsets"].tolist() == [0, 9, 10]
    manifest = json.loads((store / "manifest.json").read_text())
    shard = manifest["shards"][1]
    content = (store / names[2]).read_bytes()
    assert (shard["bytes"], shard["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    # (3 taps + final) x 8 x 2 bytes, 4 + 1 + 4 bytes a token, offsets, header: nothing padded, nothing shared
    assert len(content) < 10 * (4 * 8 * 2 + 9) + 3 * 8 + 800
    assert (manifest["tap_convention"], manifest["final_state"], manifest["complete"]) == (
        "layer-input",
        "post-norm",
        True,
    )


@pytest.mark.parametrize("stop", range(7))
def test_a_resumed_store_has_the_bytes_of_an_unbroken_one(store: Path, tmp_path: Path, stop: int) -> None:
    path = tmp_path / "resumed"
    with StoreWriter(path, provenance()) as writer:
        for item in ITEMS[:stop]:
            writer.append(item)
    (path / "shard-00002.safetensors").touch()
    (path / ".manifest.json.partial-0123").touch()
    with StoreWriter(path, provenance()) as writer:
        # a shard is written when the next conversation comes, or when all have come
        assert writer.done == {0: 0, 1: 0, 2: 0, 3: 2, 4: 2, 5: 4, 6: 6}[stop]
        for item in ITEMS[writer.done :]:
            writer.append(item)
    assert files(path) == files(store)


def test_an_unfinished_store_is_not_read(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, provenance()) as writer:
        for item in ITEMS[:4]:
            writer.append(item)
    with pytest.raises(DraftsmithError, match=r"unfinished(.|\n)*2 conversations(.|\n)*expected: 6"):
        HarvestReader(tmp_path)


def test_a_store_of_other_provenance_is_not_continued(store: Path) -> None:
    before = files(store)
    for changes in ({"taps": (1, 4, 5)}, {"source": "00"}, {"computed_in": "bfloat16"}, {"target": {"config": "bb"}}):
        with (
            pytest.raises(DraftsmithError, match=f"another {next(iter(changes))}"),
            StoreWriter(store, provenance(**changes)),
        ):
            pass
    assert files(store) == before


def test_a_cut_missing_or_exchanged_shard_is_named(store: Path) -> None:
    shard = store / "shard-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(DraftsmithError, match=r"cut off(.|\n)*shard-00001"):
        HarvestReader(store)
    shard.unlink()
    with pytest.raises(DraftsmithError, match=r"missing(.|\n)*shard-00001"):
        HarvestReader(store)
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DraftsmithError, match=r"bytes have changed(.|\n)*shard-00001"):
        HarvestReader(store).verify()


def test_swapped_axes_are_named(store: Path) -> None:
    shard = store / "shard-00001.safetensors"
    tensors = load_file(shard)
    tensors["taps"] = tensors["taps"].transpose(0, 1).contiguous()
    save_file(tensors, shard)
    manifest = json.loads((store / "manifest.json").read_text())
    manifest["shards"][1]["bytes"] = shard.stat().st_size
    (store / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DraftsmithError, match=r"taps of a shard(.|\n)*\[3, 10, 8\](.|\n)*\[10, 3, 8\]"):
        HarvestReader(store)


def test_axes_or_taps_that_sizes_alone_do_not_tell_are_read_in_the_header(store: Path) -> None:
    """Three tokens under three taps: turned round, the tensor has the same shape; other taps have it in any case."""
    shard = store / "shard-00001.safetensors"
    content = shard.read_bytes()
    for before, after, found in (
        ('token, tap, hidden', 'tap, token, hidden', "tap, token, hidden"),
        ('\\"taps\\": [2, 4, 5]', '\\"taps\\": [3, 4, 5]', r"\[3, 4, 5\]"),
    ):  # fmt: skip
        assert content.count(before.encode()) == 1
        shard.write_bytes(content.replace(before.encode(), after.encode()))
        with pytest.raises(DraftsmithError, match=rf"shard-00001(.|\n)*{found}"):
            HarvestReader(store)
    shard.write_bytes(content)
    HarvestReader(store)


def test_another_schema_version_is_named(store: Path) -> None:
    manifest = json.loads((store / "manifest.json").read_text()) | {"schema_version": 2}
    (store / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DraftsmithError, match="another schema version"):
        HarvestReader(store)


def test_a_damaged_manifest_is_deleted_to_mend_it_and_a_missing_one_is_not(store: Path, tmp_path: Path) -> None:
    (store / "manifest.json").write_text("{")
    with pytest.raises(DraftsmithError, match=r"not valid JSON(.|\n)*mend: rm -r .*; draftsmith harvest"):
        HarvestReader(store)
    with pytest.raises(DraftsmithError, match=r"is missing(.|\n)*mend: draftsmith harvest"):
        HarvestReader(tmp_path / "absent")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: {"taps": one.taps[:-1]}, r"taps of conversation c0 does not fit its 5 tokens"),
        (lambda one: {"final": one.final.float()}, r"final of conversation c0 does not fit"),
        (lambda one: {"argmax": one.argmax.int()}, r"argmax of conversation c0 does not fit"),
        (
            lambda one: {"final": one.final.index_fill(0, torch.tensor([3]), float("nan"))},
            r"not finite(.|\n)*token 3 of 5",
        ),
        (
            lambda one: {"taps": one.taps.index_fill(0, torch.tensor([2]), float("inf"))},
            r"not finite(.|\n)*token 2 of 5",
        ),
    ],
)
def test_rows_that_do_not_fit_or_are_not_finite_are_refused(
    tmp_path: Path, change: Callable[[HarvestedConversation], dict[str, torch.Tensor]], message: str
) -> None:
    with StoreWriter(tmp_path, provenance()) as writer, pytest.raises(DraftsmithError, match=message):
        writer.append(replace(ITEMS[0], **change(ITEMS[0])))


def test_a_shard_that_gets_shorter_or_goes_while_it_is_read_is_named(store: Path) -> None:
    reader = HarvestReader(store)
    index = next(n for n in range(len(reader)) if reader._locate(n)[0] is reader._open(1))
    reader[index]
    shard = store / "shard-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(DraftsmithError, match=r"shorter since(.|\n)*shard-00001"):
        reader[index]
    shard.unlink()
    with pytest.raises(DraftsmithError, match=r"cannot be read: No such file(.|\n)*shard-00001"):
        reader[index]


def test_a_reader_can_be_sent_to_a_worker(store: Path) -> None:
    reader = HarvestReader(store)
    reader[0]
    again = pickle.loads(pickle.dumps(reader))
    assert torch.equal(again[2].taps, ITEMS[2].taps)
