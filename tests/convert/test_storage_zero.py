"""DeepSpeed checkpoints that real engines wrote: the masters bit by bit, and what must stop the reading."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.source import drafter_weights, locate_source
from tests.convert.storage_oracle import LAUNCHES, SOURCES, Evil, as_torch, assert_same, write
from tests.convert.storage_writers import RUNS, WORLDS

pytestmark = pytest.mark.slow

CASES = [f"{run}-of-{world}" for run in RUNS for world in WORLDS[run]]
STATES = "global_step2"


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("zero")
    write("zero", out)
    return out


@pytest.fixture
def copy(written, tmp_path):
    def make(case: str) -> Path:
        return Path(shutil.copytree(written / case, tmp_path / case))

    return make


def held(written: Path, case: str) -> dict[str, torch.Tensor]:
    return torch.load(written / f"{case}.held", weights_only=True)


def refuse(folder: Path, *words: str) -> None:
    with pytest.raises(DraftsmithError) as caught:
        drafter_weights(folder)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_the_masters_come_back_bit_by_bit(written, case):
    weights = drafter_weights(written / case)
    assert_same(weights.named, held(written, case))
    assert weights.kind == f"deepspeed-{case[:5]}"
    assert weights.folder == written / case / STATES


@pytest.mark.parametrize("case", [case for case in CASES if "gradients" not in case])
def test_the_masters_are_those_that_deepspeeds_own_tool_finds(written, case):
    """Its tool leaves out frozen parameters at stage 1 and a module's second name; it cannot read the form of the
    bfloat16 optimizer with float32 gradients at all."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    theirs = get_fp32_state_dict_from_zero_checkpoint(str(written / case))
    ours = {name: as_torch(tensor) for name, tensor in drafter_weights(written / case).named}
    left_out = {"zero1": {"embed_tokens.weight", "input_norm.weight"}, "zero2": {"input_norm.weight"}, "zero3": set()}
    assert ours.keys() - theirs.keys() == left_out[case[:5]]
    for name, value in theirs.items():
        assert torch.equal(ours[name].to(value.dtype), value), name


def test_the_folder_of_the_states_itself_is_a_source(written):
    folder = written / "zero2-of-2"
    for place in (folder, folder / STATES):
        assert locate_source(place) == (place, ())
        assert_same(drafter_weights(place).named, held(written, folder.name))


@pytest.mark.parametrize(("case", "kind"), [("zero1-of-3", "optim"), ("zero3-of-3", "optim"), ("zero3-of-3", "model")])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_missing_file_of_a_process_is_named(copy, case, kind, rank):
    folder = copy(case)
    name = f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
    (folder / STATES / name).unlink()
    refuse(folder, "missing", name)


def test_missing_model_states_are_named(copy):
    folder = copy("zero2-of-2")
    (folder / STATES / "mp_rank_00_model_states.pt").unlink()
    refuse(folder, "mp_rank_00_model_states.pt")


def test_model_states_of_a_zero_run_without_partitions_are_not_taken_for_the_weights(copy):
    folder = copy("zero2-bfloat16-of-3")
    for file in (folder / STATES).glob("*optim*"):
        file.unlink()
    refuse(folder, "partitions are missing")


def test_a_file_of_one_process_too_many_stops(copy, written):
    folder = copy("zero2-of-2")
    name = "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    shutil.copy(written / "zero2-of-3" / STATES / name, folder / STATES / name)
    refuse(folder, "more processes", name)


def test_files_of_two_precisions_for_one_process_stop(copy):
    folder = copy("zero2-of-2")
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(folder / STATES / name, folder / STATES / f"bf16_{name}")
    refuse(folder, "two files", name, f"bf16_{name}")


@pytest.mark.parametrize("case", ["zero1-of-1", "zero1-of-3", "zero2-of-2", "zero3-of-2", "zero3-of-3"])
@pytest.mark.parametrize("change", [-1, 3, -3])
def test_a_partition_of_the_wrong_size_is_named(copy, case, change):
    folder = copy(case)
    file = folder / STATES / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    edit(file, change, "fp32_flat_groups" if "zero3" in case else "single_partition_of_fp32_groups")
    refuse(folder, "wrong size", file.name)


def edit(file: Path, change: int, key: str) -> None:
    """Make the first flat group longer or shorter."""
    states = torch.load(file, weights_only=False)
    flat = states["optimizer_state_dict"][key]
    flat[0] = torch.cat([flat[0].detach(), torch.zeros(9)])[: flat[0].numel() + change].clone()
    torch.save(states, file)


