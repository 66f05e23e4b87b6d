"""What the peers' own code wrote (tests/convert/peers, see its README.md) converts, with every bit of every tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import read_target
from draftsmith.convert.foreign import ReadOptions
from draftsmith.convert.read import read_drafter
from draftsmith.convert.verify import verify
from draftsmith.convert.write import convert
from tests.convert.conftest import edit_config, edit_tensors

PEERS = Path(__file__).parent / "peers"
TARGET = PEERS / "target"
THETA = 5e6

LAYER = [
    "input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight",
    "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight",
    "mlp.up_proj.weight", "mlp.down_proj.weight",
]  # fmt: skip
OTHERS = ["fc.weight", "norm.weight", "lm_head.weight"]
FC_NORM = ["fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"]
INPUT_NORM = ["input_norm.weight"]

FILES = {
    "specforge-training-plain": {"layer": "midlayer.", "dialect": "sglang"},
    "specforge-sglang-plain": {"layer": "midlayer.", "dialect": "sglang"},
    "specforge-sglang-fc-norm-context-2048": {
        "layer": "midlayer.", "dialect": "sglang", "more": FC_NORM, "flags": {"fc_norm"}, "trained": 2048,
    },
    "specforge-hf-head-dim-32": {"layer": "midlayer.", "dialect": "sglang", "head_dim": 32},
    "speculators-trained-plain": {"layer": "layers.0.", "dialect": "speculators"},
    "speculators-trained-fc-norm-norm-output": {
        "layer": "layers.0.", "dialect": "speculators", "more": FC_NORM, "flags": {"fc_norm", "norm_output"},
    },
    "speculators-trained-norm-before-fc-window-2048": {
        "layer": "layers.0.", "dialect": "speculators", "more": INPUT_NORM, "flags": {"norm_before_fc"}, "window": 2048,
    },
    "speculators-trained-norm-before-residual": {
        "layer": "layers.0.", "dialect": "speculators", "flags": {"norm_before_residual"},
    },
    "speculators-converted-plain": {"layer": "layers.0.", "dialect": "speculators"},
    "modelopt-plain": {"layer": "layers.0.", "dialect": "modelopt"},
    "angelslim-plain": {"layer": "midlayer.", "dialect": "angelslim", "theta": 10000.0},
}  # fmt: skip
"""Folder -> how it names the decoder layer, and what its drafter is; all that is not said is as in `plain`."""


def options_of(name):
    """What a user would have to say of the file."""
    if name == "specforge-training-plain":
        return ReadOptions(config=PEERS / name / "draft-config.json")
    if name == "modelopt-plain":
        return ReadOptions(rope_scaling="none")
    return ReadOptions(rope_theta=10000.0) if name == "angelslim-plain" else None


def held_by(name):
    """The file's own tensors, as torch or safetensors load them."""
    if name == "specforge-training-plain":
        return torch.load(PEERS / name / "training_state.pt", weights_only=True)["draft_state_dict"]
    return load_file(PEERS / name / "model.safetensors")


def expected(name, form):
    """What the written file must hold: the peer's tensors under the form's names, mapped by hand."""
    facts, held = FILES[name], held_by(name)
    layer = "layers.0." if form == "vllm" else "midlayer."
    wanted = {layer + part: held[facts["layer"] + part] for part in LAYER}
    wanted |= {part: held[part] for part in OTHERS + facts.get("more", [])}
    ids = held["d2t"] + torch.arange(128)
    order = ids.argsort()  # Model-Optimizer's stand in order of frequency
    wanted["lm_head.weight"] = held["lm_head.weight"][order]
    wanted["d2t"] = ids[order] - torch.arange(128)
    wanted["t2d"] = torch.zeros(512, dtype=torch.bool).index_fill_(0, ids, True)
    assert wanted["d2t"].tolist() == [3 * row + 1 for row in range(128)]
    left = set(held) - {facts["layer"] + part for part in LAYER} - set(wanted)
    assert left <= {"embed_tokens.weight"}, left  # the mapping by hand leaves out nothing
    return wanted


def can_carry(name, form):
    flags = FILES[name].get("flags", set())
    if form == "eagle":
        return not flags and "window" not in FILES[name]
    return form == "vllm" or "norm_before_residual" not in flags


