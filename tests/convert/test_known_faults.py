"""Faults that people met in public in this field's tools, one test a case, each with its right value.

What is held by a test elsewhere is not repeated here. Drafters are foreign: they have no record of ours beside them.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import load_config
from draftsmith.configs.target import read_target
from draftsmith.convert.context import OVERRIDE
from draftsmith.convert.foreign import ReadOptions
from draftsmith.convert.launch import sglang_line, vllm_line
from draftsmith.convert.verify import verify
from draftsmith.convert.write import convert
from tests.convert import foreign
from tests.convert.conftest import edit_config, edit_tensors, listing, make_target
from tests.convert.foreign import DRAFT, HIDDEN, VOCAB, Variant, draft_ids, maps_of, tensors_of

IDS = draft_ids(Variant())


@pytest.fixture
def target(tmp_path) -> Path:
    return make_target(tmp_path / "target")


@pytest.fixture
def source(tmp_path) -> Path:
    """A drafter in SGLang's form."""
    return foreign.write_sglang(tmp_path / "source", Variant())


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def refused(source, target, out, *words, to="sglang", options=None):
    """The conversion stops with these words and leaves nothing at or beside the destination."""
    with pytest.raises(DraftsmithError) as caught:
        convert(source, target, out, to=to, options=options)
    for word in words:
        assert word in str(caught.value)
    assert not out.exists() and not list(out.parent.glob(f".{out.name}*"))


def failing(folder, target, **how):
    return {check.name: check for check in verify(folder, target, **how) if check.status == "fail"}


# -- names, shapes and the config


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"])
def test_the_target_s_class_in_the_drafter_s_config_becomes_the_drafter_s(tmp_path, source, target, architecture):
    """SGLang then picked the plain loader, which has no draft layer (sgl-project/sglang#9135)."""
    edit_config(source, architectures=[architecture], drop=("eagle_config",))
    assert "config.architecture" in failing(source, target)
    out = convert(source, target, tmp_path / "out")
    assert config_of(out)["architectures"] == ["LlamaForCausalLMEagle3"] and config_of(out)["model_type"] == "llama"
    assert not failing(out, target, deep=True)


@pytest.mark.parametrize("how", ["missing", "misspelt", "empty"])
@pytest.mark.parametrize("name", [*tensors_of(Variant())])
@pytest.mark.parametrize("writer", [foreign.write_sglang, foreign.write_speculators, foreign.write_modelopt])
def test_no_tensor_of_a_foreign_drafter_may_be_missing_misspelt_or_empty(tmp_path, target, writer, name, how):
    """Engines leave what is missing random in silence (sgl-project/sglang#16235, #27829)."""
    source = writer(tmp_path / "source", Variant())
    theirs = name if writer is foreign.write_sglang else name.replace("midlayer.", "layers.0.")

    def edit(tensors):
        original = tensors.pop(theirs)
        if how == "misspelt":
            tensors[theirs.replace("weight", "wieght")] = original
        if how == "empty":
            tensors[theirs] = original.new_empty(0)

    edit_tensors(source, edit)
    refused(source, target, tmp_path / "out", name)


def test_an_embedding_filled_at_random_is_left_out_and_called_so(tmp_path, target, capsys):
    """The exporter skipped the frozen embedding and saved a fresh one; vLLM kept it (lightseekorg/TorchSpec#38)."""
    source = foreign.write_torchspec(tmp_path / "source", Variant())
    edit_tensors(source, lambda t: t.update({"embed_tokens.weight": torch.randn(VOCAB, HIDDEN).bfloat16()}))
    assert "tensors.embedding" in failing(source, target, deep=True)
    for form in ("sglang", "vllm"):
        out = convert(source, target, tmp_path / form, to=form)
        assert "embed_tokens.weight" not in load_file(out / "model.safetensors")
        assert "filled at random" in " ".join(capsys.readouterr().err.split())


def test_an_embedding_rounded_through_float16_never_reaches_the_output(tmp_path, source, target, capsys):
    theirs = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(source, lambda t: t.update({"embed_tokens.weight": (theirs.float() * 1.001).half()}))
    out = convert(source, target, tmp_path / "out")
    assert "embed_tokens.weight" not in load_file(out / "model.safetensors")
    assert "rounded" in capsys.readouterr().err


