"""Promises of `draftsmith store`: damage is found, stores that do not belong together stay apart, nothing is half done."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import sha256_file
from draftsmith.configs.schema import RunConfig
from draftsmith.data.codec import Codec
from draftsmith.data.ids import answer_id, part_id, prompt_of
from draftsmith.data.store import HarvestedConversation, HarvestReader, Provenance
from draftsmith.data.store_check import check_store
from draftsmith.data.store_edit import merge, split
from draftsmith.data.store_stats import draw, store_stats
from draftsmith.data.store_writer import StoreWriter, attach
from draftsmith.data.synthesize import synthesize
from draftsmith.data.vocab import count_store

FACTS = {
    "target": {"config": "aa", "tokenizer": "bb", "chat_template": "cc"}, "target_mark": "aabb", "taps": (2, 4, 5),
    "hidden_size": 32, "vocab_size": 100, "computed_in": "float32", "source": "ff", "max_length": 64, "shard_tokens": 40,
}  # fmt: skip


def make_store(path: Path, names: list[str], *, codec: Codec = "bfloat16", **changes) -> Path:
    """A store with conversations of these names; their content depends on the name alone."""
    provenance = Provenance(**(FACTS | {"planned": len(names), "stored_in": codec} | changes))
    with StoreWriter(path, provenance) as writer:
        for name in names:
            dice = torch.Generator().manual_seed(int.from_bytes(name.encode(), "big") % 2**31)
            length = 5 + int(torch.randint(0, 20, (1,), generator=dice))
            writer.append(
                HarvestedConversation(
                    id=name,
                    input_ids=torch.randint(0, 100, (length,), generator=dice),
                    generated=torch.rand(length, generator=dice) < 0.5,
                    taps=torch.randn(length, len(provenance.taps), 32, generator=dice).bfloat16(),
                    final=torch.randn(length, 32, generator=dice).bfloat16(),
                    argmax=torch.randint(0, 100, (length,), generator=dice),
                    greedy=True,
                    mean_logprob=None,
                )
            )
    return path


NAMES = [f"c{number}" for number in range(12)]


def results(path: Path) -> dict[str, str]:
    """Failed checks and what they say."""
    return {one.name: one.detail for one in check_store(path) if not one.passed}


def damage(store: Path, shard: int, tensor: str, row: int, value: bytes, *, hash_too: bool = True) -> None:
    """Overwrite a row of a tensor in the file, by the safetensors header, and by default hide it from the hash."""
    manifest = json.loads((store / "manifest.json").read_text())
    file = store / manifest["shards"][shard]["file"]
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    entry = json.loads(content[8 : 8 + length])[tensor]
    width = (entry["data_offsets"][1] - entry["data_offsets"][0]) // entry["shape"][0]
    place = 8 + length + entry["data_offsets"][0] + row * width
    content[place : place + len(value)] = value
    file.write_bytes(content)
    if hash_too:
        manifest["shards"][shard]["sha256"] = sha256_file(file)
        (store / "manifest.json").write_text(json.dumps(manifest))


def row_of(store: Path, shard: int, tensor: str, row: int) -> bytes:
    file = store / json.loads((store / "manifest.json").read_text())["shards"][shard]["file"]
    return load_file(file)[tensor][row].contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("codec", ["bfloat16", "fp8"])
def test_a_sound_store_passes_every_check(tmp_path: Path, codec: Codec) -> None:
    store = make_store(tmp_path / "s", NAMES, codec=codec)
    findings = check_store(store)
    assert all(one.passed for one in findings) and len(HarvestReader(store).manifest.shards) > 3
    assert [one.name for one in findings] == ["hashes", "counts", "finite", "repeated rows", "orphans"]


@pytest.mark.parametrize("codec", ["bfloat16", "fp8"])
def test_check_names_what_is_damaged(tmp_path: Path, codec: Codec) -> None:
    good = make_store(tmp_path / "good", NAMES, codec=codec)
    first = HarvestReader(good).manifest.shards[1].conversations[0]

    def copy(name: str) -> Path:
        return Path(shutil.copytree(good, tmp_path / name))

    changed = copy("changed")
    damage(changed, 1, "taps", 0, b"\x01\x02\x03", hash_too=False)
    assert results(changed) == {
        "hashes": f"{HarvestReader(good).manifest.shards[1].file} has changed since it was written"
    }
    sick = copy("sick")
    nan = {"bfloat16": ("final", b"\xc0\x7f"), "fp8": ("final_scale", b"\xc0\x7f")}[codec]
    damage(sick, 1, nan[0], 2, nan[1])
    assert results(sick) == {"finite": f"final of conversation {first.id}, token 2 of {first.length}"}
    again = copy("again")
    for tensor in ("final", "input_ids"):
        value = row_of(good, 1, tensor, 2) if tensor == "final" else struct.pack("<i", 99)
        damage(again, 1, tensor, 3, value)
    assert results(again) == {"repeated rows": f"final of conversation {first.id}, token 3 of {first.length}"}
    outside = copy("outside")
    damage(outside, 1, "input_ids", 1, struct.pack("<i", 100))
    assert results(outside) == {"counts": f"conversation {first.id} holds a token outside the vocabulary"}
    miscounted = copy("miscounted")
    mask = row_of(good, 1, "generated", 0)
    damage(miscounted, 1, "generated", 0, b"\x01" if mask == b"\x00" else b"\x00")
    assert results(miscounted) == {"counts": f"conversation {first.id} has another number of generated tokens"}
    (copy("littered") / "shard-00099.safetensors").touch()
    assert "shard-00099" in results(tmp_path / "littered")["orphans"]


def test_a_shard_cut_by_100_bytes_is_named_before_anything_is_read(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", NAMES)
    shard = store / "shard-00002.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 100)
    with pytest.raises(DraftsmithError, match=rf"cut off(.|\n)*shard-00002(.|\n)*{size - 100:,} bytes(.|\n)*{size:,}"):
        check_store(store)


def test_two_conversations_with_one_state_are_found(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", NAMES)
    reader = HarvestReader(store)
    last = reader.manifest.shards[2].conversations[0]
    damage(store, 2, "final", last.length - 1, row_of(store, 0, "final", reader.lengths[0] - 1))
    assert results(store) == {
        "repeated rows": f"conversations {reader.ids[0]} and {last.id} end in the same state after different tokens"
    }


def test_merge_keeps_every_bit_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    one, two = make_store(tmp_path / "one", NAMES[:5]), make_store(tmp_path / "two", NAMES[5:], source="ee")
    whole = HarvestReader(merge([one, two], tmp_path / "both"))
    assert whole.ids == NAMES and not results(whole.path)
    parts = [*HarvestReader(one), *HarvestReader(two)]
    for found, part in zip(whole, parts, strict=True):
        assert torch.equal(found.taps, part.taps) and torch.equal(found.input_ids, part.input_ids)
    before = {file.name: file.read_bytes() for file in whole.path.iterdir()}
    # as if it had been killed after the first shard
    manifest = json.loads((whole.path / "manifest.json").read_text())
    for number, shard in enumerate(manifest["shards"]):
        if number == 0:
            (whole.path / "shard-00000.json").write_text(json.dumps(shard))
        else:
            (whole.path / shard["file"]).unlink()
    (whole.path / "manifest.json").write_text(json.dumps(manifest | {"shards": [], "complete": False}))
    (whole.path / ".shard-00001.safetensors.partial-00").touch()
    merge([one, two], whole.path)
    assert {file.name: file.read_bytes() for file in whole.path.iterdir()} == before
    shutil.rmtree(one)
    assert not results(whole.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": FACTS["target"] | {"config": "zz"}}, r"target: its config\n(.|\n)*found: {'config': 'zz'}"),
        ({"target": FACTS["target"] | {"tokenizer": "zz"}}, r"target: its tokenizer\n"),
        ({"target": FACTS["target"] | {"chat_template": "zz"}}, r"target: its chat template\n"),
        ({"taps": (2, 4, 6)}, r"differ in taps(.|\n)*\(2, 4, 6\)"),
        ({"codec": "fp8"}, r"differ in codec(.|\n)*fp8"),
        ({"computed_in": "bfloat16"}, r"differ in dtype while harvesting"),
    ],
)
def test_stores_that_do_not_belong_together_are_not_merged(tmp_path: Path, changes: dict, message: str) -> None:
    one, two = make_store(tmp_path / "one", NAMES[:3]), make_store(tmp_path / "two", NAMES[3:6], **changes)
    with pytest.raises(DraftsmithError, match=message):
        merge([one, two], tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_a_conversation_that_two_stores_hold_is_named(tmp_path: Path) -> None:
    one, two = make_store(tmp_path / "one", NAMES[:3]), make_store(tmp_path / "two", NAMES[2:6])
    with pytest.raises(DraftsmithError, match=r"conversation c2 stands in two"):
        merge([one, two], tmp_path / "both")


def test_a_changed_shard_is_neither_merged_nor_split(tmp_path: Path) -> None:
    store, other = make_store(tmp_path / "s", NAMES), make_store(tmp_path / "o", ["d"])
    damage(store, 1, "taps", 0, b"\x01\x02\x03", hash_too=False)
    with pytest.raises(DraftsmithError, match=r"bytes have changed(.|\n)*shard-00001"):
        split(store, tmp_path / "t", tmp_path / "h", share=0.25, seed=1)
    with pytest.raises(DraftsmithError, match=r"bytes have changed(.|\n)*shard-00001"):
        merge([other, store], tmp_path / "both")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o", "s"]


def test_shards_that_are_symbolic_links_are_merged_as_the_files_behind_them(tmp_path: Path) -> None:
    store, other = make_store(tmp_path / "s", NAMES), make_store(tmp_path / "o", ["d"])
    (tmp_path / "linked").mkdir()
    for file in store.iterdir():
        (tmp_path / "linked" / file.name).symlink_to(Path("../s") / file.name)
    both = merge([tmp_path / "linked", other], tmp_path / "elsewhere" / "both")
    assert not results(both) and not any(file.is_symlink() for file in both.iterdir())


@pytest.mark.parametrize("codec", ["bfloat16", "fp8"])
def test_split_holds_out_whole_conversations_by_seed(tmp_path: Path, codec: Codec) -> None:
    names = [*NAMES, "c3#2", "c3#3"]
    store = make_store(tmp_path / "s", names, codec=codec)
    train, heldout = split(store, tmp_path / "t", tmp_path / "h", share=0.25, seed=1)
    a, b, whole = HarvestReader(train), HarvestReader(heldout), HarvestReader(store)
    assert sorted(a.ids + b.ids) == sorted(names) and not results(train) and not results(heldout)
    assert len({name.split("#")[0] for name in b.ids}) == 3  # a quarter of twelve
    assert len({name in b.ids for name in ("c3", "c3#2", "c3#3")}) == 1
    for reader in (a, b):
        for number, name in enumerate(reader.ids):
            tokens, states = reader.stored(number)
            before, bits = whole.stored(whole.ids.index(name))
            for found, expected in ((tokens, before), (states, bits)):
                assert all(
                    torch.equal(found[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in expected
                )
    # the same conversations whatever their order, others under another seed
    turned = make_store(tmp_path / "turned", names[::-1], codec=codec)
    assert set(HarvestReader(split(turned, tmp_path / "t2", tmp_path / "h2", share=0.25, seed=1)[1]).ids) == set(b.ids)
    assert set(HarvestReader(split(store, tmp_path / "t3", tmp_path / "h3", share=0.25, seed=2)[1]).ids) != set(b.ids)
    with pytest.raises(DraftsmithError, match="would be empty"):
        split(store, tmp_path / "t4", tmp_path / "h4", share=0.01, seed=1)


def test_answers_to_one_prompt_are_on_one_side(tmp_path: Path) -> None:
    """Ids as the makers of prompts and parts write them; the first answer to two prompts is missing."""
    names = [
        part_id(answer_id(prompt, answer), part)
        for prompt in ("a", "b", "c", "d#7", "e", "f")
        for answer in (1, 2, 3)
        for part in (1, 2)
        if (prompt, answer) not in (("b", 1), ("e", 1))
    ]
    assert {"a", "a#2", "a~3", "a~2#2", "d#7", "d#7~2", "b~2"} < set(names) and "b" not in names
    sides = split(make_store(tmp_path / "s", names), tmp_path / "t", tmp_path / "h", share=0.5, seed=1)
    train, heldout = ({re.split("[~]|#2", name)[0] for name in HarvestReader(side).ids} for side in sides)
    assert train | heldout == {"a", "b", "c", "d#7", "e", "f"} and not train & heldout and len(heldout) == 3
    assert prompt_of("q#2", {"q#2", "q#3"}) == "q#2"  # a name that somebody gave


def test_a_manifest_with_a_log_probability_that_is_no_number_is_refused(tmp_path: Path) -> None:
    manifest = make_store(tmp_path / "s", NAMES) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"mean_logprob": null', '"mean_logprob": NaN', 1))
    with pytest.raises(DraftsmithError, match=r"does not fit a store: shards\.0\.conversations\.0\.mean_logprob"):
        HarvestReader(tmp_path / "s")


def test_stores_do_not_share_a_folder_and_no_mend_deletes_one(tmp_path: Path) -> None:
    store, other, third = (
        make_store(tmp_path / name, NAMES[first : first + 4]) for name, first in (("s", 0), ("o", 4), ("z", 8))
    )
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    (tmp_path / "link").symlink_to("s")
    with pytest.raises(DraftsmithError, match=r"share a folder(.|\n)*HELDOUT(.|\n)*TRAIN"):
        split(store, tmp_path / "t", tmp_path / "u" / ".." / "t", share=0.5, seed=0)
    with pytest.raises(DraftsmithError, match=r"share a folder(.|\n)*which is read"):
        split(store, tmp_path / "t", tmp_path / "link", share=0.5, seed=0)
    with pytest.raises(DraftsmithError, match=r"share a folder(.|\n)*which is read"):
        merge([store, other], tmp_path / "link")
    for act in (
        lambda: merge([store, other], third),
        lambda: split(store, tmp_path / "t", third, share=0.5, seed=0),
        lambda: split(store, third, tmp_path / "t", share=0.5, seed=0),
    ):
        with pytest.raises(DraftsmithError, match="mend: name another folder") as error:
            act()
        assert "rm " not in str(error.value) and not (tmp_path / "t").exists()
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.*") if "link" not in file.parts} == before


@pytest.mark.parametrize("share", [float("nan"), float("inf"), float("-inf"), 0.0, 1.0, -0.5])
def test_a_share_that_is_none_is_refused(tmp_path: Path, share: float) -> None:
    store = make_store(tmp_path / "s", NAMES)
    with pytest.raises(DraftsmithError, match="no such share"):
        split(store, tmp_path / "t", tmp_path / "h", share=share, seed=0)


def test_an_empty_store_and_a_foreign_vocabulary_are_refused_by_stats(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="the store holds no conversation"):
        store_stats(make_store(tmp_path / "e", []))
    store, foreign = make_store(tmp_path / "s", NAMES), tmp_path / "passwd"
    for content in (b"root:x:0:0", save({"d2t": torch.zeros(3)})):
        foreign.write_bytes(content)
        with pytest.raises(DraftsmithError, match="mend: name a file that draftsmith vocab wrote") as error:
            store_stats(store, foreign)
        assert "rm " not in str(error.value)


def test_a_manifest_whose_numbers_cannot_be_is_refused_by_field(tmp_path: Path) -> None:
    file = make_store(tmp_path / "s", NAMES) / "manifest.json"
    good = json.loads(file.read_text())
    for name in ("vocab_size", "hidden_size", "shard_tokens", "planned"):
        file.write_text(json.dumps(good | {name: -5}))
        with pytest.raises(DraftsmithError, match=f"manifest.json does not fit a store: {name}: "):
            check_store(file.parent)
    for length, message in ((10**6, r"shards\.1: .*have 1,000,\d+ tokens, not"), (None, "")):
        shards = json.loads(json.dumps(good["shards"]))
        first, second = shards[1]["conversations"][:2]
        if length is None:  # the sum is right
            first["length"], second["length"] = first["length"] + 1, second["length"] - 1
        else:
            first["length"] = length
        file.write_text(json.dumps(good | {"shards": shards}))
        if message:
            with pytest.raises(DraftsmithError, match=message):
                check_store(file.parent)
        else:
            assert "offsets of shard-00001.safetensors" in results(file.parent)["counts"]


def test_a_place_that_cannot_be_written_is_one_refusal(tmp_path: Path) -> None:
    """A file stands where the folder is to be, or one of its parents; /proc takes no folder from anybody."""
    store, other = make_store(tmp_path / "s", NAMES[:4]), make_store(tmp_path / "o", NAMES[4:])
    (tmp_path / "url").mkdir()
    shutil.copy(store / "manifest.json", tmp_path / "url")
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "store", Path("/proc/self/store")):
        for act in (
            lambda place=place: make_store(place, NAMES),
            lambda place=place: merge([store, other], place),
            lambda place=place: split(store, place, tmp_path / "h", share=0.5, seed=0),
            lambda place=place: split(store, tmp_path / "t", place, share=0.5, seed=0),
            lambda place=place: attach(f"file://{tmp_path}/url", place),
        ):
            with pytest.raises(DraftsmithError, match=f"could not write(.|\n)*{place}"):
                act()
    assert (tmp_path / "file").read_text() == "mine"


def test_stats_count_what_a_loop_counts_and_draw_it(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", NAMES)
    reader, counts = HarvestReader(store), [0] * 100
    for item in reader:
        for token, generated in zip(item.input_ids.tolist(), item.generated.tolist(), strict=True):
            counts[token] += generated
    assert count_store(reader).tolist() == counts
    stats = store_stats(store)
    assert (stats.tokens, stats.generated, stats.distinct) == (
        sum(reader.lengths), sum(counts), sum(count > 0 for count in counts),
    )  # fmt: skip
    record = stats.record()
    assert record["length"]["median"] == int(np.median(reader.lengths)) and record["conversations"] == 12
    draw(stats, tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_full_disk_is_one_refusal_and_leaves_what_was_whole(tmp_path: Path) -> None:
    """The process may not write files beyond a size; what it gets is what a full disk gives, another number."""
    names = [f"c{number}" for number in range(30)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, before[1]))
    try:
        with pytest.raises(DraftsmithError, match=r"could not write shard-000\d\d\.safetensors: File too large"):
            make_store(tmp_path / "s", names)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = sorted(file.name for file in (tmp_path / "s").iterdir())
    assert "manifest.json" in left and not [name for name in left if "partial" in name]
    unbroken = make_store(tmp_path / "unbroken", names)
    provenance = Provenance(**(FACTS | {"planned": 30}))
    with StoreWriter(tmp_path / "s", provenance) as writer:
        rest = list(HarvestReader(unbroken))[writer.done :]
        for item in rest:
            writer.append(item)
    assert {f.name: f.read_bytes() for f in (tmp_path / "s").iterdir()} == {
        f.name: f.read_bytes() for f in unbroken.iterdir()
    }


def test_a_changed_template_or_tokenizer_is_not_harvested_into_the_same_store(
    make_config: Callable[..., RunConfig], tiny: Path, tmp_path: Path
) -> None:
    from draftsmith.data.harvest import harvest

    config = make_config()
    synthesize(config, "train")
    harvest(config, "train")
    for name, change in (
        ("chat_template.jinja", lambda text: text + " "),
        ("tokenizer.json", lambda text: text + "\n"),
    ):
        other = tmp_path / name.split(".", maxsplit=1)[0]
        shutil.copytree(tiny, other)
        (other / name).write_text(change((other / name).read_text()))
        with pytest.raises(DraftsmithError, match="was written by another target"):
            harvest(make_config(target__path=str(other)), "train")
        mine = HarvestReader(config.store("train")).manifest
        marks = mine.target | {name.split(".", maxsplit=1)[0]: "changed"}
        fields = mine.model_dump(include=set(Provenance.model_fields)) | {"target": marks}
        with (
            pytest.raises(DraftsmithError, match=rf"another target: its {name.split('.', maxsplit=1)[0]} changed"),
            StoreWriter(config.store("train"), Provenance(**fields)),
        ):
            pass
