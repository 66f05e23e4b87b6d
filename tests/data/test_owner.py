"""Two runs whose `location` is one folder of shared storage: neither deletes what the other has written there."""

from __future__ import annotations

import json
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.store import HarvestedConversation, HarvestReader, Provenance
from draftsmith.data.store_check import check_store
from draftsmith.data.store_writer import StoreWriter, attach


def provenance(shared: Path, **changes) -> Provenance:
    return Provenance(
        target={"config": "aa"}, target_mark="aa", taps=(2, 4, 5), hidden_size=32, vocab_size=100, computed_in="float32",
        max_length=64, shard_tokens=8, **{"source": "ff", "planned": 5, "location": f"file://{shared}"} | changes,
    )  # fmt: skip


def write(writer: StoreWriter, upto: int) -> None:
    for number in range(writer.done, upto):
        dice = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 100, (8,), generator=dice)
        writer.append(
            HarvestedConversation(
                id=f"c{number}", input_ids=ids, generated=ids > 50, argmax=ids, greedy=True, mean_logprob=None,
                taps=torch.randn(8, 3, 32, generator=dice).bfloat16(), final=torch.randn(8, 32, generator=dice).bfloat16(),
            )
        )  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The store of a run that was killed after two of five shards."""
    with pytest.raises(KeyboardInterrupt), StoreWriter(tmp_path / "first", provenance(tmp_path / "shared")) as writer:
        write(writer, 3)
        raise KeyboardInterrupt
    return tmp_path / "first"


@pytest.mark.parametrize("changes", [{}, {"source": "ee", "planned": 3}])
def test_another_runs_unfinished_store_is_left_alone(begun: Path, tmp_path: Path, changes: dict) -> None:
    shared = tmp_path / "shared"
    before = files(shared)
    assert {"owner.json", "shard-00000.safetensors", "shard-00001.safetensors"} <= before.keys()
    with (
        pytest.raises(DraftsmithError, match=rf"unfinished store of another run(.|\n)*{begun}(.|\n)*owner\.json"),
        StoreWriter(tmp_path / "second", provenance(shared, **changes)),
    ):
        pass
    assert files(shared) == before
    with StoreWriter(begun, provenance(shared)) as writer:
        assert writer.done == 2
        write(writer, 5)
    assert all(one.passed for one in check_store(begun)) and len(HarvestReader(begun)) == 5
    assert "owner.json" not in files(shared) | files(begun)


def test_a_run_goes_on_under_another_machines_name_and_begins_anew_in_its_own_folder(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        with StoreWriter(begun, provenance(shared)) as writer:
            assert writer.done == 2
    shutil.rmtree(begun)
    with StoreWriter(begun, provenance(shared, source="ee")) as writer:
        assert writer.done == 0 and [*files(shared)] == ["owner.json"]
        write(writer, 5)
    assert all(one.passed for one in check_store(begun))


def test_a_run_that_was_replaced_does_not_clear_its_successor(begun: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "owner.json").unlink()
    with StoreWriter(tmp_path / "second", provenance(shared)) as writer:
        write(writer, 2)
        before = files(shared)
        with (
            pytest.raises(DraftsmithError, match="unfinished store of another run"),
            StoreWriter(begun, provenance(shared)),
        ):
            pass
        assert files(shared) == before
        write(writer, 5)
    before = files(shared)
    with pytest.raises(DraftsmithError, match="finished store lies"), StoreWriter(begun, provenance(shared)):
        pass
    assert files(shared) == before


def test_a_run_killed_before_its_manifest_was_up_puts_it_there(begun: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    mark = (begun / "owner.json").read_bytes()
    with StoreWriter(begun, provenance(shared)) as writer:
        write(writer, 5)
    whole = files(shared)
    (shared / "manifest.json").unlink()
    for folder in (begun, shared):
        (folder / "owner.json").write_bytes(mark)
    with StoreWriter(begun, provenance(shared)) as writer:
        assert writer.complete
    assert files(shared) == whole and json.loads(whole["manifest.json"])["complete"]
    assert [*files(begun)] == ["manifest.json"]


def test_a_relative_location_is_found_from_every_folder(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    for location in ("shared", "file://shared"):
        assert make_config(harvest__location=location).harvest.location == location.replace(
            "shared", str(tmp_path / "a" / "shared")
        )
    assert make_config(harvest__location="s3://b/p").harvest.location == "s3://b/p"
    with pytest.raises(DraftsmithError, match=r"harvest\.location"):
        make_config(harvest__location="")
    location = make_config(harvest__location="shared").harvest.location
    with StoreWriter(tmp_path / "s", provenance(tmp_path, location=f"{location}/train")) as writer:
        write(writer, 5)
    attach("shared/train", tmp_path / "attached")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "s", tmp_path / "attached"):
        assert all(one.passed for one in check_store(path))


def test_a_store_with_a_relative_location_of_old_is_continued_and_no_mend_deletes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative, absolute = (provenance(tmp_path, location=one) for one in ("shared", str(tmp_path / "shared")))
    with StoreWriter(tmp_path / "s", relative) as writer:
        write(writer, 5)
    with StoreWriter(tmp_path / "s", absolute) as writer:
        assert writer.complete
    monkeypatch.chdir(tmp_path / "s")
    with pytest.raises(DraftsmithError, match="in the folder where it was harvested") as error:
        check_store(tmp_path / "s")
    assert "rm " not in str(error.value)


def test_a_temporary_folder_without_room_is_one_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may not write files beyond a size; what it gets is what a full disk gives, another number."""
    with StoreWriter(tmp_path / "s", provenance(tmp_path / "shared")) as writer:
        write(writer, 5)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        with pytest.raises(DraftsmithError, match=r"no room for a copy of shard-00000(.|\n)*TMPDIR"):
            HarvestReader(tmp_path / "s").verify()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(DraftsmithError, match=r"no folder can be made(.|\n)*TMPDIR"):
        HarvestReader(tmp_path / "s").verify()