@pytest.mark.parametrize("form", ["sglang", "vllm", "eagle"])
@pytest.mark.parametrize("name", FILES)
def test_a_peer_s_file_converts_bit_by_bit(tmp_path, name, form):
    out = tmp_path / "out"
    if not can_carry(name, form):
        with pytest.raises(DraftsmithError, match="cannot be written"):
            convert(PEERS / name, TARGET, out, to=form, options=options_of(name))
        assert not out.exists()
        return
    convert(PEERS / name, TARGET, out, to=form, options=options_of(name))
    found, wanted = load_file(out / "model.safetensors"), expected(name, form)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
    check_config(json.loads((out / "config.json").read_text()), FILES[name], form)
    if form != "eagle":
        assert not [check for check in verify(out, TARGET, deep=True) if check.status == "fail"]
    assert json.loads((out / "draftsmith.json").read_text())["trained_length"] == FILES[name].get("trained")


def check_config(config, facts, form):
    """Facts that the engines read, by hand."""
    layer = config["transformer_layer_config"] if form == "vllm" else config
    theta = facts.get("theta", THETA)
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == theta
    assert layer["rope_scaling"] is None and layer["rope_parameters"]["rope_type"] == "default"
    assert layer["max_position_embeddings"] == 4096 and layer["num_hidden_layers"] == 1
    assert (layer["hidden_size"], layer["intermediate_size"], layer["vocab_size"]) == (64, 96, 512)
    assert (layer["num_attention_heads"], layer["num_key_value_heads"]) == (4, 2)
    assert layer["head_dim"] == facts.get("head_dim", 16) and layer["rms_norm_eps"] == 1e-5
    assert config["draft_vocab_size"] == 128 and config["tie_word_embeddings"] is False
    assert config["dtype"] == config["torch_dtype"] == "bfloat16" and "quantization_config" not in config
    window = facts.get("window")
    assert layer.get("sliding_window") == window
    assert layer.get("layer_types") == (None if window is None else ["sliding_attention"])
    if form == "eagle":
        assert config["architectures"] == ["LlamaForCausalLM"] and "eagle_config" not in config
        return
    flags = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
    assert {flag for flag in flags if config.get(flag)} == facts.get("flags", set())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    if form == "sglang":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    else:
        assert config["architectures"] == ["Eagle3DraftModel"] and config["speculators_model_type"] == "eagle3"
        assert all(type(config[flag]) is bool for flag in flags)


@pytest.mark.parametrize("name", FILES)
def test_a_peer_s_file_is_recognised(name):
    assert read_drafter(PEERS / name, read_target(TARGET), options_of(name)).dialect == FILES[name]["dialect"]


def test_a_specforge_checkpoint_needs_its_config_named(tmp_path, capsys):
    """The config is a file of the run; the state dict lies under draft_state_dict, beside optimizer and counters."""
    with pytest.raises(DraftsmithError, match="--config FILE"):
        convert(PEERS / "specforge-training-plain", TARGET, tmp_path / "out")
    convert(
        PEERS / "specforge-training-plain", TARGET, tmp_path / "out", options=options_of("specforge-training-plain")
    )
    said = capsys.readouterr().err.replace("\n", " ")
    assert "draft_state_dict" in said and "training_state_rank0.pt" in said


def test_model_optimizer_s_yarn_is_asked_about_and_shown(tmp_path):
    """Its exporter puts YaRN in the place of the plain RoPE that its trainer used."""
    with pytest.raises(DraftsmithError) as caught:
        convert(PEERS / "modelopt-plain", TARGET, tmp_path / "out")
    for words in ("'factor': 32.0", "--rope-scaling none", "--rope-scaling keep"):
        assert words in str(caught.value)


def test_model_optimizer_s_second_norm_is_warned_of(tmp_path, capsys):
    convert(PEERS / "modelopt-plain", TARGET, tmp_path / "out", options=options_of("modelopt-plain"))
    assert "--repair-double-norm" in capsys.readouterr().err


