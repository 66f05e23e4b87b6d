"""Conversion: what must stop it, what it writes, and that nothing changes on the way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import read_target
from draftsmith.convert.read import read_drafter
from draftsmith.convert.tensors import read_array
from draftsmith.convert.write import convert
from tests.convert.conftest import (
    DRAFT,
    SHAPES,
    edit_config,
    edit_tensors,
    listing,
    make_checkpoint,
    make_target,
    random_tensors,
)

FACTS = Path(__file__).parents[2] / "configs" / "presets" / "facts" / "kimi-k2.5.json"


def refuse(source, target, out, words):
    """The conversion stops with these words and leaves nothing at or beside the destination."""
    with pytest.raises(DraftsmithError) as caught:
        convert(source, target, out)
    for word in words if isinstance(words, tuple) else (words,):
        assert word in str(caught.value)
    assert not out.exists() and not list(out.parent.glob(f".{out.name}*"))


def damaged(name, how):
    tensors = random_tensors()
    original = tensors.pop(name)
    if how == "misspelt":
        tensors[name.replace("weight", "wieght")] = original
    elif how == "empty":
        tensors[name] = torch.empty(0)
    elif how == "transposed":
        tensors[name] = original.T.contiguous() if original.dim() > 1 else original[:-1].clone()
    elif how == "nan":
        original.view(-1)[-1] = float("nan")
        tensors[name] = original
    elif how == "integer":
        tensors[name] = original.to(torch.int32)
    return tensors


@pytest.mark.parametrize(
    "name",
    ["norm.weight", "midlayer.hidden_norm.weight", "lm_head.weight", "fc.weight", "midlayer.self_attn.k_proj.weight"],
)
@pytest.mark.parametrize("how", ["missing", "misspelt", "empty", "transposed", "nan", "integer"])
def test_a_damaged_tensor_stops_the_conversion_by_name(tmp_path, target, name, how):
    if how == "transposed" and name == "midlayer.self_attn.k_proj.weight":
        name = "midlayer.self_attn.o_proj.weight"
    checkpoint = make_checkpoint(tmp_path / "checkpoint", target, damaged(name, how))
    words = (name, name.replace("weight", "wieght")) if how == "misspelt" else name
    refuse(checkpoint, target, tmp_path / "out", words)


def test_all_faults_are_named_at_once(tmp_path, target):
    tensors = random_tensors()
    del tensors["norm.weight"], tensors["d2t"]
    tensors["extra.weight"] = torch.zeros(2, 2)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", target, tensors)
    refuse(
        checkpoint,
        target,
        tmp_path / "out",
        ("missing: norm.weight", "missing: d2t", "unknown: extra.weight"),
    )


def test_a_value_too_large_for_float16_stops_the_conversion(tmp_path, target, checkpoint):
    edit_tensors(checkpoint / "drafter", lambda tensors: tensors["fc.weight"].view(-1)[0].fill_(1e6))
    with pytest.raises(DraftsmithError, match=r"fc\.weight holds values too large"):
        convert(checkpoint, target, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t["d2t"].add_(torch.arange(DRAFT)), "absolute target ids"),
        (lambda t: t["d2t"][-1].fill_(9999), "outside 0..511"),
        (lambda t: t["d2t"].copy_(t["d2t"][[1, 0, *range(2, DRAFT)]]), "must ascend"),
        (lambda t: t["t2d"][0].logical_not_(), "t2d and d2t disagree about 1 target ids"),
        (lambda t: t["t2d"].copy_(t["t2d"].roll(1)), "t2d and d2t disagree"),
    ],
)
def test_a_wrong_vocabulary_map_stops_the_conversion(tmp_path, target, checkpoint, edit, words):
    edit_tensors(checkpoint / "drafter", edit)
    refuse(checkpoint, target, tmp_path / "out", words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"num_hidden_layers": 9}, "layers 8, the target's 9"), ({"vocab_size": 600}, "vocabulary 512, the target's 600")],
)
def test_another_target_is_refused(tmp_path, checkpoint, changes, words):
    refuse(checkpoint, make_target(tmp_path / "other", **changes), tmp_path / "out", words)


def test_float32_is_rounded_to_nearest_even(drafter):
    """The oracle works on the bits: add 0x7FFF plus the lowest kept bit, cut 16 bits."""
    written, trained = load_file(drafter / "model.safetensors"), random_tensors()
    assert written.keys() == trained.keys()
    for name in SHAPES:
        bits = trained[name].numpy().view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
        assert written[name].dtype == torch.bfloat16 and tuple(written[name].shape) == SHAPES[name]
        assert np.array_equal(written[name].float().numpy(), rounded), name
    for name in ("d2t", "t2d"):
        assert torch.equal(written[name], trained[name])


def test_ties_go_to_the_even_neighbour(tmp_path, target, checkpoint):
    """1 + 2^-8 lies midway between 1 and 1 + 2^-7; 1 + 3 * 2^-8 midway between 1 + 2^-7 and 1 + 2^-6."""
    midway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)])
    edit_tensors(checkpoint / "drafter", lambda tensors: tensors["norm.weight"][:3].copy_(midway))
    out = convert(checkpoint, target, tmp_path / "out")
    assert load_file(out / "model.safetensors")["norm.weight"][:3].tolist() == [1.0, 1 + 2**-6, -1.0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_dtype_can_be_chosen(tmp_path, target, checkpoint, dtype):
    out = convert(checkpoint, target, tmp_path / "out", dtype=dtype)
    written = load_file(out / "model.safetensors")
    for name in SHAPES:
        assert torch.equal(written[name], random_tensors()[name].to(getattr(torch, dtype))), name
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == dtype


def test_the_round_trip_is_equal_bit_by_bit(tmp_path, target, checkpoint):
    first = convert(checkpoint, target, tmp_path / "first", dtype="float32")
    reread = read_drafter(first, read_target(target))
    for name, tensor in random_tensors().items():
        assert np.array_equal(read_array(reread.tensors[name]), tensor.numpy()), name
    assert reread.spec == read_drafter(checkpoint, read_target(target)).spec and reread.dialect == "sglang"
    second = convert(first, target, tmp_path / "second", dtype="float32")
    assert listing(first) == listing(second)


def test_without_its_record_a_converted_folder_still_tells_the_same_drafter(tmp_path, target, checkpoint):
    out = convert(checkpoint, target, tmp_path / "out")
    spec = read_drafter(out, read_target(target)).spec
    (out / "draftsmith.json").unlink()
    assert read_drafter(out, read_target(target)).spec == spec.model_copy(update={"trained_length": None})


@pytest.mark.parametrize(
    ("changes", "drop", "words"),
    [
        ({"norm_before_residual": True}, (), ("norm_before_residual is true", "SGLang", "--to vllm")),
        ({"hidden_act": "gelu"}, (), "hidden_act: gelu"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (), "different taps"),
        ({"rope_theta": 10000.0}, (), "RoPE in two ways"),
        ({"rope_theta": 1e4, "rope_parameters": None, "rope_scaling": None}, (), ("10000", "5e+06", "--rope-theta")),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4]}}, (), "mrope_section"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_parameters": None}, (), "rope_type dynamic"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": None},
            (),
            "missing original_max_position",
        ),
        ({}, ("rope_theta", "rope_scaling", "rope_parameters"), "no rope_theta"),
        ({}, ("rms_norm_eps",), "does not say rms_norm_eps"),
        ({"head_dim": "32"}, (), "head_dim is no positive int"),
    ],
)
def test_a_foreign_config_that_cannot_be_carried_over_is_refused(tmp_path, target, drafter, changes, drop, words):
    (drafter / "draftsmith.json").unlink()
    edit_config(drafter, drop=drop, **changes)
    refuse(drafter, target, tmp_path / "out", words)


def test_a_missing_draft_vocabulary_size_is_read_off_the_head(tmp_path, target, drafter):
    (drafter / "draftsmith.json").unlink()
    edit_config(drafter, drop=("draft_vocab_size",))
    out = convert(drafter, target, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 128


def test_a_config_that_contradicts_the_tensors_is_corrected_by_them(tmp_path, target, drafter):
    """num_hidden_layers, biases and the head's size are often copied from the target's config or from a template."""
    reference = json.loads((drafter / "config.json").read_text())
    (drafter / "draftsmith.json").unlink()
    edit_config(drafter, num_hidden_layers=8, attention_bias=True, intermediate_size=999, head_dim=16,
                num_key_value_heads=4, draft_vocab_size=256, tie_word_embeddings=True, use_cache=None)  # fmt: skip
    out = convert(drafter, target, tmp_path / "out")
    assert json.loads((out / "config.json").read_text()) == reference


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda embedding: embedding, "equals the target's"),
        (lambda embedding: embedding.to(torch.float8_e4m3fn).bfloat16(), "it differs"),
        (lambda embedding: (embedding.float() * (1 + 2**-9)).half(), "rounded"),
        (torch.randn_like, "it differs"),
    ],
)
def test_an_embedding_that_engines_share_is_left_out_and_reported(tmp_path, target, drafter, edit, said, capsys):
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(drafter, lambda tensors: tensors.update({"embed_tokens.weight": edit(embedding).clone()}))
    capsys.readouterr()
    out = convert(drafter, target, tmp_path / "out")
    assert "embed_tokens.weight" not in load_file(out / "model.safetensors")
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_layers_0_is_another_spelling_and_two_spellings_collide(tmp_path, target, drafter):
    def respell(tensors):
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors["layers.0." + name.removeprefix("midlayer.")] = tensors.pop(name)

    reference = listing(convert(drafter, target, tmp_path / "reference"))
    edit_tensors(drafter, respell)
    assert listing(convert(drafter, target, tmp_path / "out")) == reference
    edit_tensors(drafter, lambda tensors: tensors.update({"midlayer.hidden_norm.weight": torch.ones(64)}))
    refuse(drafter, target, tmp_path / "twice", "2 tensors of one name: midlayer.hidden_norm.weight")


def shard(folder, *, index=None):
    """Split the folder's weights into two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a-1.safetensors": names[:7], "a-2.safetensors": names[7:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map | (index or {})}))