def test_a_drafter_of_another_width_needs_its_own_embedding(tmp_path):
    """It cannot share the target's (vllm-project/vllm#18906, #27737)."""
    target = make_target(tmp_path / "target", hidden_size=128)
    source = foreign.write_sglang(tmp_path / "source", Variant(target_hidden=128))
    own = load_file(source / "model.safetensors")["embed_tokens.weight"]
    out = convert(source, target, tmp_path / "out")
    assert torch.equal(load_file(out / "model.safetensors")["embed_tokens.weight"], own)
    assert config_of(out)["target_hidden_size"] == 128 and config_of(out)["hidden_size"] == 64
    edit_tensors(source, lambda tensors: tensors.pop("embed_tokens.weight"))
    refused(source, target, tmp_path / "never", "embed_tokens.weight is missing", "[512, 64]")


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", "llm.model."])
def test_the_embedding_of_a_multimodal_target_is_found_under_its_wrapper(tmp_path, source, target, prefix, capsys):
    """vllm-project/vllm#19570"""
    tensors = load_file(target / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {f"{prefix}embed_tokens.weight": embedding}, target / "model.safetensors")
    edit_tensors(source, lambda t: t.update({"embed_tokens.weight": embedding.clone()}))
    convert(source, target, tmp_path / "out")
    assert "equals the target's" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("told", [None, 0, -1, 4.0, 64, 600, "absent"])
def test_a_wrong_size_of_the_draft_vocabulary_is_read_off_the_head_or_refused(tmp_path, source, target, told):
    """128 rows in the file, whatever the config says (SafeAILab/EAGLE#249, NVIDIA-NeMo/Automodel#2260)."""
    edit_config(source, **({"drop": ("draft_vocab_size",)} if told == "absent" else {"draft_vocab_size": told}))
    assert failing(source, target)
    out = convert(source, target, tmp_path / "out")
    assert config_of(out)["draft_vocab_size"] == 128
    assert not failing(out, target)


def test_another_head_dim_than_the_target_s_is_warned_of_with_both(tmp_path, target):
    """vLLM could not lay out the KV cache (Tencent/AngelSlim#5)."""
    out = convert(foreign.write_sglang(tmp_path / "16", Variant(head_dim=16)), target, tmp_path / "out")
    said = next(check for check in verify(out, target) if check.name == "config.heads")
    assert said.status == "warn" and "head_dim 16, the target has 32" in said.message
    equal = convert(foreign.write_sglang(tmp_path / "32", Variant(head_dim=32)), target, tmp_path / "equal")
    assert next(check for check in verify(equal, target) if check.name == "config.heads").status == "pass"


def test_the_target_s_number_of_layers_is_not_the_drafter_s(tmp_path, source, target, capsys):
    """sgl-project/SpecForge#129"""
    edit_config(source, num_hidden_layers=8)
    assert config_of(convert(source, target, tmp_path / "out"))["num_hidden_layers"] == 1
    assert "num_hidden_layers was 8; the file holds one layer" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["bias", "attention_bias", "mlp_bias"])
def test_a_bias_flag_without_a_bias_is_set_right(tmp_path, source, target, flag):
    """SafeAILab/EAGLE#100, the other way round."""
    edit_config(source, **{flag: True})
    assert "config.bias" in failing(source, target)
    out = convert(source, target, tmp_path / "out")
    assert not config_of(out).get(flag) and not failing(out, target)


def test_a_head_is_taken_from_a_target_that_only_its_inner_config_ties(tmp_path, source, target):
    """Top level says untied, text_config tied, lm_head absent (huggingface/transformers#43429)."""
    edit_tensors(source, lambda tensors: tensors.pop("lm_head.weight"))
    flat = config_of(target)
    save_file(
        {name: value for name, value in load_file(target / "model.safetensors").items() if name != "lm_head.weight"},
        target / "model.safetensors",
    )
    told = ReadOptions(head_from_target=True)
    for tied in (False, True):
        nested = {"architectures": ["LlamaForCausalLM"], "model_type": "llava", "tie_word_embeddings": False}
        inner = {key: value for key, value in flat.items() if key != "architectures"} | {"tie_word_embeddings": tied}
        (target / "config.json").write_text(json.dumps(nested | {"text_config": inner}))
        if not tied:
            refused(source, target, tmp_path / "never", "head cannot be found", options=told)
    out = convert(source, target, tmp_path / "out", options=told)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], embedding[IDS])


