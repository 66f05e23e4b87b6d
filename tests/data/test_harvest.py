"""Promises of the harvest, against transformers' own hidden states of one conversation at a time."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig, TargetSection
from draftsmith.data.conversations import write_conversations
from draftsmith.data.harvest import harvest, plan_batches
from draftsmith.data.rows import Task
from draftsmith.data.store import HarvestReader
from draftsmith.data.synthesize import synthesize
from draftsmith.data.target_model import LoadedTarget, load_target
from draftsmith.data.trunk import Trunk

KILLED = """
import os, signal, sys
from draftsmith.configs.schema import load_config
from draftsmith.data import store_writer
from draftsmith.data.harvest import harvest

calls, write = 0, store_writer.write_json

def dying(path, value):
    global calls
    calls += 1
    if calls == 3:  # the empty manifest, the first shard's record, the second's
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, value)

store_writer.write_json = dying
harvest(load_config(sys.argv[1]), "train")
"""

TAPS = (2, 4, 5)
LENGTHS = (50, 5, 120, 1, 33, 77)


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 512, (length,), generator=generator).tolist() for length in LENGTHS]


def forward_states(
    target: LoadedTarget, rows: list[list[int]], taps: tuple[int, ...], chunk: int | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """taps and final of each row, from one pass over all of them."""
    with torch.no_grad():
        tapped, final = Trunk(target, taps, "bfloat16", chunk).states([np.array(row) for row in rows])
    lengths = [len(row) for row in rows]
    return list(zip(tapped.split(lengths), final.split(lengths), strict=True))


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_states_are_transformers_hidden_states_exactly(tiny: Path, sequences: list[list[int]]) -> None:
    target = load_target(TargetSection(path=tiny), "float32")
    model = AutoModelForCausalLM.from_pretrained(tiny)
    for row in sequences:
        ((taps, final),) = forward_states(target, [row], TAPS)
        head = Trunk(target, TAPS, "bfloat16").run(Task([np.array(row)], [np.arange(len(row))])).argmax
        with torch.no_grad():
            output = model(torch.tensor([row]), output_hidden_states=True)
        expected = torch.stack([output.hidden_states[tap][0] for tap in TAPS], dim=1)
        assert torch.equal(taps, expected) and taps.shape == (len(row), 3, 64)
        # the last of transformers' hidden states is the one after the final norm
        assert torch.equal(final, output.hidden_states[8][0])
        assert head.tolist() == output.logits[0].argmax(dim=-1).tolist()
        assert torch.allclose(model.lm_head(final), output.logits[0], atol=1e-5)


def test_batched_states_equal_single_ones(tiny: Path, sequences: list[list[int]]) -> None:
    target = load_target(TargetSection(path=tiny), "float32")
    worst = 0.0
    batched = forward_states(target, sequences, TAPS)
    for row, (taps, final) in zip(sequences, batched, strict=True):
        ((alone_taps, alone_final),) = forward_states(target, [row], TAPS)
        for one, other in ((taps, alone_taps), (final, alone_final)):
            worst = max(worst, float(((one - other).abs() / other.abs().clamp(min=1.0)).max()))
    assert worst < 2e-5, f"largest relative difference {worst:.1e}"


def test_the_store_holds_the_states_of_every_conversation_in_order(
    make_config: Callable[..., RunConfig], tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(target__taps=[1, 3, 7])
    synthesize(config, "train")
    reader = HarvestReader(harvest(config, "train"))
    assert reader.ids == [f"p{number}" for number in range(8)]
    assert len(reader.manifest.shards) > 2
    assert (reader.manifest.taps, reader.manifest.hidden_size, reader.manifest.vocab_size) == ((1, 3, 7), 64, 512)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    for item in reader:
        with torch.no_grad():
            output = model(item.input_ids[None], output_hidden_states=True)
        for position, tap in enumerate((1, 3, 7)):
            torch.testing.assert_close(
                item.taps[:, position], output.hidden_states[tap][0].bfloat16(), rtol=0.01, atol=0.01
            )
        torch.testing.assert_close(item.final, output.hidden_states[8][0].bfloat16(), rtol=0.01, atol=0.01)
        guessed = item.argmax[:-1][item.generated[1:]]
        assert torch.equal(guessed, item.input_ids[1:][item.generated[1:]])
        assert item.argmax[:-1][~item.generated[1:]].tolist() == [-1] * int((~item.generated[1:]).sum())
    assert "agrees with 100.00%" in capsys.readouterr().err
    reader.verify()


def test_batches_keep_to_the_token_budget_and_lose_nothing() -> None:
    # longest first: 9 alone fills 2 x 9 = 18 with 7; 5, 5, 4 fill 15; 30 is over the budget and stands alone
    assert plan_batches([5, 9, 4, 30, 7, 5], 18) == [[3], [1, 4], [0, 5, 2]]
    assert plan_batches([], 18) == []


def test_a_killed_harvest_goes_on_and_ends_with_the_same_bytes(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config()
    synthesize(config, "train")
    unbroken = files(harvest(config, "train"))
    config.store("train").rename(tmp_path / "unbroken")
    file = tmp_path / "killed.json"
    file.write_text(config.model_dump_json())
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.run([sys.executable, "-c", KILLED, str(file)], env=environment, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    # the second shard was written and its record was not
    found = [name for name in files(config.store("train")) if name.startswith("shard") and name.endswith("rs")]
    assert found[:2] == sorted(unbroken)[1:3]
    assert len(list(config.store("train").glob("shard-*.json"))) == 1
    with pytest.raises(DraftsmithError, match="unfinished"):
        HarvestReader(config.store("train"))
    assert files(harvest(config, "train")) == unbroken


def test_a_second_harvest_writes_nothing_and_says_so(
    make_config: Callable[..., RunConfig],
    put_conversations: Callable[..., list],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config()
    put_conversations(config, [([9, 300, 4], [(1, 3)])])
    before = files(harvest(config, "train"))
    monkeypatch.setattr("draftsmith.data.harvest.load_target", lambda *_, **__: pytest.fail("weights were loaded"))
    assert files(harvest(config, "train")) == before
    assert "complete already" in capsys.readouterr().err
    with pytest.raises(DraftsmithError, match="another taps"):
        harvest(make_config(target__taps=[1, 2, 3]), "train")
    put_conversations(config, [([9, 300, 5], [(1, 3)])])
    with pytest.raises(DraftsmithError, match="another source"):
        harvest(config, "train")
    assert files(config.store("train")) == before


def test_long_conversations_are_cut_and_counted(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(harvest__max_length=4)
    # u a a u u a a: the first answer survives the cut at 4; the second conversation keeps no generated token
    put_conversations(config, [([3, 4, 5, 6, 7, 8, 9], [(1, 3), (5, 7)]), ([3, 4, 5, 6, 7], [(4, 5)])])
    reader = HarvestReader(harvest(config, "train"))
    assert reader.lengths == [4, 4]
    assert reader[0].generated.tolist() == [False, True, True, False]
    printed = capsys.readouterr().err
    assert "2 conversations were cut at 4 tokens" in printed and "1 of them have no generated token" in printed


def test_states_that_are_not_finite_are_refused_by_name(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list], tiny: Path, tmp_path: Path
) -> None:
    sick = tmp_path / "sick"
    sick.mkdir()
    for file in tiny.iterdir():
        (sick / file.name).write_bytes(file.read_bytes())
    tensors = load_file(sick / "model.safetensors")
    tensors["model.embed_tokens.weight"][300] = float("nan")
    save_file(tensors, sick / "model.safetensors", metadata={"format": "pt"})
    config = make_config(target__path=str(sick))
    put_conversations(config, [([9, 8, 4], [(1, 3)]), ([9, 300, 4], [(1, 3)])])
    with pytest.raises(DraftsmithError, match=r"taps of conversation c1 is not finite(.|\n)*token . of 3"):
        harvest(config, "train")
    with pytest.raises(DraftsmithError, match="unfinished"):
        HarvestReader(config.store("train"))
    assert sorted(files(config.store("train"))) == ["manifest.json"]


def damaged(tiny: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the tiny target whose tensors `change` has altered."""
    shutil.copytree(tiny, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_target_that_lacks_a_weight_is_never_filled_up_at_random(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list], tiny: Path, tmp_path: Path
) -> None:
    """transformers makes up what a file lacks or has in another shape, and warns; states of that would be of no model."""
    name = "model.layers.3.mlp.up_proj.weight"
    lacking = damaged(tiny, tmp_path / "lacking", lambda tensors: tensors.pop(name))
    narrow = damaged(tiny, tmp_path / "narrow", lambda tensors: tensors.update({name: tensors[name][:, :32].clone()}))
    for folder in (lacking, narrow):
        config = make_config(name=folder.name, target__path=str(folder))
        put_conversations(config, [([9, 8, 4], [(1, 3)])], target=folder)
        with pytest.raises(DraftsmithError, match=name.replace(".", r"\.")):
            harvest(config, "train")
        assert not list(config.store("train").glob("shard-*"))


