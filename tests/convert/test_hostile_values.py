"""Values that make no sense, anywhere in a drafter's or a target's files: one clear error, never a traceback, never a
folder; and destinations that must not be replaced.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import read_target
from draftsmith.convert.export import export
from draftsmith.convert.foreign import ReadOptions
from draftsmith.convert.verify import verify
from draftsmith.convert.write import convert
from tests.convert import foreign
from tests.convert.conftest import edit_config, edit_tensors, make_target
from tests.convert.foreign import Variant

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
ROPES = [
    "yarn", 4, [1], True, YARN | {"factor": 0}, YARN | {"factor": None}, YARN | {"factor": float("inf")},
    YARN | {"factor": float("nan")}, YARN | {"factor": 10**400}, YARN | {"attention_factor": 0},
    YARN | {"original_max_position_embeddings": 0}, YARN | {"truncate": "no"}, LLAMA3 | {"low_freq_factor": 4.0},
    LLAMA3 | {"low_freq_factor": 9.0}, LLAMA3 | {"factor": None}, {"rope_type": "linear", "factor": 0},
    {"rope_type": "linear", "factor": -2.0},
]  # fmt: skip
FIELDS = [
    ("architectures", [1, [2]]), ("rope_theta", float("inf")), ("rope_theta", float("nan")), ("rope_theta", 10**400),
    ("rope_theta", 1e-300), ("rms_norm_eps", 10**400), ("rms_norm_eps", 1.5), ("rms_norm_eps", "x"),
    ("max_position_embeddings", float("inf")), ("max_position_embeddings", -1), ("hidden_size", [64]),
    ("num_attention_heads", {"a": 1}), ("vocab_size", 10**30), ("eagle_config", [1]), ("eagle_config", "x"),
]  # fmt: skip


@pytest.fixture
def target(tmp_path):
    return make_target(tmp_path / "target")


@pytest.fixture
def source(tmp_path):
    return foreign.write_sglang(tmp_path / "source", Variant())


def converted_or_refused(source, target, out, **options):
    """Never an exception of another kind; a refusal leaves nothing, and what is written passes verification."""
    try:
        convert(source, target, out, options=ReadOptions(**options))
    except DraftsmithError:
        assert not out.exists() and not list(out.parent.glob(f".{out.name}*"))
        return False
    assert not [check for check in verify(out, target, deep=True) if check.status == "fail"]
    return True


@pytest.mark.parametrize("block", ROPES, ids=str)
def test_a_senseless_rope_is_refused_and_verified_without_a_traceback(tmp_path, source, target, block):
    edit_config(source, rope_scaling=block)
    assert not converted_or_refused(source, target, tmp_path / "out")
    assert "fail" in {check.status for check in verify(source, target)}


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=str)
def test_a_senseless_field_is_refused_or_corrected_by_the_tensors(tmp_path, source, target, field, value):
    edit_config(source, **{field: value})
    converted_or_refused(source, target, tmp_path / "out")
    verify(source, target)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_position_embeddings", -1), ("max_position_embeddings", 0), ("max_position_embeddings", 10**30),
     ("max_position_embeddings", "x"), ("max_position_embeddings", float("nan")), ("rope_theta", "x"), ("rope_theta", -1),
     ("rope_scaling", {"rope_type": "linear", "factor": -2}), ("rope_scaling", {"rope_type": "linear", "factor": float("inf")}),
     ("head_dim", "x"), ("rms_norm_eps", "x"), ("rms_norm_eps", None), ("architectures", [["a"]]), ("num_key_value_heads", [2])],
)  # fmt: skip
def test_a_target_that_makes_no_sense_is_named(tmp_path, source, target, field, value):
    edit_config(target, **{field: value})
    with pytest.raises(DraftsmithError, match="target"):
        convert(source, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weight_map", [[1], None, "x", {"a": [1]}])
def test_a_target_s_index_of_another_kind_is_named(target, weight_map):
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DraftsmithError, match="index"):
        read_target(target)


@pytest.mark.parametrize("what", ["config", "weights", "link"])
def test_a_folder_in_a_file_s_place_is_a_finding(source, target, what):
    name = {"config": "config.json", "weights": "model.safetensors", "link": "other.safetensors"}[what]
    if what == "link":
        (source / name).symlink_to(source / "nowhere")
    else:
        (source / name).unlink()
        (source / name).mkdir()
    try:
        assert "fail" in {check.status for check in verify(source, target)}
    except DraftsmithError as error:
        assert what == "config" and "config.json" in str(error)


def test_a_head_that_is_a_number_and_a_missing_norm_are_named(tmp_path, source, target):
    edit_tensors(source, lambda t: t.update({"lm_head.weight": torch.tensor(1.0)}))
    assert not converted_or_refused(source, target, tmp_path / "out")
    verify(source, target)
    other = foreign.write_modelopt(tmp_path / "modelopt", Variant())
    edit_tensors(other, lambda t: t.pop("layers.0.hidden_norm.weight"))
    with pytest.raises(DraftsmithError, match=r"missing: midlayer\.hidden_norm\.weight"):
        convert(other, target, tmp_path / "out", options=ReadOptions(repair_double_norm=True))


def test_options_that_a_record_makes_void_are_refused(tmp_path, source, target):
    first = convert(source, target, tmp_path / "first")
    for options in ({"rope_theta": 1e4}, {"ids_are": "layer-input"}, {"repair_double_norm": True}):
        with pytest.raises(DraftsmithError, match="record of what it is"):
            convert(first, target, tmp_path / "second", options=ReadOptions(**options))


def test_another_vocabulary_than_the_head_was_trained_with_is_refused(tmp_path, source, target):
    d2t = load_file(source / "model.safetensors")["d2t"]
    save_file({"d2t": torch.arange(128) * 2}, tmp_path / "other.safetensors")
    with pytest.raises(DraftsmithError, match="of its own"):
        convert(source, target, tmp_path / "out", options=ReadOptions(vocab=tmp_path / "other.safetensors"))
    save_file({"d2t": d2t}, tmp_path / "same.safetensors")
    convert(source, target, tmp_path / "out", options=ReadOptions(vocab=tmp_path / "same.safetensors"))


@pytest.mark.parametrize(
    ("d2t", "said"),
    [(torch.zeros(128, dtype=torch.int64), "all zeros"), (torch.arange(128) * 2 + 1, "--d2t-is absolute")],
)
def test_a_map_that_nothing_proves_is_warned_of(tmp_path, source, target, capsys, d2t, said):
    edit_tensors(source, lambda t: (t.pop("t2d"), t.update(d2t=d2t)))
    convert(source, target, tmp_path / "out")
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_a_drafter_s_tensor_outside_its_wrapper_is_never_dropped(tmp_path, source, target):
    def wrap(tensors):
        for name in list(tensors):
            tensors[f"module.draft_model.{name}"] = tensors.pop(name)
        tensors["module.fc.weight"] = torch.zeros(2, 2)

    edit_tensors(source, wrap)
    with pytest.raises(DraftsmithError, match=r"module\.fc\.weight"):
        convert(source, target, tmp_path / "out")


def test_a_delivered_version_and_its_pointer_are_never_replaced(tmp_path, source, target):
    drafter = convert(source, target, tmp_path / "drafter")
    shelf = tmp_path / "shelf"
    place = export(drafter, shelf, target)
    before = {file.name for file in shelf.iterdir()}
    for out in (shelf / "latest", shelf / place.split("/")[-1]):
        with pytest.raises(DraftsmithError, match=r"link|never changes"):
            convert(source, target, out, overwrite=True)
    assert {file.name for file in shelf.iterdir()} == before and (shelf / "latest").is_symlink()


def test_flags_without_effect_say_so(tmp_path, source, target, capsys):
    options = {"head_from_target": True, "repair_double_norm": True, "rope_scaling": "none"}
    convert(source, target, tmp_path / "out", options=ReadOptions(**options))
    said = capsys.readouterr().err.replace("\n", " ")
    assert all(f"--{name.replace('_', '-')} had no effect" in said for name in options)


def test_an_export_needs_no_target_on_the_machine_that_converted_and_stays_out_of_models(tmp_path, source, target):
    drafter = convert(source, target, tmp_path / "drafter")
    export(drafter, tmp_path / "shelf")
    for inside in (drafter, target, drafter / "versions"):
        with pytest.raises(DraftsmithError, match="own folder"):
            export(drafter, inside)
    assert not (drafter / "versions").exists()


def test_the_mending_command_can_be_pasted(tmp_path, target):
    """Names with spaces and brackets; other files in the folder, which overwriting would refuse."""
    source = foreign.write_safeailab(tmp_path / "a drafter; rm [bold]", Variant())
    (source / "tokenizer.json").write_text("{}")
    (mend,) = {check.mend for check in verify(source, target) if check.name == "context.sglang"}
    assert mend == (
        f"draftsmith convert '{source}' --target {target} --out '{source}-mended'"
    )  # fmt: skip