def test_use_cache_is_a_bool_whatever_the_source_says(tmp_path, source, target):
    """A strict validation refused null (NVIDIA/Model-Optimizer#1417)."""
    edit_config(source, use_cache=None)
    assert config_of(convert(source, target, tmp_path / "out"))["use_cache"] is True


def test_a_fourth_id_for_the_loss_alone_is_not_served(tmp_path, target):
    """fc has columns for three taps, the config four ids (vllm-project/vllm#54526)."""
    source = foreign.write_speculators(tmp_path / "source", Variant())
    edit_config(source, eagle_aux_hidden_state_layer_ids=[2, 4, 5, 7])
    for form in ("sglang", "vllm"):
        out = convert(source, target, tmp_path / form, to=form)
        assert config_of(out)["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        assert not failing(out, target)
    assert config_of(tmp_path / "sglang")["num_aux_hidden_states"] == 3


@pytest.mark.parametrize("stale", ["pytorch_model.bin", "model_1.safetensors", "training_args.bin"])
def test_an_earlier_export_in_the_destination_is_never_mixed_with_the_new_one(tmp_path, source, target, stale):
    """Which of two formats is loaded depends on the loader (om-ai-lab/OmTrackVLA#35)."""
    out = convert(source, target, tmp_path / "out")
    (out / stale).write_bytes(b"old")
    before = listing(out)
    with pytest.raises(DraftsmithError, match=stale.replace(".", r"\.")):
        convert(source, target, out, overwrite=True)
    assert listing(out) == before


def test_launch_lines_name_drafter_and_target_by_absolute_paths(tmp_path, source, target, monkeypatch):
    """Without a draft path SGLang loads the target twice (sgl-project/sglang#36528)."""
    convert(source, target, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(sglang_line(Path("out"), read_target(Path("target"))))
    assert words[words.index("--speculative-draft-model-path") + 1] == str(tmp_path / "out")
    assert words[words.index("--model-path") + 1] == str(tmp_path / "target")
    words = shlex.split(vllm_line(Path("out"), read_target(Path("target"))))
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == str(tmp_path / "out")
    assert words[2] == str(tmp_path / "target")


# -- states of training


def write_zero2(folder, tensors, buffers):
    """A ZeRO-2 checkpoint of two processes, as DeepSpeed lays it out: float32 masters in flat halves."""
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    module = {name: tensor.bfloat16() for name, tensor in tensors.items()} | buffers
    state = {"module": module, "param_shapes": [shapes], "buffer_names": list(buffers), "ds_version": "0.19.8"}
    torch.save(state, tag / "mp_rank_00_model_states.pt")
    flat = torch.cat([tensor.float().reshape(-1) for tensor in tensors.values()])
    flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 2)])
    for rank, half in enumerate(flat.chunk(2)):
        optimizer = {"zero_stage": 2, "partition_count": [2], "single_partition_of_fp32_groups": [half.clone()]}
        torch.save({"optimizer_state_dict": optimizer}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def test_a_consolidated_state_that_lost_the_map_stops_and_a_vocabulary_file_mends_it(tmp_path, source, target):
    """Consolidation dropped registered buffers, and d2t is one (deepspeedai/DeepSpeed#1101)."""
    weights = tensors_of(Variant(), torch.float32)
    write_zero2(tmp_path / "with", weights, maps_of(Variant()))
    write_zero2(tmp_path / "without", weights, {})
    save_file({"d2t": maps_of(Variant())["d2t"]}, tmp_path / "vocab.safetensors")
    named = ReadOptions(config=source / "config.json")
    refused(tmp_path / "without", target, tmp_path / "never", "d2t is missing", "--vocab", options=named)
    told = ReadOptions(config=source / "config.json", vocab=tmp_path / "vocab.safetensors")
    for place, options in (("with", named), ("without", told)):
        out = convert(tmp_path / place, target, tmp_path / f"{place}-out", options=options)
        found = load_file(out / "model.safetensors")
        for name, value in weights.items():
            assert torch.equal(found[name], value.bfloat16()), name
        assert torch.equal(found["d2t"], maps_of(Variant())["d2t"])


def test_a_frozen_tensor_that_stage_3_left_empty_is_never_taken_for_the_embedding(tmp_path, source, target):
    """deepspeedai/DeepSpeed#5439"""
    edit_tensors(source, lambda t: t.update({"embed_tokens.weight": torch.empty(0, dtype=torch.bfloat16)}))
    refused(source, target, tmp_path / "out", "no elements", "embed_tokens.weight")


def test_files_of_the_run_beside_the_weights_are_passed_over(tmp_path, source, target):
    """accelerate's optimizer, scheduler and random states (huggingface/accelerate#2923)."""
    reference = load_file(convert(source, target, tmp_path / "reference") / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, source / "optimizer.bin")
    torch.save({"last_epoch": 3}, source / "scheduler.bin")
    (source / "random_states_0.pkl").write_bytes(b"\x80\x04N.")
    found = load_file(convert(source, target, tmp_path / "out") / "model.safetensors")
    assert found.keys() == reference.keys() and all(torch.equal(found[key], reference[key]) for key in found)


# -- the draft vocabulary


def test_two_swapped_entries_of_the_map_are_found(tmp_path, source, target):
    """Every shape is right, and two tokens stand for others (sgl-project/SpecForge#764)."""
    edit_tensors(source, lambda t: t["d2t"].__setitem__([3, 90], t["d2t"][[90, 3]]))
    assert "vocab.t2d" in failing(source, target)
    refused(source, target, tmp_path / "out", "t2d and d2t disagree")


def test_a_swap_after_conversion_is_found_by_the_recorded_hash(tmp_path, source, target):
    """Ids in another order pass every check of their range; the record knows the bytes."""
    out = convert(source, target, tmp_path / "out")
    edit_tensors(out, lambda t: t["lm_head.weight"].__setitem__([3, 90], t["lm_head.weight"][[90, 3]]))
    assert set(failing(out, target, deep=True)) == {"record.tensors"}


def test_a_map_in_a_side_file_comes_into_the_weights(tmp_path, source, target):
    """vLLM took ids 0..N-1 when it was left beside them (NVIDIA-NeMo/Automodel#2447)."""
    edit_tensors(source, lambda tensors: (tensors.pop("d2t"), tensors.pop("t2d")))
    refused(source, target, tmp_path / "never", "draft ids 0..127")
    save_file({"d2t": maps_of(Variant())["d2t"]}, tmp_path / "side.safetensors")
    for form in ("sglang", "vllm"):
        out = convert(
            source, target, tmp_path / form, to=form, options=ReadOptions(vocab=tmp_path / "side.safetensors")
        )
        found = load_file(out / "model.safetensors")
        assert (found["d2t"] + torch.arange(DRAFT)).tolist() == list(range(1, 4 * DRAFT, 4))
        assert found["t2d"].nonzero().flatten().tolist() == list(range(1, 4 * DRAFT, 4))


@pytest.mark.parametrize("size", ["-1", "0", "4.5", "many", ".inf"])
def test_a_draft_vocabulary_of_no_size_is_refused_when_the_run_is_read(tmp_path, size):
    """Nothing checked it, and nonsense was trained (NVIDIA-NeMo/Automodel#2260)."""
    file = tmp_path / "run.yaml"
    file.write_text(f"name: a\ntarget: {{path: t}}\nvocab: {{size: {size}}}\n")
    with pytest.raises(DraftsmithError, match=r"vocab\.size"):
        load_config(file)


# -- context and RoPE


@pytest.mark.parametrize("nested", [False, True])
def test_2048_positions_of_a_template_become_the_target_s_262144(tmp_path, target, nested, capsys):
    """Very low acceptance after good training, mended by editing this number (sgl-project/SpecForge#271)."""
    config = config_of(target) | {"max_position_embeddings": 262144}
    if nested:
        inner = {key: value for key, value in config.items() if key != "architectures"}
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llava", "text_config": inner}
    (target / "config.json").write_text(json.dumps(config))
    source = foreign.write_safeailab(tmp_path / "source", Variant())
    assert "context.sglang" in failing(source, target)
    out = convert(source, target, tmp_path / "out")
    assert config_of(out)["max_position_embeddings"] == 262144
    assert "2,048 -> 262,144" in " ".join(capsys.readouterr().err.split())
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in tensors_of(Variant()).items())
    warned = next(check for check in verify(out, target) if check.name == "context.trained")
    assert warned.status == "warn" and "trained on at most 2,048" in warned.message


