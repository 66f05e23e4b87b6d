"""Promises of a harvest by several processes, and of anything that is killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import HarvestSection, RunConfig, TargetSection
from draftsmith.data.harvest import harvest
from draftsmith.data.slices import refuse_whole
from draftsmith.data.store import HarvestReader, Provenance
from draftsmith.data.store_writer import StoreWriter
from draftsmith.data.synthesize import synthesize
from draftsmith.data.target_model import load_target

KILLS = int(os.environ.get("DRAFTSMITH_KILLS", "6"))
"""Kills in all; half of them on one rank, half on two. The full number is 50."""


Nursery = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """A function that has an order of tests/data/nursery.py followed; all are followed by one process's forks."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("nursery.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip

        def follow(config: RunConfig, folder: Path, **order: Any) -> dict[str, Any]:
            assert process.stdin is not None and process.stdout is not None
            file, answer, said = (folder / name for name in ("nursery.json", "answer.json", "said"))
            file.write_text(config.model_dump_json())
            print(json.dumps([str(file), order, str(answer), str(said)]), file=process.stdin, flush=True)
            assert process.stdout.readline() == "0\n", said.read_text()
            return json.loads(answer.read_text()) | {"said": said.read_text()}

        yield follow
        process.communicate()


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("dtype", "codec"), [("float32", "bf16"), pytest.param("bfloat16", "fp8", marks=pytest.mark.slow)]
)
def test_one_two_and_three_ranks_write_the_same_store_bit_by_bit(
    nursery: Nursery, make_config: Callable[..., RunConfig], tmp_path: Path, dtype: str, codec: str
) -> None:
    config = make_config(target__dtype=dtype, harvest__codec=codec, harvest__shard_tokens=110)
    synthesize(config, "train")
    result = nursery(config, tmp_path, verbs=["harvest"], ranks=[1, 2, 3])
    assert result["codes"] == [[0], [0, 0], [0, 0, 0]], result["said"]
    # a number of shards that neither two nor three processes share out evenly
    assert len(HarvestReader(config.store("train")).manifest.shards) == 5
    one, two, three = result["stores"]
    assert one == two == three and len(one) == 6