def test_a_target_whose_weights_are_cut_off_is_one_refusal(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list], tiny: Path, tmp_path: Path
) -> None:
    cut = Path(shutil.copytree(tiny, tmp_path / "cut"))
    config = make_config(target__path=str(cut))
    put_conversations(config, [([9, 8, 4], [(1, 3)])], target=cut)
    os.truncate(cut / "model.safetensors", (cut / "model.safetensors").stat().st_size - 100)
    with pytest.raises(DraftsmithError, match=r"model\.safetensors"):
        harvest(config, "train")
    assert not list(config.store("train").glob("shard-*"))


def test_a_disk_that_fills_up_is_one_refusal_and_the_next_run_goes_on(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list]
) -> None:
    """A limit on the size of files stands in for the full disk: the second shard, the larger one, does not fit."""
    parts = [([3 + n for n in range(20)], [(1, 20)]), ([3 + n % 300 for n in range(190)], [(1, 190)])]
    config = make_config()
    put_conversations(config, parts)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        with pytest.raises(DraftsmithError, match=r"could not write shard-00001\.safetensors(.|\n)*free some space"):
            harvest(config, "train")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(files(config.store("train"))) == ["manifest.json", "shard-00000.json", "shard-00000.safetensors"]
    other = make_config(name="unbroken")
    put_conversations(other, parts)
    assert files(harvest(config, "train")) == files(harvest(other, "train"))