def test_the_switch_that_silences_sglang_is_never_the_mend(source, target):
    """sgl-project/sglang#18234"""
    edit_config(source, max_position_embeddings=2048)
    check = failing(source, target)["context.sglang"]
    assert "(4096)" in check.message and "(2048)" in check.message
    assert OVERRIDE not in check.mend and check.mend.startswith("draftsmith convert")


def test_a_target_stretched_by_yarn_gets_a_drafter_of_the_stretched_length(tmp_path, source, target):
    """32768 positions times 4; engines stop or propose token 0 beyond the drafter's (vllm-project/vllm#58080)."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    edit_config(target, max_position_embeddings=32768, rope_scaling=yarn)
    edit_config(source, max_position_embeddings=32768)
    said = next(check for check in verify(source, target) if check.name == "context.stretched")
    assert said.status == "warn" and "131,072" in said.message and "at launch" in said.message
    out = convert(source, target, tmp_path / "out")
    config = config_of(out)
    assert config["max_position_embeddings"] == 131072
    assert config["rope_scaling"] is None and config["rope_theta"] == 5e6  # the drafter's own RoPE stays
    assert "context.stretched" not in {check.name for check in verify(out, target)} and not failing(out, target)


def test_the_base_of_training_is_kept_where_the_target_s_is_published_otherwise(tmp_path, source, target):
    """Correcting 10000 to the published base lowered the accept length (wejoncy/sfllm#32)."""
    edit_config(source, rope_theta=10000.0)
    refused(source, target, tmp_path / "never", "10000", "5e+06", "--rope-theta")
    out = convert(source, target, tmp_path / "out", options=ReadOptions(rope_theta=10000.0))
    assert config_of(out)["rope_theta"] == config_of(out)["rope_parameters"]["rope_theta"] == 10000.0
    frequencies = next(check for check in verify(out, target) if check.name == "rope.frequencies")
    assert frequencies.status == "pass" and "5e+06" in frequencies.message


def test_two_spellings_of_the_base_that_differ_stop(tmp_path, source, target):
    """After a move to rope_parameters the base fell back to 10000 in silence (sgl-project/SpecForge#702)."""
    edit_config(source, rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 5e6})
    refused(source, target, tmp_path / "out", "two ways that differ", "10000", "5000000")