@pytest.mark.slow
def test_ranks_go_on_with_what_another_number_of_ranks_left(
    nursery: Nursery, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config(harvest__shard_tokens=110)
    synthesize(config, "train")
    assert nursery(config, tmp_path, verbs=["harvest"], ranks=[1])["codes"] == [[0]]
    whole = files(config.store("train"))
    # an unfinished store: the manifest without shards, and the records of two of them
    manifest = json.loads(whole["manifest.json"])
    for number, shard in enumerate(manifest["shards"]):
        file = config.store("train") / shard["file"]
        if number in (0, 2):
            file.with_suffix(".json").write_text(json.dumps(shard))
        elif number != 3:
            file.unlink()  # number 3 stays without a record: killed between file and record
    (config.store("train") / "manifest.json").write_text(json.dumps(manifest | {"shards": [], "complete": False}))
    with pytest.raises(DraftsmithError, match="unfinished"):
        HarvestReader(config.store("train"))
    kept = (config.store("train") / manifest["shards"][2]["file"]).stat().st_mtime_ns
    assert nursery(config, tmp_path, verbs=["harvest"], ranks=[3])["codes"] == [[0, 0, 0]]
    assert files(config.store("train")) == whole
    assert (config.store("train") / manifest["shards"][2]["file"]).stat().st_mtime_ns == kept


@pytest.mark.slow
def test_a_fault_on_the_first_rank_ends_the_others_and_is_told_once(
    nursery: Nursery, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config(harvest__shard_tokens=110)
    synthesize(config, "train")
    assert nursery(config, tmp_path, verbs=["harvest"], ranks=[1])["codes"] == [[0]]
    other = make_config(harvest__shard_tokens=110, harvest__max_length=40)
    result = nursery(other, tmp_path, verbs=["harvest"], ranks=[2])
    assert result["codes"] == [[3, 2]] and result["said"].count("another max_length") == 1


def test_a_store_that_is_being_written_is_not_written_by_another(tmp_path: Path) -> None:
    provenance = Provenance(
        target={}, target_mark="", taps=(1,), hidden_size=8, vocab_size=9, computed_in="float32", source="", planned=1,
        max_length=9, shard_tokens=9,
    )  # fmt: skip
    with (
        StoreWriter(tmp_path, provenance),
        pytest.raises(DraftsmithError, match="another process writes"),
        StoreWriter(tmp_path, provenance),
    ):
        pass
    with StoreWriter(tmp_path, provenance), StoreWriter(tmp_path, provenance, join=True):
        pass


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_killed_runs_end_with_the_conversations_and_bytes_of_an_unbroken_one(
    nursery: Nursery, make_config: Callable[..., RunConfig], tmp_path: Path, ranks: int
) -> None:
    config = make_config(harvest__shard_tokens=50, synthesize__batch_size=1)
    verbs = ["synthesize", "harvest"] if ranks == 1 else ["harvest"]
    if ranks > 1:
        synthesize(config, "train")
    result = nursery(config, tmp_path, verbs=verbs, ranks=ranks, kills=-(-KILLS // 2), seed=ranks)
    print(result)
    assert result["failures"] == [], result["said"]
    assert result["kills"] == -(-KILLS // 2) and result["completed"] >= 1


@pytest.mark.slow
def test_two_processes_that_hold_one_target_together_write_its_states_once(
    nursery: Nursery, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """One long conversation runs in pieces with a cache; sampled ones and a probe ask the sliced head too."""
    config = make_config(harvest__shard_tokens=110, harvest__batch_tokens=60, synthesize__temperature=1.0)
    synthesize(config, "train")
    alone = nursery(config, tmp_path, verbs=["harvest"], ranks=[1])
    assert alone["codes"] == [[0]], alone["said"]
    whole = list(HarvestReader(config.store("train")))
    assert max(len(one.input_ids) for one in whole) > 60
    shutil.rmtree(config.store("train"))
    config = config.model_copy(update={"harvest": config.harvest.model_copy(update={"tensor_parallel": True})})
    result = nursery(config, tmp_path, verbs=["harvest"], ranks=[2])
    assert result["codes"] == [[0, 0]], result["said"]
    assert result["said"].count("wrote ") == 1 and "with one target" in result["said"]
    reader = HarvestReader(config.store("train"))
    assert (reader.manifest.computed_over, len(reader)) == (2, len(whole))
    equal = values = 0
    for one, other in zip(reader, whole, strict=True):
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.argmax, other.argmax)
        for a, b in ((one.taps, other.taps), (one.final, other.final)):
            # float32 both times: a sum of two halves may be rounded to the next bfloat16 when it is stored
            torch.testing.assert_close(a.float(), b.float(), rtol=2**-7, atol=1e-4)
            equal, values = equal + int((a == b).sum()), values + a.numel()
    assert equal / values > 0.995
    with pytest.raises(DraftsmithError, match="another computed_over"):
        harvest(
            config.model_copy(update={"harvest": config.harvest.model_copy(update={"tensor_parallel": False})}), "train"
        )


def test_heads_that_cannot_be_shared_out_are_refused_by_number(tiny: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"4 heads(.|\n)*3 processes(.|\n)*num_attention_heads"):
        load_target(TargetSection(path=tiny), "float32", together=3)
    with pytest.raises(DraftsmithError, match="exclude each other"):
        load_target(TargetSection(path=tiny, device_map="cpu"), "float32", together=2)
    whole = load_target(TargetSection(path=tiny), "float32").model
    with pytest.raises(DraftsmithError, match=r"no plan to slice(.|\n)*LlamaForCausalLM"):
        refuse_whole(TargetSection(path=tiny), whole)
    with pytest.raises(ValueError, match="engine_options"):
        HarvestSection(backend="vllm", tensor_parallel=True)


@pytest.mark.slow
def test_accelerate_launch_harvests_with_two_processes(
    nursery: Nursery, make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_config(harvest__shard_tokens=110)
    synthesize(config, "train")
    assert nursery(config, tmp_path, verbs=["harvest"], ranks=[1])["codes"] == [[0]]
    alone = files(config.store("train"))
    shutil.rmtree(config.store("train"))
    launcher = Path(__file__).parents[2] / "configs/accelerate/ddp.yaml"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(launcher)),
            *("--num_processes", "2", "--main_process_port", "0", "-m", "draftsmith"),
            *("harvest", str(tmp_path / "nursery.json"), "--split", "train"),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stderr and files(config.store("train")) == alone