@pytest.mark.parametrize("taps", [[2, 4, 8], [4, 2, 5], [2, 2, 5]])
def test_taps_that_the_target_lacks_stop_before_anything(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list], taps: list[int]
) -> None:
    config = make_config(target__taps=taps)
    put_conversations(config, [([9, 300, 4], [(1, 3)])])
    with pytest.raises(DraftsmithError, match=r"taps do not fit(.|\n)*within 0\.\.7"):
        harvest(config, "train")
    assert not config.store("train").exists()


def test_without_conversations_it_names_the_command(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    with pytest.raises(DraftsmithError, match="draftsmith synthesize"):
        harvest(config, "train")
    assert not config.folder.exists()


def test_a_trunk_whose_norm_is_not_its_output_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(TargetSection(path=tiny), "float32")
    forward = type(target.trunk).forward

    def twice(self: Any, *arguments: Any, **named: Any) -> Any:
        output = forward(self, *arguments, **named)
        output.last_hidden_state = output.last_hidden_state * 2
        return output

    monkeypatch.setattr(type(target.trunk), "forward", twice)
    with pytest.raises(DraftsmithError, match="final norm"):
        forward_states(target, [[1, 2, 3]], TAPS)


def test_workers_harvest_the_same_bytes(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    synthesize(config, "train")
    alone = {file.name: file.read_bytes() for file in harvest(config, "train").glob("*.safetensors")}
    shutil.rmtree(config.store("train"))
    together = make_config(harvest__workers=2)
    assert {file.name: file.read_bytes() for file in harvest(together, "train").glob("*.safetensors")} == alone


def test_rows_that_repeat_although_the_token_differs_are_refused_by_name(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list], tiny: Path, tmp_path: Path
) -> None:
    """A target whose embedding holds one row for all tokens, and whose attention adds nothing, is deaf."""
    deaf = tmp_path / "deaf"
    shutil.copytree(tiny, deaf)
    tensors = load_file(deaf / "model.safetensors")
    tensors["model.embed_tokens.weight"][:] = tensors["model.embed_tokens.weight"][7].clone()
    for name in tensors:
        if name.endswith("o_proj.weight"):
            tensors[name].zero_()
    save_file(tensors, deaf / "model.safetensors", metadata={"format": "pt"})
    config = make_config(target__path=str(deaf))
    put_conversations(config, [([9, 9, 9, 8, 4], [(1, 3)])], target=deaf)
    with pytest.raises(DraftsmithError, match=r"final of conversation c0 repeats the row before(.|\n)*token 3 of 5"):
        harvest(config, "train")
    # equal tokens may repeat: without another token there is nothing to refuse
    shutil.rmtree(config.store("train"))
    put_conversations(config, [([9, 9, 9, 9], [(1, 3)])], target=deaf)
    harvest(config, "train")


def test_sampled_text_gets_the_heads_choice_where_the_next_token_was_generated(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list], tiny: Path
) -> None:
    config = make_config()
    put_conversations(config, [([9, 300, 4, 5, 6, 7], [(1, 3), (5, 6)]), ([5, 6, 7], [(2, 3)])])
    reader, model = HarvestReader(harvest(config, "train")), AutoModelForCausalLM.from_pretrained(tiny)
    for item, rows in zip(reader, ([0, 1, 4], [1]), strict=True):
        with torch.no_grad():
            chosen = model(item.input_ids[None]).logits[0].argmax(dim=-1)
        expected = [int(chosen[row]) if row in rows else -1 for row in range(len(item.input_ids))]
        assert item.argmax.tolist() == expected


def test_text_that_the_target_did_not_write_is_warned_of(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config()
    written = put_conversations(config, [(list(range(20, 60)), [(5, 40)])])
    write_conversations(config.conversations("train"), [one.model_copy(update={"greedy": True}) for one in written])
    harvest(config, "train")
    assert "below train.guard_threshold" in capsys.readouterr().err
