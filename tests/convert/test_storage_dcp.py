"""Folders that torch.distributed.checkpoint wrote in one and two processes."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.source import drafter_weights, locate_source
from tests.convert.storage_oracle import Evil, assert_same, write

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dcp")
    write("dcp", out)
    return out


@pytest.fixture
def copy(written, tmp_path) -> Path:
    return Path(shutil.copytree(written / "dcp-of-2", tmp_path / "copy"))


def refuse(folder: Path, *words: str) -> None:
    with pytest.raises(DraftsmithError) as caught:
        drafter_weights(folder)
    for word in words:
        assert word in str(caught.value)


def edit(folder: Path, change) -> None:
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("form", ["dcp", "flat"])
def test_rows_columns_and_copies_come_back_bit_by_bit(written, world, form):
    folder = written / f"{form}-of-{world}"
    assert locate_source(folder) == (folder, ())
    weights = drafter_weights(folder)
    assert (weights.kind, weights.folder) == ("dcp", folder)
    assert_same(weights.named, torch.load(written / f"dcp-of-{world}.held", weights_only=True))
    assert any("optimizer" in note for note in weights.notes) == (form == "dcp")


def test_the_tensors_were_really_cut(written):
    metadata = pickle.loads((written / "dcp-of-2" / ".metadata").read_bytes())
    chunks = metadata.state_dict_metadata["model._orig_mod.midlayer.q_proj.weight"].chunks
    assert [tuple(chunk.sizes) for chunk in chunks] == [(7, 5), (7, 5)]


def test_a_sub_folder_as_accelerate_names_it_for_fsdp(written, tmp_path):
    shutil.copytree(written / "dcp-of-2", tmp_path / "state" / "pytorch_model_fsdp_0")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "state" / "scheduler.bin")
    weights = drafter_weights(locate_source(tmp_path / "state")[0])
    assert weights.kind == "dcp"
    assert_same(weights.named, torch.load(written / "dcp-of-2.held", weights_only=True))
    (tmp_path / "state" / "scheduler.bin").unlink()
    folder, notes = locate_source(tmp_path / "state")
    assert folder.name == "pytorch_model_fsdp_0" and "pytorch_model_fsdp_0" in notes[0]


def test_a_missing_file_is_named(copy):
    (copy / "__1_0.distcp").unlink()
    refuse(copy, "not there", "__1_0.distcp")


def test_truncated_files_stop(copy):
    with (copy / "__1_0.distcp").open("r+b") as handle:
        handle.truncate(6000)
    refuse(copy, "__1_0.distcp")
    (copy / ".metadata").write_bytes((copy / ".metadata").read_bytes()[:700])
    refuse(copy, ".metadata")


@pytest.mark.parametrize("path", ["../copy/__1_0.distcp", "/etc/passwd"])
def test_a_file_outside_the_folder_is_not_opened(copy, path):
    def change(metadata):
        next(iter(metadata.storage_data.values())).relative_path = path

    edit(copy, change)
    refuse(copy, "outside", path)


def test_chunks_that_do_not_tile_stop(copy):
    def drop(metadata):
        metadata.state_dict_metadata["model._orig_mod.fc.weight"].chunks.pop()

    edit(copy, drop)
    refuse(copy, "model._orig_mod.fc.weight", "do not make up", "45 elements", "75 in shape [5, 15]")


def test_a_chunk_of_another_shape_than_recorded_stops(copy):
    def turn(metadata):
        metadata.state_dict_metadata["model._orig_mod.fc.weight"].chunks[0].sizes = torch.Size([15, 3])

    edit(copy, turn)
    refuse(copy, "model._orig_mod.fc.weight", "not what the metadata says")


@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_the_metadata_never_runs(copy, tmp_path, protocol):
    (copy / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "made"), protocol))
    refuse(copy, "code", "posix.mkdir")
    assert not (tmp_path / "made").exists()
    pickle.loads((copy / ".metadata").read_bytes())  # the same bytes do run where nothing guards
    assert (tmp_path / "made").exists()