def test_angelslim_s_own_base_is_warned_of_where_the_config_says_another(tmp_path, capsys):
    """angelslim 0.5.0 never hands the config's rope_theta to its rotary table."""
    convert(PEERS / "angelslim-plain", TARGET, tmp_path / "out")
    said = " ".join(capsys.readouterr().err.split())
    assert "rope_theta 10000 whatever its config says" in said and "--rope-theta 10000" in said
    convert(PEERS / "angelslim-plain", TARGET, tmp_path / "told", options=options_of("angelslim-plain"))
    assert "whatever its config says" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["specforge-hf-head-dim-32", "speculators-trained-plain"])
def test_the_embedding_that_trainers_copy_is_recognised_as_the_target_s(tmp_path, name, capsys):
    convert(PEERS / name, TARGET, tmp_path / "out")
    assert "embed_tokens.weight left out: equals the target's" in capsys.readouterr().err.replace("\n", " ")


def test_a_head_that_is_the_target_s_rows_is_found_in_place():
    """speculators freezes lm_head at the target's rows of the draft vocabulary: the check of the rows sees them."""
    ids = torch.arange(128) * 4 + 1
    head = load_file(TARGET / "model.safetensors")["lm_head.weight"]
    assert torch.equal(held_by("speculators-trained-plain")["lm_head.weight"], head[ids])


def test_a_sliding_window_is_said_with_its_serving_flag(tmp_path, capsys):
    convert(PEERS / "speculators-trained-norm-before-fc-window-2048", TARGET, tmp_path / "out")
    assert "--speculative-draft-window-size 2048" in " ".join(capsys.readouterr().err.split())


def edited(tmp_path, name):
    return Path(shutil.copytree(PEERS / name, tmp_path / "source"))


def test_what_speculators_converter_drops_is_refused(tmp_path):
    """Eagle3Converter 0.9.0 keeps the flag of a norm and drops its weights; without t2d it drops d2t as well."""
    flagged = edited(tmp_path / "a", "speculators-converted-plain")
    edit_config(flagged, fc_norm=True)
    with pytest.raises(DraftsmithError, match=r"missing: fc_norm\.0\.weight"):
        convert(flagged, TARGET, tmp_path / "out", to="vllm")
    unmapped = edited(tmp_path / "b", "speculators-converted-plain")
    edit_tensors(unmapped, lambda tensors: (tensors.pop("d2t"), tensors.pop("t2d")))
    with pytest.raises(DraftsmithError, match="d2t is missing"):
        convert(unmapped, TARGET, tmp_path / "out", to="vllm")
    save_file({"d2t": held_by("speculators-converted-plain")["d2t"]}, tmp_path / "vocab.safetensors")
    out = convert(unmapped, TARGET, tmp_path / "out", options=ReadOptions(vocab=tmp_path / "vocab.safetensors"))
    found, wanted = load_file(out / "model.safetensors"), expected("speculators-converted-plain", "sglang")
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


def test_norms_of_query_and_key_are_refused_by_name(tmp_path):
    """speculators' qwen3 layers have them; the engines' drafter classes do not."""
    source = edited(tmp_path, "speculators-trained-plain")
    edit_tensors(
        source, lambda tensors: tensors.update({f"layers.0.self_attn.{x}_norm.weight": torch.ones(16) for x in "qk"})
    )
    for form in ("sglang", "vllm"):
        with pytest.raises(DraftsmithError) as caught:
            convert(source, TARGET, tmp_path / "out", to=form)
        assert "self_attn.q_norm.weight" in str(caught.value) and "self_attn.k_norm.weight" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [name for name in FILES if "norm-before-residual" not in name])
def test_there_and_back_through_every_form(tmp_path, name):
    """sglang -> vllm -> sglang gives the first files again, without our record to help."""
    first = convert(PEERS / name, TARGET, tmp_path / "first", options=options_of(name))
    said = ReadOptions(rope_theta=FILES[name].get("theta"))
    there = convert(first, TARGET, tmp_path / "there", to="vllm")
    (there / "draftsmith.json").unlink()
    back = convert(there, TARGET, tmp_path / "back", options=said)
    for file in ("config.json", "model.safetensors"):
        assert (back / file).read_bytes() == (first / file).read_bytes(), file
