"""Weights in safetensors and torch files: which file is the drafter, what must never be chosen in silence or run."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.source import drafter_files, drafter_weights, locate_source
from draftsmith.convert.storage.names import bare_name
from draftsmith.convert.tensors import PIECE, STORAGE
from tests.convert.conftest import SHAPES, random_tensors
from tests.convert.storage_oracle import SOURCES, Evil, assert_same

OTHER = {"weight": torch.ones(8, 4)}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return random_tensors()


def refuse(folder: Path, *words: str) -> DraftsmithError:
    before = {file: file.stat().st_size for file in folder.rglob("*")}
    with pytest.raises(DraftsmithError) as caught:
        drafter_weights(folder)
    for word in words:
        assert word in str(caught.value)
    assert {file: file.stat().st_size for file in folder.rglob("*")} == before
    return caught.value


def halves(tensors):
    names = sorted(tensors)
    return {n: tensors[n] for n in names[:6]}, {n: tensors[n] for n in names[6:]}


def index(folder: Path, name: str, files: dict[str, dict]) -> None:
    weight_map = {tensor: file for file, held in files.items() for tensor in held}
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


SAVERS = {
    "safetensors": save_file,
    "bin": torch.save,
    "pt": torch.save,
    "pth": lambda held, file: torch.save(held, file, _use_new_zipfile_serialization=False),
    "ckpt": lambda held, file: torch.save({"state_dict": held, "epoch": 3, "loss": torch.ones(1)}, file),
}


@pytest.mark.parametrize("suffix", SAVERS)
@pytest.mark.parametrize("stem", ["model", "an-odd-name"])
def test_one_file_of_any_name(tmp_path, tensors, suffix, stem):
    SAVERS[suffix](tensors, tmp_path / f"{stem}.{suffix}")
    weights = drafter_weights(tmp_path)
    assert_same(weights.named, tensors)
    assert (weights.folder, weights.kind) == (tmp_path, "safetensors" if suffix == "safetensors" else "torch")
    assert locate_source(tmp_path) == (tmp_path, ())


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("indexed", [True, False])
def test_shards_with_and_without_an_index(tmp_path, tensors, suffix, indexed):
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    files = {f"{stem}-0000{n}-of-00002.{suffix}": half for n, half in enumerate(halves(tensors), 1)}
    for name, held in files.items():
        SAVERS[suffix](held, tmp_path / name)
    if indexed:
        index(tmp_path, f"{stem}.{suffix}.index.json", files)
    assert_same(drafter_weights(tmp_path).named, tensors)
    last = tmp_path / f"{stem}-00002-of-00002.{suffix}"
    last.unlink()
    refuse(tmp_path, last.name)


def test_files_of_odd_names_that_complete_each_other_are_one_drafter(tmp_path, tensors):
    for name, held in zip(("a", "b"), halves(tensors), strict=True):
        save_file(held, tmp_path / f"{name}.safetensors")
    weights = drafter_weights(tmp_path)
    assert_same(weights.named, tensors)
    assert any("a.safetensors, b.safetensors together" in note for note in weights.notes)


@pytest.mark.parametrize("head", [OTHER, {"lm_head.weight": torch.ones(512, 64)}])
@pytest.mark.parametrize("drafter_first", [True, False])
def test_the_drafter_is_found_by_its_keys(tmp_path, tensors, head, drafter_first):
    names = ("model.safetensors", "model_1.safetensors")
    for name, held in zip(names if drafter_first else names[::-1], (tensors, head), strict=True):
        save_file(held, tmp_path / name)
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-4}]}, tmp_path / "optimizer.bin")
    weights = drafter_weights(tmp_path)
    assert_same(weights.named, tensors)
    passed = " ".join(weights.notes)
    assert names[drafter_first] in passed and "optimizer.bin" in passed and names[not drafter_first] not in passed


def test_two_files_that_both_hold_a_drafter_stop(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    save_file(random_tensors(seed=1), tmp_path / "model_1.safetensors")
    refuse(tmp_path, "two files", "model.safetensors and model_1.safetensors", "delete")


def test_a_stale_file_of_another_format_stops_and_an_equal_one_is_noted(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save({f"module.{name}": value for name, value in tensors.items()}, tmp_path / "pytorch_model.bin")
    weights = drafter_weights(tmp_path)
    assert weights.kind == "safetensors"
    assert any("pytorch_model.bin holds the same drafter" in note for note in weights.notes)
    torch.save(tensors | {"fc.weight": tensors["fc.weight"] + 1}, tmp_path / "pytorch_model.bin")
    refuse(tmp_path, "differ", "fc.weight", str(tmp_path / "pytorch_model.bin"), str(tmp_path / "model.safetensors"))
    torch.save({n: v for n, v in tensors.items() if n != "d2t"}, tmp_path / "pytorch_model.bin")
    refuse(tmp_path, "differ", "d2t is in one alone")


def test_an_index_that_leaves_out_a_part_stops_and_one_beside_a_foreign_file_does_not(tmp_path, tensors):
    first, second = halves(tensors)
    save_file(first, tmp_path / "a.safetensors")
    save_file(second, tmp_path / "b.safetensors")
    index(tmp_path, "model.safetensors.index.json", {"a.safetensors": first})
    refuse(tmp_path, "leaves out", "b.safetensors")
    save_file(tensors, tmp_path / "a.safetensors")
    save_file(OTHER, tmp_path / "b.safetensors")
    index(tmp_path, "model.safetensors.index.json", {"a.safetensors": tensors})
    assert_same(drafter_weights(tmp_path).named, tensors)
    with pytest.raises(DraftsmithError, match="leaves out"):  # an engine would look at both
        drafter_files(tmp_path)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module"])
def test_a_nested_state_dict_is_unwrapped_with_a_note(tmp_path, tensors, key):
    torch.save({key: tensors, "optimizer": {"state": {}}, "epoch": torch.tensor(3)}, tmp_path / "last.pt")
    weights = drafter_weights(tmp_path)
    assert_same(weights.named, tensors)
    assert key in " ".join(weights.notes)


def test_two_state_dicts_of_a_drafter_in_one_file_stop(tmp_path, tensors):
    torch.save({"model": tensors, "state_dict": random_tensors(seed=1)}, tmp_path / "last.pt")
    refuse(tmp_path, "several state dicts", "state_dict, model")


def test_every_form_of_tensor_that_torch_saves(tmp_path, tensors):
    """Views, transposes, parameters, shared storages, scalars, other dtypes: as torch itself loads them."""
    base = torch.randn(40, 64)
    odd = {
        "fc.weight": torch.nn.Parameter(torch.randn(64, 192).bfloat16()),
        "midlayer.a": base.t(),
        "midlayer.b": base[3:7, ::2],
        "midlayer.c": base[5],
        "midlayer.d": torch.randn(2, 3, 4).permute(2, 0, 1).half(),
        "midlayer.e": torch.tensor(2.5, dtype=torch.float64),
        "midlayer.f": torch.empty(0, 4),
        "lm_head.weight": torch.randint(0, 255, (3, 5), dtype=torch.uint8),
        "d2t": torch.arange(7, dtype=torch.int32),
        "t2d": torch.arange(9) % 2 == 0,
    }
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        torch.save(odd, tmp_path / "drafter.pt", **options)
        loaded = torch.load(tmp_path / "drafter.pt", weights_only=True)
        assert_same(drafter_weights(tmp_path).named, {name: value.detach() for name, value in loaded.items()})


def test_dtypes_that_drafters_do_not_come_in_are_listed_and_refused_when_read(tmp_path, tensors):
    torch.save(tensors | {"fc.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "drafter.pt")
    fc = dict(drafter_weights(tmp_path).named)["fc.weight"]
    assert (fc.dtype, fc.shape) == ("F8_E4M3", (4, 4))
    with pytest.raises(DraftsmithError, match="F8_E4M3"):
        next(fc.pieces())


@pytest.mark.parametrize(
    ("raw", "bare"),
    [
        ("module.model.fc.weight", "fc.weight"),
        ("_orig_mod.module.draft_model.midlayer._orig_mod.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"),
        ("eagle_module.layers.0.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("base.eagle_module.model.d2t", "d2t"),
        ("model.model.embed_tokens.weight", "embed_tokens.weight"),
        ("midlayer._fsdp_wrapped_module.mlp._checkpoint_wrapped_module.up_proj.weight", "midlayer.mlp.up_proj.weight"),
        *((name, name) for name in [*SHAPES, "d2t", "t2d", "fc.bias", "layers.0.self_attn.q_proj.weight"]),
        *((f"{name}.weight", f"{name}.weight") for name in ("input_norm", "fc_norm.0", "fc_norm.2", "aux_norm_low")),
        *((f"{name}.weight", f"{name}.weight") for name in ("aux_norm_mid", "aux_norm_high", "input_embeds_norm")),
    ],
)
def test_wrappers_come_off_and_drafter_names_lose_nothing(raw, bare):
    assert bare_name(raw) == bare


@pytest.mark.parametrize("wrapper", ["draft_model.", "eagle_module.", "module.model.draft_model."])
def test_the_base_models_tensors_are_passed_over_and_counted(tmp_path, tensors, wrapper):
    base = {
        "model.layers.0.mlp.weight": torch.ones(2),
        "lm_head.weight": torch.ones(3),
        "model.norm.weight": torch.ones(4),
    }
    save_file({wrapper + name: value for name, value in tensors.items()} | base, tmp_path / "model.safetensors")
    weights = drafter_weights(tmp_path)
    assert_same(weights.named, tensors)
    assert any("3 tensors outside the drafter" in note for note in weights.notes)


def test_names_that_become_one_are_listed_together(tmp_path, tensors):
    double = {"module.norm.weight": torch.ones(64), "model.fc.weight": torch.ones(64, 192)}
    save_file(tensors | double, tmp_path / "model.safetensors")
    refuse(
        tmp_path, "norm.weight (norm.weight in", "module.norm.weight (", "fc.weight (fc.weight in", "model.fc.weight ("
    )


@pytest.mark.parametrize("name", ["../../x.safetensors", "/etc/x.safetensors", "..", "a/b.safetensors"])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_index_that_leads_out_of_the_folder_stops(tmp_path, tensors, name, suffix):
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    SAVERS[suffix](tensors, tmp_path / f"{stem}.{suffix}")
    index(tmp_path, f"{stem}.{suffix}.index.json", {name: tensors})
    refuse(tmp_path, "outside its folder", name)


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pth"])
@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.99])
def test_truncated_and_empty_files_stop(tmp_path, tensors, suffix, share):
    file = tmp_path / f"model.{suffix}"
    SAVERS[suffix](tensors, file)
    with file.open("r+b") as handle:
        handle.truncate(int(file.stat().st_size * share))
    refuse(tmp_path, file.name)


def test_a_header_or_a_shape_of_a_billion_stops(tmp_path, tensors):
    file = tmp_path / "model.safetensors"
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    refuse(tmp_path, file.name)
    file.write_bytes(struct.pack("<Q", 10**9) + header)
    refuse(tmp_path, file.name)
    file.unlink()
    torch.save(tensors | {"fc.weight": torch.ones(1).expand(10**9)}, tmp_path / "pytorch_model.bin")
    refuse(tmp_path, "fc.weight", "beyond")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("form", ["zip", "legacy", "plain"])
@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt"])
def test_code_in_a_pickle_never_runs(tmp_path, tensors, form, suffix, protocol):
    folder = tmp_path / "drafter"
    folder.mkdir()
    file, made = folder / f"model.{suffix}", tmp_path / "made"
    evil = tensors | {"extra": Evil(made)}
    if form == "plain":
        file.write_bytes(pickle.dumps(Evil(made), protocol))
    else:
        torch.save(evil, file, pickle_protocol=protocol, _use_new_zipfile_serialization=form == "zip")
    refuse(folder, "code", "posix.mkdir", file.name)
    assert not made.exists()
    if form == "plain":
        pickle.loads(file.read_bytes())
    else:
        torch.load(file, weights_only=False)
    assert made.exists()  # so the file was a real trap


def test_a_refused_pickle_beside_the_drafter_is_noted(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save(Evil(tmp_path / "made"), tmp_path / "training_args.bin")
    weights = drafter_weights(tmp_path)
    assert_same(weights.named, tensors)
    assert any("training_args.bin" in note and "code" in note for note in weights.notes)
    assert not (tmp_path / "made").exists()


def test_compressed_entries_are_not_unpacked(tmp_path, tensors):
    """torch stores; a deflated archive could be a bomb."""
    torch.save(tensors, tmp_path / "stored.zip")
    deflated = zipfile.ZipFile(tmp_path / "model.bin", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "stored.zip") as stored, deflated:
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))
    refuse(tmp_path, "model.bin", "compressed")


def test_damage_anywhere_in_the_tree_is_an_error_of_ours_or_harmless(tmp_path):
    """Five hundred files with bytes changed, lost or put in."""
    random = Random(0)
    torch.save({"state_dict": {"fc.weight": torch.ones(3, 5), "d2t": torch.arange(4)}, "epoch": 1}, tmp_path / "whole")
    with zipfile.ZipFile(tmp_path / "whole") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    refused = 0
    for _ in range(500):
        tree = bytearray(entries["whole/data.pkl"])
        for _ in range(random.choice((1, 2, 5))):
            place = random.randrange(len(tree))
            tree[place : place + random.randrange(3)] = random.randbytes(random.randrange(3))
        with zipfile.ZipFile(tmp_path / "model.bin", "w") as archive:
            for name, data in (entries | {"whole/data.pkl": bytes(tree)}).items():
                archive.writestr(name, data)
        try:
            for _, tensor in drafter_weights(tmp_path).named:
                if tensor.dtype in STORAGE:
                    list(tensor.pieces())
        except DraftsmithError:
            refused += 1
    assert 250 < refused < 500


def test_links_to_files_are_fine(tmp_path, tensors):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(tensors, tmp_path / "blobs" / "abc")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "abc")
    assert_same(drafter_weights(tmp_path / "snapshot").named, tensors)


@pytest.mark.parametrize("name", ["model", "pytorch_model"])
def test_a_sub_folder_is_found_with_a_note(tmp_path, tensors, name):
    (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / name / "model.safetensors")
    folder, notes = locate_source(tmp_path)
    assert folder == tmp_path / name and name in notes[0]
    weights = drafter_weights(tmp_path)
    assert weights.folder == tmp_path / name and name in weights.notes[0]
    assert_same(weights.named, tensors)


def test_folders_without_a_drafter_say_what_they_hold(tmp_path, tensors):
    refuse(tmp_path, "no weights")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.bin")
    refuse(tmp_path, "no weights", "optimizer.bin")
    save_file(OTHER, tmp_path / "a.safetensors")
    assert [name for name, _ in drafter_weights(tmp_path).named] == ["weight"]
    save_file({"bias": torch.ones(2)}, tmp_path / "b.safetensors")
    refuse(tmp_path, "none of the files", "a.safetensors: weight", "b.safetensors: bias")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bin", "legacy", "zero2"])
def test_reading_takes_the_memory_of_a_few_pieces(tmp_path, form):
    """A quarter of a gigabyte is read by a child process whose peak of resident memory grows by less than 5 pieces.

    VmHWM, for ru_maxrss outlives exec and would show the parent's peak.
    """
    elements = 1 << 26
    flat = torch.arange(elements, dtype=torch.float32)
    shapes = {"fc.weight": torch.Size([64, elements // 128]), "midlayer.weight": torch.Size([32, elements // 64])}
    if form == "zero2":
        (tmp_path / "latest").write_text("step")
        (tmp_path / "step").mkdir()
        module = {name: torch.empty(0) for name in shapes}
        torch.save({"module": module, "param_shapes": [shapes]}, tmp_path / "step" / "mp_rank_00_model_states.pt")
        for rank, half in enumerate(flat.chunk(2)):
            optimizer = {"zero_stage": 2, "partition_count": [2], "single_partition_of_fp32_groups": [half.clone()]}
            file = tmp_path / "step" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer}, file)
    else:
        named = dict(zip(shapes, (half.clone() for half in flat.chunk(2)), strict=True))
        torch.save(named, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
    probe = (
        "import re, numpy\n"
        "from pathlib import Path\n"
        "from draftsmith.convert.source import drafter_weights\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) * 1024\n"
        "before, total = peak(), 0.0\n"
        f"for _, tensor in drafter_weights(Path({str(tmp_path)!r})).named:\n"
        "    for piece in tensor.pieces(): total += float(piece.sum(dtype='float64'))\n"
        "print(total, peak() - before)"
    )
    run = subprocess.run(
        [sys.executable, "-c", probe], env={"PYTHONPATH": str(SOURCES)}, capture_output=True, text=True
    )
    total, grown = map(float, run.stdout.split())
    assert total == float(flat.sum(dtype=torch.float64))
    assert grown < 5 * PIECE * 4 < 4 * elements / 3