def test_sections_of_a_multimodal_rope_are_an_error_by_name(tmp_path, source, target):
    """sgl-project/SpecForge#542"""
    edit_config(source, rope_scaling={"mrope_section": [8, 4, 4], "rope_type": "default"})
    refused(source, target, tmp_path / "out", "mrope_section")


# -- taps and norms


@pytest.mark.parametrize(
    ("ids", "meant", "taps"),
    [([2, 4, 5], "layer-input", [2, 4, 5]), ([2, 4, 5], "layer-output", [3, 5, 6]), ([0, 2, 5], None, [1, 3, 6])],
)
def test_ids_under_both_conventions_feed_the_taps_of_training(tmp_path, source, target, ids, meant, taps):
    """Output of layer k or input of layer k: a tenth of a token (sgl-project/sglang#25454)."""
    edit_config(source, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    out = convert(source, target, tmp_path / "out", options=ReadOptions.checked(ids_are=meant))
    assert config_of(out)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [tap - 1 for tap in taps]
    assert config_of(out)["eagle_aux_hidden_state_layer_ids"] == taps
    assert not failing(out, target)


@pytest.mark.parametrize("ids", [[4, 6, 8], [4, 6, 9], [-1, 4, 5], [4, 4, 5]])
def test_layers_that_are_not_there_or_stand_twice_are_refused(tmp_path, target, ids):
    """Two features came instead of three (sgl-project/sglang#32226)."""
    source = foreign.write_speculators(tmp_path / "source", Variant())
    edit_config(source, eagle_aux_hidden_state_layer_ids=ids)
    assert failing(source, target)
    for form in ("sglang", "vllm"):
        refused(source, target, tmp_path / "out", "taps" if ids != [4, 4, 5] else "fc", to=form)


def test_a_target_too_shallow_for_the_default_layers_is_refused(tmp_path, source):
    """Four layers give 2, 2 and 1 (NVIDIA/Model-Optimizer#300)."""
    shallow = make_target(tmp_path / "shallow", num_hidden_layers=4)
    edit_config(source, drop=("eagle_config",))
    refused(source, shallow, tmp_path / "out", "taps")


def test_two_norms_at_once_are_refused(tmp_path, target):
    """They match no network that was trained (vllm-project/speculators#670)."""
    source = foreign.write_speculators(tmp_path / "source", Variant(fc_norm=True, norm_before_fc=True))
    assert "config.features" in failing(source, target)
    for form in ("sglang", "vllm"):
        refused(source, target, tmp_path / "out", "exclude each other", to=form)


def test_taps_other_than_the_default_are_always_written_out(tmp_path, target):
    """An absent eagle_config is swallowed, and the default layers are fed (sgl-project/sglang#21274)."""
    source = foreign.write_sglang(tmp_path / "source", Variant(taps=(1, 3, 6)))
    assert config_of(convert(source, target, tmp_path / "out"))["eagle_config"] == {
        "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 5],
    }  # fmt: skip
    edit_config(source, drop=("eagle_config",))
    said = [check for check in verify(source, target) if check.name == "taps.sglang"]
    assert "[2, 4, 5]" in said[0].message


# -- files, dtypes and the target's quantisation


def test_a_slice_that_drags_its_whole_batch_along_is_written_at_its_own_size(tmp_path, source, target):
    """torch.save writes the storage behind a view (pytorch/pytorch#40157)."""
    tensors = load_file(source / "model.safetensors")
    batch = torch.stack([tensors["fc.weight"]] * 32)
    (source / "model.safetensors").unlink()
    torch.save(tensors | {"fc.weight": batch[5]}, source / "pytorch_model.bin")
    assert (source / "pytorch_model.bin").stat().st_size > batch.numel() * 2
    out = convert(source, target, tmp_path / "out")
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["fc.weight"], tensors["fc.weight"])
    values = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert values < (out / "model.safetensors").stat().st_size < 1.05 * values