def test_shards_are_read_through_their_index(tmp_path, target, checkpoint):
    reference = listing(convert(checkpoint, target, tmp_path / "reference"))
    shard(checkpoint / "drafter")
    assert listing(convert(checkpoint, target, tmp_path / "out")) == reference


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"norm.weight": "../../x.safetensors"}, ("outside its folder", "../../x.safetensors")),
        ({"norm.weight": "a-3.safetensors"}, ("not there", "a-3.safetensors")),
        ({"norm.weight": "a-1.safetensors"}, ("disagree", "in a-2.safetensors but not named: norm.weight")),
        ({"more.weight": "a-1.safetensors"}, ("disagree", "named but not in a-1.safetensors: more.weight")),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, target, checkpoint, index, words):
    shard(checkpoint / "drafter", index=index)
    refuse(checkpoint, target, tmp_path / "out", words)


@pytest.mark.parametrize("damage", ["cut", "huge header", "empty"])
def test_a_damaged_file_is_refused_by_name(tmp_path, target, checkpoint, damage):
    file = checkpoint / "drafter" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(
        {"cut": data[:-100], "huge header": (10**9).to_bytes(8, "little") + data[8:], "empty": b""}[damage]
    )
    refuse(checkpoint, target, tmp_path / "out", str(file))


