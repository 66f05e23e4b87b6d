"""Promises of the draft vocabulary, with values worked out by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.conversations import read_conversations
from draftsmith.data.harvest import harvest
from draftsmith.data.store import HarvestReader
from draftsmith.data.synthesize import synthesize
from draftsmith.data.vocab import DraftVocab, build_vocab, check_maps, choose_vocab, count_store, count_tokens

COUNTS = torch.tensor([0, 0, 4, 9, 1, 4, 0, 7, 4, 0])


def choose(size: int, always: list[int]) -> DraftVocab:
    return choose_vocab(COUNTS, size, always, source="s", target="t")


def test_the_most_frequent_ids_are_in_and_ties_go_to_the_lowest() -> None:
    # by count: 3 (9), 7 (7), then 2, 5 and 8 (4 each): 2 and 5 come first; ascending 2 3 5 7
    vocab = choose(4, [])
    assert vocab.target_ids.tolist() == [2, 3, 5, 7]
    assert vocab.d2t.tolist() == [2, 2, 3, 4]
    assert vocab.t2d.nonzero()[:, 0].tolist() == [2, 3, 5, 7]
    assert vocab.coverage(COUNTS) == 24 / 29


def test_special_ids_are_always_in() -> None:
    assert choose(4, [0, 9]).target_ids.tolist() == [0, 3, 7, 9]


def test_rare_corpora_are_filled_with_the_lowest_unused_ids() -> None:
    assert choose(8, [9]).target_ids.tolist() == [0, 2, 3, 4, 5, 7, 8, 9]
    assert choose(99, []).target_ids.tolist() == list(range(10))
    assert choose(99, []).d2t.tolist() == [0] * 10


def test_more_special_ids_than_room_stop() -> None:
    with pytest.raises(DraftsmithError, match=r"at least 3"):
        choose(2, [1, 2, 3])


def test_only_generated_tokens_are_counted(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list]
) -> None:
    conversations = put_conversations(
        make_config(), [([5, 5, 6, 7, 2], [(2, 5)]), ([6, 6, 2, 6, 9, 2], [(1, 3), (4, 6)])]
    )
    counts = count_tokens(conversations, 12)
    assert counts.tolist() == [0, 0, 3, 0, 0, 0, 2, 1, 0, 1, 0, 0]
    with pytest.raises(DraftsmithError, match="conversation c1 holds a token outside"):
        count_tokens(conversations, 9)


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    vocab = choose(4, [0])
    vocab.save(tmp_path / "vocab.safetensors")
    again = DraftVocab.load(tmp_path / "vocab.safetensors")
    assert torch.equal(again.d2t, vocab.d2t) and torch.equal(again.t2d, vocab.t2d)
    assert torch.equal(again.counts, COUNTS) and (again.source, again.target) == ("s", "t")
    first = (tmp_path / "vocab.safetensors").read_bytes()
    vocab.save(tmp_path / "vocab.safetensors")
    assert (tmp_path / "vocab.safetensors").read_bytes() == first


def test_damaged_maps_are_named(tmp_path: Path) -> None:
    vocab = choose(4, [])
    # absolute ids where offsets belong, the classic mix-up
    with pytest.raises(DraftsmithError, match=r"draft id 1(.|\n)*found: 4(.|\n)*expected: 3(.|\n)*offsets"):
        check_maps(vocab.target_ids, vocab.t2d)
    with pytest.raises(DraftsmithError, match="different numbers"):
        check_maps(vocab.d2t[:3], vocab.t2d)
    with pytest.raises(DraftsmithError, match="d2t has another dtype"):
        check_maps(vocab.d2t.int(), vocab.t2d)
    path = tmp_path / "vocab.safetensors"
    vocab.save(path)
    note = {"draftsmith": '{"schema_version": 1, "source": "s", "target": "t"}'}
    save_file(load_file(path) | {"counts": COUNTS[:5]}, path, metadata=note)
    with pytest.raises(DraftsmithError, match="counts"):
        DraftVocab.load(path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DraftsmithError, match=r"cannot be read(.|\n)*mend: rm .*; draftsmith vocab"):
        DraftVocab.load(path)
    with pytest.raises(DraftsmithError, match="draftsmith vocab"):
        DraftVocab.load(tmp_path / "absent")


def test_build_vocab_takes_the_end_of_turn_in_and_prints_coverage(
    make_config: Callable[..., RunConfig],
    put_conversations: Callable[..., list],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_config(vocab__size=6)
    put_conversations(config, [([9, 300, 300, 300, 77, 77, 4], [(1, 7)])])
    vocab = DraftVocab.load(build_vocab(config))
    # 0, 1, 2 are the special tokens; then 300 (3 times), 77 (twice), 4 (once)
    assert vocab.target_ids.tolist() == [0, 1, 2, 4, 77, 300]
    printed = capsys.readouterr().err
    assert "train 100.00%" in printed and "3 distinct" in printed
    before = config.vocab_file.stat().st_mtime_ns
    assert build_vocab(config) == config.vocab_file
    assert config.vocab_file.stat().st_mtime_ns == before
    assert "complete already" in capsys.readouterr().err


def test_a_vocabulary_of_other_conversations_or_size_is_refused(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list]
) -> None:
    put_conversations(make_config(), [([9, 300, 4], [(1, 3)])])
    build_vocab(make_config())
    with pytest.raises(DraftsmithError, match="another size"):
        build_vocab(make_config(vocab__size=65))
    put_conversations(make_config(), [([9, 300, 5], [(1, 3)])])
    with pytest.raises(DraftsmithError, match="another source"):
        build_vocab(make_config())


def test_without_conversations_it_names_the_command(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    with pytest.raises(DraftsmithError, match="draftsmith synthesize"):
        build_vocab(config)
    assert not config.folder.exists()


def test_thinking_and_tool_tokens_are_always_in(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list], tiny: Path, tmp_path: Path
) -> None:
    """Added tokens count as special even where the tokenizer does not call them so, and though they never occurred."""
    from transformers import AutoTokenizer

    other = tmp_path / "thinks"
    shutil.copytree(tiny, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>"])
    tokenizer.save_pretrained(other)
    wanted = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<tool_call>", "<|im_end|>"])
    config = make_config(vocab__size=9, target__path=str(other))
    put_conversations(config, [([9, 300, 300, 300, 77, 77, 4], [(1, 7)])], target=other)
    vocab = DraftVocab.load(build_vocab(config))
    assert set(wanted) <= set(vocab.target_ids.tolist()) and {300, 77, 4} <= set(vocab.target_ids.tolist())


def test_counting_in_pieces_and_over_shards_gives_the_counts_of_a_loop(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    synthesize(config, "train")
    expected = [0] * 512
    for conversation in read_conversations(config.conversations("train")):
        for start, end in conversation.spans:
            for token in conversation.input_ids[start:end]:
                expected[token] += 1
    monkeypatch.setattr("draftsmith.data.vocab.CHUNK", 7)
    assert count_tokens(read_conversations(config.conversations("train")), 512).tolist() == expected
    from_conversations = build_vocab(config).read_bytes()
    store = harvest(config, "train")
    assert count_store(HarvestReader(store)).tolist() == expected
    config.vocab_file.unlink()
    assert build_vocab(config, store).read_bytes() == from_conversations  # bound to the same source and target
    vocab = DraftVocab.load(config.vocab_file)
    manifest = HarvestReader(store).manifest
    assert (vocab.source, vocab.target) == (manifest.source, manifest.target_mark)