@pytest.mark.parametrize("writer", [foreign.write_sglang, foreign.write_speculators])
def test_the_target_s_quantisation_does_not_become_the_drafter_s(tmp_path, target, writer, capsys):
    """Copied into the config, or inherited at launch (sgl-project/sglang#26083)."""
    method = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    edit_config(target, quantization_config=method)
    source = writer(tmp_path / "source", Variant())
    assert "quantization_config" not in config_of(convert(source, target, tmp_path / "clean"))
    edit_config(source, quantization_config=method)
    assert "config.quantization" in failing(source, target)
    for form in ("sglang", "vllm"):
        out = convert(source, target, tmp_path / form, to=form)
        assert "quantization_config" not in (out / "config.json").read_text()
        assert "quantization_config left out" in " ".join(capsys.readouterr().err.split())
        assert not failing(out, target)
    assert "--speculative-draft-model-quantization unquant" in sglang_line(tmp_path / "sglang", read_target(target))


@pytest.mark.parametrize("how", ["scale", "bytes"])
def test_a_drafter_that_really_is_quantised_is_refused(tmp_path, source, target, how):
    name = "midlayer.mlp.up_proj.weight"
    extra = {name + "_scale": torch.ones(1)} if how == "scale" else {name: torch.ones(96, HIDDEN, dtype=torch.uint8)}
    edit_tensors(source, lambda tensors: tensors.update(extra))
    edit_config(source, quantization_config={"quant_method": "fp8"})
    refused(source, target, tmp_path / "out", "is quantised", name)