def test_pickles_are_refused_by_name(tmp_path, target, checkpoint):
    (checkpoint / "drafter" / "model.safetensors").rename(checkpoint / "drafter" / "pytorch_model.bin")
    refuse(checkpoint, target, tmp_path / "out", "pytorch_model.bin")


def test_an_unknown_form_names_the_known_ones(tmp_path, target):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "hidden_size": 8}))
    save_file({"encoder.weight": torch.zeros(2)}, folder / "model.safetensors")
    refuse(
        folder,
        target,
        tmp_path / "out",
        ("no form that is known", "encoder.weight", "a training checkpoint of draftsmith"),
    )


def test_a_training_folder_gives_its_best_checkpoint_else_the_newest_complete_one(tmp_path, target):
    train = tmp_path / "run"
    for step, seed in ((100, 1), (200, 2), (300, 3)):
        make_checkpoint(train / f"checkpoint-{step:08d}", target, random_tensors(seed=seed))
    (train / "checkpoint-00000400").mkdir()

    def converted(name):
        return load_file(convert(train, target, tmp_path / name, dtype="float32") / "model.safetensors")["fc.weight"]

    assert torch.equal(converted("newest"), random_tensors(seed=3)["fc.weight"])
    (train / "best.json").write_text('{"checkpoint": "checkpoint-00000200"}')
    assert torch.equal(converted("best"), random_tensors(seed=2)["fc.weight"])
    (train / "best.json").write_text('{"checkpoint": "checkpoint-00000999"}')
    refuse(train, target, tmp_path / "gone", "checkpoint-00000999")


def test_a_checkpoint_and_its_drafter_folder_are_the_same(tmp_path, target, checkpoint):
    assert listing(convert(checkpoint, target, tmp_path / "a")) == listing(
        convert(checkpoint / "drafter", target, tmp_path / "b")
    )


def test_overwriting_takes_a_word_and_spares_what_is_no_drafter(tmp_path, target, checkpoint, drafter):
    before = listing(drafter)
    with pytest.raises(DraftsmithError, match="--overwrite"):
        convert(checkpoint, target, drafter)
    (drafter / "thesis.tex").write_text("years of work")
    with pytest.raises(DraftsmithError, match=r"thesis\.tex"):
        convert(checkpoint, target, drafter, overwrite=True)
    (drafter / "thesis.tex").unlink()
    convert(checkpoint, target, drafter, dtype="float32", overwrite=True)
    assert listing(drafter).keys() == before.keys() and listing(drafter) != before
    for place in (tmp_path, target):
        with pytest.raises(DraftsmithError, match="destination"):
            convert(checkpoint, target, place, overwrite=True)


