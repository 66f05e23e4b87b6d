"""A target is read from its config and weight index alone, whatever the nesting."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.plan import make_plan
from draftsmith.configs.schema import load_config
from draftsmith.configs.target import derived_context, read_header, read_rope, read_target

BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 5e6, "tie_word_embeddings": False,
}  # fmt: skip


def write(folder, config, tensors=None, index=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file, part in (tensors or {}).items():
        save_file(part, folder / file)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_a_plain_target_in_one_file(tmp_path):
    tensors = {
        "model.embed_tokens.weight": torch.randn(512, 64, dtype=torch.bfloat16),
        "model.norm.weight": torch.randn(64),
        "model.layers.0.input_layernorm.weight": torch.ones(64),
        "lm_head.weight": torch.randn(512, 64),
    }
    target = read_target(write(tmp_path / "t", BASE, {"model.safetensors": tensors}))
    assert (target.hidden_size, target.num_layers, target.vocab_size, target.head_dim, target.context_length) == (
        64,
        8,
        512,
        32,
        2048,
    )
    assert target.rope.theta == 5e6 and target.rope.scaling is None and not target.tied
    assert (target.embedding.name, target.embedding.dtype, target.embedding.shape) == (
        "model.embed_tokens.weight",
        "BF16",
        (512, 64),
    )
    assert target.final_norm.name == "model.norm.weight" and target.head.name == "lm_head.weight"
    assert torch.equal(target.require("head").load(), tensors["lm_head.weight"])


def test_a_wrapper_nests_config_and_weights_and_only_the_last_shard_is_here(tmp_path):
    """Kimi-K2.5's nesting: everything of use under text_config and language_model, in one of the shards of an index."""
    wrapped = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": BASE | {"architectures": ["DeepseekV3ForCausalLM"]},
    }
    prefix = "language_model."
    tensors = {
        f"{prefix}model.embed_tokens.weight": torch.randn(512, 64),
        f"{prefix}lm_head.weight": torch.randn(512, 64),
        f"{prefix}model.norm.weight": torch.randn(64),
    }
    index = {name: "model-00002-of-00002.safetensors" for name in tensors} | {
        f"{prefix}model.layers.0.x": "model-00001-of-00002.safetensors"
    }
    target = read_target(write(tmp_path / "t", wrapped, {"model-00002-of-00002.safetensors": tensors}, index))
    assert target.architecture == "KimiK25ForConditionalGeneration" and target.num_layers == 8
    assert {ref.name for ref in (target.embedding, target.head, target.final_norm)} == set(tensors)


def test_a_target_of_other_weights_is_another_target(tmp_path):
    """A fine-tune of one kind of matrix in one layer of many is told; how files are cut is not; half a target is not asked."""
    names = [f"model.layers.{layer}.self_attn.{kind}.weight" for layer in range(200) for kind in ("q_proj", "k_proj")]
    tensors = {name: torch.randn(64, 64) for name in names} | {"model.norm.weight": torch.ones(64)}
    mark = read_target(write(tmp_path / "one", BASE, {"model.safetensors": tensors})).fingerprint()["weights"]
    tuned = tensors | {name: value + 1e-3 for name, value in tensors.items() if "k_proj" in name}
    assert read_target(write(tmp_path / "tuned", BASE, {"model.safetensors": tuned})).fingerprint()["weights"] != mark
    halves = {"a.safetensors": dict(list(tensors.items())[:99]), "b.safetensors": dict(list(tensors.items())[99:])}
    index = {name: file for file, part in halves.items() for name in part}
    cut = write(tmp_path / "cut", BASE, halves, index)
    assert read_target(cut).fingerprint()["weights"] == mark
    (cut / "b.safetensors").unlink()
    assert "weights" not in read_target(cut).fingerprint()


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_known_prefixes(tmp_path, prefix):
    tensors = {f"{prefix}embed_tokens.weight": torch.randn(512, 64), f"{prefix}norm.weight": torch.ones(64)}
    target = read_target(write(tmp_path / "t", BASE | {"tie_word_embeddings": True}, {"model.safetensors": tensors}))
    assert target.embedding.name == f"{prefix}embed_tokens.weight" == target.head.name


def test_an_untied_target_without_a_head_is_named(tmp_path):
    target = read_target(
        write(tmp_path / "t", BASE, {"model.safetensors": {"model.embed_tokens.weight": torch.randn(512, 64)}})
    )
    with pytest.raises(DraftsmithError, match="head cannot be found"):
        target.require("head")


def test_an_absent_shard_is_named_when_it_is_needed(tmp_path):
    index = {"lm_head.weight": "model-2.safetensors", "model.embed_tokens.weight": "model-1.safetensors"}
    shard = {"model-1.safetensors": {"model.embed_tokens.weight": torch.randn(512, 64)}}
    target = read_target(write(tmp_path / "t", BASE, shard, index))
    assert target.require("embedding").file.name == "model-1.safetensors"
    with pytest.raises(DraftsmithError, match=r"model-2\.safetensors") as caught:
        target.require("head")
    assert "shard with the target's head is not there" in str(caught.value)