@pytest.mark.parametrize("tag", ["../elsewhere", "/tmp", "..", "", "global_step9"])
def test_latest_that_names_an_absent_or_outside_folder_stops(copy, tag):
    folder = copy("zero2-of-1")
    (folder / "latest").write_text(tag)
    refuse(folder, "latest", "absent" if tag == "global_step9" else "outside")


def test_without_latest_the_only_checkpoint_counts_and_two_stop(copy):
    folder = copy("zero2-of-1")
    (folder / "latest").unlink()
    assert "no file latest" in " ".join(drafter_weights(folder).notes)
    shutil.copytree(folder / STATES, folder / "global_step4")
    refuse(folder, "several", "global_step2, global_step4")


def test_an_earlier_checkpoint_is_passed_over_with_a_note(copy, written):
    folder = copy("zero2-of-1")
    shutil.copytree(written / "zero3-of-1" / STATES, folder / "global_step1")
    weights = drafter_weights(folder)
    assert weights.kind == "deepspeed-zero2"
    assert any("passed over global_step1" in note for note in weights.notes)


def test_placeholders_beside_partitions_are_passed_over_with_a_note(copy, written):
    folder = copy("zero3-of-2")
    states = torch.load(folder / STATES / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    assert all(not value.numel() for name, value in states["module"].items() if name not in ("d2t", "t2d"))
    torch.save(states["module"], folder / "pytorch_model.bin")
    weights = drafter_weights(folder)
    assert_same(weights.named, held(written, "zero3-of-2"))
    assert any("pytorch_model.bin" in note and "placeholders" in note for note in weights.notes)
    for entry in (folder / "latest", *(folder / STATES).iterdir()):
        entry.unlink()
    refuse(folder, "placeholders", "ZeRO-3", "pytorch_model.bin")


def test_a_rounded_copy_beside_the_masters_is_passed_over_and_another_drafter_stops(copy, written):
    folder = copy("zero2-bfloat16-of-3")
    values = held(written, folder.name)
    rounded = {name: value.bfloat16().clone() if value.is_floating_point() else value for name, value in values.items()}
    save_file(rounded, folder / "model.safetensors")
    weights = drafter_weights(folder)
    assert weights.kind == "deepspeed-zero2"
    assert_same(weights.named, values)
    assert any("model.safetensors holds the same drafter" in note for note in weights.notes)
    rounded["fc.weight"][0, 0] += 1
    save_file(rounded, folder / "model.safetensors")
    refuse(folder, "differ", "fc.weight", "model.safetensors", "delete")


def test_code_in_a_state_file_never_runs(copy, tmp_path):
    folder = copy("zero2-of-2")
    file = folder / STATES / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    states = torch.load(file, weights_only=False)
    torch.save(states | {"extra": Evil(tmp_path / "made")}, file)
    refuse(folder, "code", "posix.mkdir", file.name)
    assert not (tmp_path / "made").exists()


def test_a_truncated_partition_stops(copy):
    folder = copy("zero2-of-2")
    file = folder / STATES / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    for size in (file.stat().st_size // 2, 0):
        with file.open("r+b") as handle:
            handle.truncate(size)
        refuse(folder, file.name, "empty" if not size else "damaged")


def test_a_part_of_model_parallelism_stops(copy):
    folder = copy("zero2-of-1")
    shutil.copy(folder / STATES / "mp_rank_00_model_states.pt", folder / STATES / "mp_rank_01_model_states.pt")
    refuse(folder, "model parallelism", "mp_rank_01")


def test_reading_imports_neither_torch_nor_deepspeed(written):
    probe = (
        "import sys; from pathlib import Path; from draftsmith.convert.source import drafter_weights\n"
        f"named = drafter_weights(Path({str(written / 'zero3-bfloat16-of-3')!r})).named\n"
        "assert sum(piece.size for _, tensor in named for piece in tensor.pieces()) > 200\n"
        "print({'torch', 'deepspeed', 'accelerate'} & sys.modules.keys())"
    )
    run = subprocess.run(
        [sys.executable, "-c", probe], env={"PYTHONPATH": str(SOURCES)}, capture_output=True, text=True
    )
    assert run.stdout == "set()\n", run.stderr


def test_a_state_that_accelerate_saved_in_two_processes(tmp_path):
    out = tmp_path / "state"
    launch = ("-m", "accelerate.commands.launch", "--config_file", str(LAUNCHES / "zero2.yaml"), "--num_processes", "2")
    write("state", out, *launch, "--main_process_port", "0")
    values = torch.load(f"{out}.held", weights_only=True)
    weights = drafter_weights(out)
    assert (weights.kind, weights.folder) == ("deepspeed-zero2", out / "pytorch_model")
    assert_same(weights.named, values)
    (out / "latest").unlink()
    assert_same(drafter_weights(out).named, values)