def test_a_folder_can_be_converted_onto_itself(target, drafter):
    before = listing(drafter)
    convert(drafter, target, drafter, overwrite=True)
    assert listing(drafter) == before


def kimi(folder):
    """Kimi-K2.5's config with thin layers: nesting, depth, context and RoPE are the real ones."""
    config = json.loads(FACTS.read_text())
    config["text_config"] |= {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 512,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"language_model.lm_head.weight": torch.zeros(512, 64)}, folder / "model.safetensors")
    return folder


def kimi_drafter(tmp_path):
    target = kimi(tmp_path / "kimi")
    shapes = SHAPES | {
        "midlayer.self_attn.q_proj.weight": (64, 128), "midlayer.self_attn.o_proj.weight": (64, 64),
    }  # fmt: skip
    # Trained with 2048 positions; head_dim 16 follows from 64 / 4.
    checkpoint = make_checkpoint(
        tmp_path / "checkpoint", target, random_tensors(shapes), taps=(2, 30, 58), max_position_embeddings=2048
    )
    return target, checkpoint


def test_a_drafter_for_kimi_gets_the_target_s_context_taps_and_rope(tmp_path):
    target, checkpoint = kimi_drafter(tmp_path)
    out = convert(checkpoint, target, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 262144
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 29, 57]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    parsed = AutoConfig.from_pretrained(out)
    assert parsed.rope_parameters["rope_theta"] == 50000.0 and parsed.rope_parameters["factor"] == 64.0
    assert parsed.rope_parameters["original_max_position_embeddings"] == 4096
    assert parsed.rope_parameters["mscale"] == parsed.rope_parameters["mscale_all_dim"] == 1.0
    assert parsed.max_position_embeddings == 262144 and parsed.rms_norm_eps == 1e-5
    assert str(parsed.dtype).endswith("bfloat16")


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    ],
)
def test_transformers_parses_what_training_used(tmp_path, scaling):
    target = make_target(tmp_path / "t", max_position_embeddings=4096)
    checkpoint = make_checkpoint(
        tmp_path / "c", target, rope={"theta": 123456.0, "scaling": scaling}, rms_norm_eps=3e-6
    )
    out = convert(checkpoint, target, tmp_path / "out")
    parsed = AutoConfig.from_pretrained(out)
    assert parsed.architectures == ["LlamaForCausalLMEagle3"] and parsed.model_type == "llama"
    assert parsed.rope_parameters["rope_theta"] == 123456.0 and parsed.rms_norm_eps == 3e-6
    for key, value in (scaling or {"rope_type": "default"}).items():
        assert parsed.rope_parameters[key] == value
    assert parsed.max_position_embeddings == 4096 and parsed.head_dim == 32 and parsed.draft_vocab_size == 128
    assert not parsed.tie_word_embeddings and parsed.target_hidden_size == 64 and parsed.num_aux_hidden_states == 3


def test_a_drafter_s_own_rope_is_kept_when_the_target_has_another(tmp_path):
    """The target's theta is 5e6; a drafter trained with 10000 serves best with 10000."""
    target = make_target(tmp_path / "t")
    checkpoint = make_checkpoint(tmp_path / "c", target, rope={"theta": 10000.0, "scaling": None})
    config = json.loads((convert(checkpoint, target, tmp_path / "out") / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0


def test_the_norms_of_eagle_3_1_are_carried_with_their_switches(tmp_path, target):
    shapes = SHAPES | {f"fc_norm.{i}.weight": (64,) for i in range(3)}
    checkpoint = make_checkpoint(tmp_path / "c", target, random_tensors(shapes), fc_norm=True, norm_output=True)
    out = convert(checkpoint, target, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["fc_norm"] is True and config["norm_output"] is True
    assert load_file(out / "model.safetensors").keys() == random_tensors(shapes).keys()


def test_the_record_says_what_training_was(drafter):
    record = json.loads((drafter / "draftsmith.json").read_text())
    assert record["taps"] == {"convention": "layer-input", "layers": [2, 4, 5]}
    assert record["trained_length"] == 2048 and record["provenance"]["step"] == 123
    assert len(record["tensors"]) == 15 and all(len(entry["xxh3"]) == 32 for entry in record["tensors"].values())