def test_a_consolidated_file_has_other_names(tmp_path):
    names = {"tok_embeddings.weight": (512, 64), "norm.weight": (64,), "output.weight": (512, 64)}
    tensors = {"consolidated.safetensors": {name: torch.randn(shape) for name, shape in names.items()}}
    target = read_target(write(tmp_path / "t", BASE, tensors))
    assert [getattr(target, role).name for role in ("embedding", "final_norm", "head")] == list(names)


def test_a_tie_flag_in_either_place_counts(tmp_path):
    config = {"architectures": ["X"], "tie_word_embeddings": False, "text_config": BASE | {"tie_word_embeddings": True}}
    tensors = {"model.language_model.embed_tokens.weight": torch.randn(512, 64)}
    assert read_target(write(tmp_path / "t", config, {"model.safetensors": tensors})).head is not None
    config = {"architectures": ["X"], "tie_word_embeddings": True, "text_config": BASE}
    assert read_target(write(tmp_path / "u", config, {"model.safetensors": tensors})).head is not None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({k: v for k, v in BASE.items() if k != "hidden_size"}, "no usable hidden_size"),
        (BASE | {"num_hidden_layers": "eight"}, "no usable num_hidden_layers"),
        ({k: v for k, v in BASE.items() if k != "architectures"}, "no architecture"),
    ],
)
def test_a_config_that_lacks_a_field_is_refused_by_name(tmp_path, config, words):
    with pytest.raises(DraftsmithError, match=words):
        read_target(write(tmp_path / "t", config))


def test_an_index_cannot_leave_its_folder(tmp_path):
    with pytest.raises(DraftsmithError, match="outside its folder"):
        read_target(write(tmp_path / "t", BASE, index={"model.norm.weight": "../../x.safetensors"}))


def test_damaged_safetensors_are_refused(tmp_path):
    whole = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(100)}, whole)
    data = whole.read_bytes()
    contents = {"cut": data[:-100], "empty": b"", "huge": struct.pack("<Q", 10**9) + data[8:], "text": b"x" * 64}
    twice = b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
    shared = (
        b'{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"y":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    )
    contents |= {
        name: struct.pack("<Q", len(head)) + head + b"ab" for name, head in {"twice": twice, "shared": shared}.items()
    }
    for name, content in contents.items():
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(content)
        with pytest.raises(DraftsmithError):
            read_header(file)


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, 2048),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 8192),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 2048}}, 2048),
        ({"rope_scaling": {"type": "yarn", "factor": 64.0}}, 2048),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 2048),
        ({"model_max_length": 4096}, 4096),
    ],
)
def test_context_is_derived_as_sglang_does(changes, context):
    assert derived_context(BASE | changes) == context


def test_rope_is_read_from_both_spellings():
    assert read_rope({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 9.0}).theta == 7.0
    assert read_rope({"rope_theta": 9.0}).theta == 9.0
    assert read_rope({"rope_theta": 9.0, "rope_scaling": {"type": None}}).scaling is None
    both = {
        "rope_theta": 9.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    }
    assert read_rope(both).theta == 9.0 and read_rope(both).scaling == {"rope_type": "linear", "factor": 2.0}
    yarn = read_rope({"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 64.0}})
    assert yarn.scaling == {"rope_type": "yarn", "factor": 64.0}


def test_the_plan_of_kimi_k25_matches_its_published_figures():
    plan = make_plan(load_config("kimi-k2.5"), conversations=100_000, turns=100_000, tokens=200_000_000)
    assert plan.target_from_facts and plan.spec.taps == (2, 30, 58)
    assert plan.spec.max_position_embeddings == 262144
    assert 1.1e9 < plan.spec.parameter_count() < 1.3e9
    # fc 7168 x 21504, q/k/v/o over 64 heads of 128, three MLP matrices, five norms, head 32000 x 7168: by hand
    assert (
        plan.spec.parameter_count()
        == 7168 * 21504 + 3 * 8192 * 14336 + 7168 * 8192 + 3 * 18432 * 7168 + 4 * 7168 + 32000 * 7168
    )
    assert plan.store_bytes // plan.tokens == 57_344 + 9


def test_a_drafter_that_cannot_be_served_is_refused_in_words():
    config = load_config("kimi-k2.5", ["target.taps=[2, 30, 61]"])
    with pytest.raises(DraftsmithError, match=r"taps \[2, 30, 61\] must ascend within 0\.\.60") as error:
        make_plan(config, 1, 1, 1)
    assert "pydantic" not in str(error.value)
