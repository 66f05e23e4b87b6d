"""Every form in, every form out: the same drafter, bit by bit, by hand-made files of each form's documented names."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import read_target
from draftsmith.convert.foreign import ReadOptions
from draftsmith.convert.read import read_drafter
from draftsmith.convert.verify import verify
from draftsmith.convert.write import convert
from tests.convert import foreign
from tests.convert.conftest import edit_config, edit_tensors, make_target
from tests.convert.foreign import DRAFT, HIDDEN, VOCAB, WRITERS, Variant, can_say, draft_ids, maps_of, tensors_of

VARIANTS = {
    "plain": Variant(),
    "head_dim": Variant(head_dim=32),
    "one tap, wider target": Variant(taps=(4,), target_hidden=128),
    "fc_norm, wider target": Variant(fc_norm=True, target_hidden=128),
    "four taps": Variant(taps=(2, 3, 4, 6)),
    "fc_norm": Variant(fc_norm=True),
    "norm_output": Variant(norm_output=True),
    "norm_before_fc": Variant(norm_before_fc=True),
    "full vocabulary": Variant(full=True),
    "mla": Variant(mla=True),
    "mla, full": Variant(mla=True, full=True),
}
IN = [(d, v) for d, v in product(WRITERS, VARIANTS) if can_say(d, VARIANTS[v])]
FORMS = ("sglang", "vllm", "eagle")


def expected(variant, form):
    """What the written file must hold, by hand."""
    weights = tensors_of(variant)
    maps = {} if variant.full else maps_of(variant)
    return (foreign.layers_0(weights) if form == "vllm" else weights) | maps


def can_carry(form, variant):
    if form == "eagle":
        return not (
            variant.mla or variant.fc_norm or variant.norm_output or variant.norm_before_fc
        ) and variant.taps == (2, 4, 5)
    return not (form == "vllm" and variant.mla) and not (form == "sglang" and variant.norm_before_residual)


def bits(folder):
    return {name: (t.dtype, t.shape, t.contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else b"") for name, t in
            load_file(folder / "model.safetensors").items()}  # fmt: skip


@pytest.mark.parametrize("kind", ["plain target", "tied", "nested"])
@pytest.mark.parametrize(("dialect", "name"), IN)
def test_every_form_in_gives_the_same_bits_in_every_form_out(tmp_path, dialect, name, kind):
    variant = VARIANTS[name]
    target = any_target(tmp_path / "target", kind, variant.target_hidden)
    source = WRITERS[dialect](tmp_path / "source", variant)
    if kind == "nested" and dialect == "sglang" and variant.taps[0] != 2:
        # SGLang adds one to a DeepSeek target's ids only if the first of them is 1.
        edit_config(source, eagle_config={"eagle_aux_hidden_state_layer_ids": list(variant.taps)})
    for form in FORMS:
        out = tmp_path / form
        if not can_carry(form, variant):
            with pytest.raises(DraftsmithError, match="cannot be written"):
                convert(source, target, out, to=form)
            assert not out.exists()
            continue
        convert(source, target, out, to=form)
        found, wanted = load_file(out / "model.safetensors"), expected(variant, form)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) and found[key].dtype == wanted[key].dtype for key in wanted)
        # Back from what was written, with and without our own record beside it.
        for record in (True, False):
            if not record:
                (out / "draftsmith.json").unlink()
            back = convert(out, target, tmp_path / f"{form}-back-{record}", to="sglang")
            assert bits(back) == {key: value for key, value in bits_of(expected(variant, "sglang")).items()}
            again = json.loads((back / "config.json").read_text())
            assert again["eagle_aux_hidden_state_layer_ids"] == list(variant.taps)
            assert again["max_position_embeddings"] == 4096 and again["rope_theta"] == foreign.THETA
        if form == "sglang":
            faults = [check for check in verify(out, target, deep=True) if check.status == "fail"]
            assert not faults, faults


def bits_of(tensors):
    return {name: (t.dtype, t.shape, t.contiguous().view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


def any_target(folder, kind, hidden):
    if kind != "nested":
        return make_target(folder, tie_word_embeddings=kind == "tied", hidden_size=hidden)
    make_target(folder, hidden_size=hidden)
    config = json.loads((folder / "config.json").read_text())
    inner = config | {"model_type": "llama"}
    inner.pop("architectures")
    (folder / "config.json").write_text(
        json.dumps(
            {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": inner}
        )
    )
    tensors = load_file(folder / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dialect", WRITERS)
def test_each_form_is_recognised_by_what_it_holds(tmp_path, dialect):
    variant = Variant(fc_norm=dialect == "legacy-specforge", full=dialect == "modelopt-midlayer")
    folder = WRITERS[dialect](tmp_path / "a-name-that-says-nothing", variant)
    target = make_target(tmp_path / "target")
    # TorchSpec's Llama files are in SGLang's own form; only its MLA class has another name.
    names = {"legacy-specforge": "sglang", "modelopt-midlayer": "modelopt", "torchspec": "sglang"}
    assert read_drafter(folder, read_target(target)).dialect == names.get(dialect, dialect)


def test_torchspec_s_latent_drafter_gets_the_class_that_engines_know(tmp_path):
    source = foreign.write_torchspec(tmp_path / "source", Variant(mla=True))
    out = convert(source, make_target(tmp_path / "target"), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and config["kv_lora_rank"] == 32


def test_norm_before_residual_goes_to_vllm_alone(tmp_path):
    target = make_target(tmp_path / "target")
    source = foreign.write_speculators(tmp_path / "source", Variant(norm_before_residual=True))
    with pytest.raises(DraftsmithError, match="SGLang adds the un-normed hidden state"):
        convert(source, target, tmp_path / "out")
    out = convert(source, target, tmp_path / "out", to="vllm")
    assert json.loads((out / "config.json").read_text())["norm_before_residual"] is True
    assert not [c for c in verify(out, target, deep=True) if c.status == "fail"]


def test_a_norm_that_was_trained_is_used_whatever_the_config_says(tmp_path, capsys):
    """The norm over the taps was once dropped in silence: accept length 1.2 instead of 3."""
    target = make_target(tmp_path / "target")
    source = foreign.write_sglang(tmp_path / "source", Variant(norm_before_fc=True))
    edit_config(source, drop=("norm_before_fc",))
    out = convert(source, target, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["norm_before_fc"] is True
    assert "norm_before_fc was not set" in capsys.readouterr().err
    both = foreign.write_sglang(tmp_path / "both", Variant(norm_before_fc=True, fc_norm=True))
    with pytest.raises(DraftsmithError, match="exclude each other"):
        convert(both, target, tmp_path / "never")


# -- layer ids


def ids_of(folder):
    config = json.loads((folder / "config.json").read_text())
    return config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], config["eagle_aux_hidden_state_layer_ids"]


@pytest.mark.parametrize(
    ("convention", "nested", "taps"),
    [(None, [1, 3, 4], [2, 4, 5]), ("layer-output", [1, 3, 4], [2, 4, 5]), ("layer-input", [2, 4, 5], [2, 4, 5]),
     ("sglang-served", [2, 4, 5], [3, 5, 6])],
)  # fmt: skip
def test_layer_ids_are_read_by_a_named_convention(tmp_path, convention, nested, taps):
    target = make_target(tmp_path / "target")
    source = foreign.write_sglang(tmp_path / "source", Variant())
    edit_config(source, eagle_config={"eagle_aux_hidden_state_layer_ids": nested})
    out = convert(source, target, tmp_path / "out", options=ReadOptions.checked(ids_are=convention))
    assert ids_of(out) == ([tap - 1 for tap in taps], taps)


def test_a_last_layer_that_only_the_loss_read_is_left_out(tmp_path):
    """Four ids, but fc was trained for three taps."""
    target = make_target(tmp_path / "target")
    for last in (7, 8):
        source = foreign.write_speculators(tmp_path / f"source{last}", Variant())
        edit_config(source, eagle_aux_hidden_state_layer_ids=[2, 4, 5, last])
        assert ids_of(convert(source, target, tmp_path / f"out{last}")) == ([1, 3, 4], [2, 4, 5])
    edit_config(source, eagle_aux_hidden_state_layer_ids=[2, 3, 4, 5])
    with pytest.raises(DraftsmithError, match="not those that fc was trained for"):
        convert(source, target, tmp_path / "never")


def test_a_drafter_without_layer_ids_gets_the_engines_default_spelt_out(tmp_path):
    target = make_target(tmp_path / "target")
    source = foreign.write_sglang(tmp_path / "source", Variant())
    edit_config(source, drop=("eagle_config",))
    assert ids_of(convert(source, target, tmp_path / "out")) == ([1, 3, 4], [2, 4, 5])
    four = foreign.write_sglang(tmp_path / "four", Variant(taps=(2, 3, 4, 6)))
    edit_config(four, drop=("eagle_config",))
    with pytest.raises(DraftsmithError, match="4 layer ids"):
        convert(four, target, tmp_path / "never")


# -- context and RoPE


def test_a_context_from_a_template_becomes_the_target_s(tmp_path, capsys):
    target = make_target(tmp_path / "target")
    source = foreign.write_safeailab(tmp_path / "source", Variant())
    out = convert(source, target, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 4096
    assert json.loads((out / "draftsmith.json").read_text())["trained_length"] == 2048
    assert "2,048 -> 4,096" in capsys.readouterr().err


def test_the_effective_length_of_a_stretched_target_counts(tmp_path):
    """32768 positions times a linear factor of 4: engines serve 131072."""
    scaling = {"rope_type": "linear", "factor": 4.0}
    target = make_target(tmp_path / "target", max_position_embeddings=32768, rope_scaling=scaling)
    out = convert(foreign.write_sglang(tmp_path / "source", Variant()), target, tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 131072
    assert not [c for c in verify(out, target) if c.status == "fail"]


@pytest.mark.parametrize("own", [1e4, 1e6])
def test_another_base_than_the_target_s_stops_and_shows_both(tmp_path, own):
    target = make_target(tmp_path / "target")
    source = foreign.write_sglang(tmp_path / "source", Variant())
    edit_config(source, rope_theta=own)
    with pytest.raises(DraftsmithError) as caught:
        convert(source, target, tmp_path / "out")
    assert f"{own:g}" in str(caught.value) and "5e+06" in str(caught.value) and "--rope-theta" in str(caught.value)
    out = convert(source, target, tmp_path / "out", options=ReadOptions(rope_theta=own))
    config = json.loads((out / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == own


@pytest.mark.parametrize("where", ["top", "rope_parameters"])
def test_both_spellings_of_the_base_are_read_and_written(tmp_path, where):
    target = make_target(tmp_path / "target")
    source = foreign.write_sglang(tmp_path / "source", Variant())
    if where == "rope_parameters":
        edit_config(source, drop=("rope_theta",), rope_parameters={"rope_type": "default", "rope_theta": 5e6})
    config = json.loads((convert(source, target, tmp_path / "out") / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e6


def test_a_null_kind_of_rope_is_plain_rope(tmp_path):
    source = foreign.write_sglang(tmp_path / "source", Variant())
    edit_config(source, rope_scaling={"type": None})
    config = json.loads(
        (convert(source, make_target(tmp_path / "target"), tmp_path / "out") / "config.json").read_text()
    )
    assert config["rope_scaling"] is None


def test_model_optimizer_s_yarn_is_shown_and_asked_about(tmp_path):
    """It trains on plain RoPE and replaces it by YaRN x32 at export."""
    target = make_target(tmp_path / "target")
    source = foreign.write_modelopt(tmp_path / "source", Variant())
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    edit_config(source, rope_scaling=yarn)
    with pytest.raises(DraftsmithError, match="--rope-scaling none"):
        convert(source, target, tmp_path / "out")
    for word, kept in (("none", None), ("keep", yarn)):
        out = convert(source, target, tmp_path / word, options=ReadOptions.checked(rope_scaling=word))
        assert json.loads((out / "config.json").read_text())["rope_scaling"] == kept


# -- the draft vocabulary


def edited(tmp_path, edit, writer=foreign.write_sglang, variant=None):
    source = writer(tmp_path / "source", variant or Variant())
    edit_tensors(source, edit)
    return source


GOOD = maps_of(Variant())
IDS = draft_ids(Variant())


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t.pop("t2d"),
        lambda t: t.pop("d2t"),
        lambda t: t.update(d2t=t["d2t"].float()),
        lambda t: t.update(d2t=t["d2t"].int()),
        lambda t: t.update(t2d=t["t2d"].to(torch.uint8)),
        lambda t: t.update(d2t=IDS.clone()),  # absolute, which t2d proves
    ],
    ids=["no t2d", "no d2t", "float", "int32", "t2d bytes", "absolute"],
)
def test_a_map_is_mended_where_nothing_is_lost(tmp_path, edit):
    out = convert(edited(tmp_path, edit), make_target(tmp_path / "target"), tmp_path / "out")
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["d2t"], GOOD["d2t"]) and torch.equal(found["t2d"], GOOD["t2d"])
    assert found["d2t"].dtype == torch.int64 and found["t2d"].dtype == torch.bool
    assert torch.equal(found["lm_head.weight"], tensors_of(Variant())["lm_head.weight"])


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: (t.pop("d2t"), t.pop("t2d")), "d2t is missing"),
        (lambda t: t.update(d2t=t["d2t"] + 0.5), "float"),
        (lambda t: t["d2t"].__setitem__(-1, VOCAB), "outside 0..511"),
        (lambda t: t["d2t"].__setitem__(0, -5), "outside 0..511"),
        (lambda t: t["d2t"].__setitem__(1, 0), "2 draft ids to target id 1"),
        (lambda t: t["t2d"].__setitem__(0, True), "disagree"),
        (lambda t: (t.pop("t2d"), t.update(d2t=IDS.clone())), ("--d2t-is absolute", "look")),
        (lambda t: t.update(d2t=t["d2t"][:-1].clone()), "disagree"),
        (lambda t: (t.pop("t2d"), t.update(d2t=t["d2t"][:-1].clone())), "128 rows"),
    ],
)  # fmt: skip
def test_a_map_that_would_need_a_guess_is_refused_by_name(tmp_path, edit, words):
    with pytest.raises(DraftsmithError) as caught:
        convert(edited(tmp_path, edit), make_target(tmp_path / "target"), tmp_path / "out")
    assert all(word in str(caught.value) for word in ([words] if isinstance(words, str) else words)), caught.value
    assert not (tmp_path / "out").exists()


def test_absolute_ids_without_a_proof_are_taken_at_the_user_s_word(tmp_path):
    source = edited(tmp_path, lambda t: (t.pop("t2d"), t.update(d2t=IDS.clone())))
    out = convert(source, make_target(tmp_path / "target"), tmp_path / "out", options=ReadOptions(d2t_is="absolute"))
    assert torch.equal(load_file(out / "model.safetensors")["d2t"], GOOD["d2t"])


def test_a_full_head_is_shrunk_exactly_to_a_given_vocabulary(tmp_path):
    """Rows are those of the target ids, not of the offsets."""
    target = make_target(tmp_path / "target")
    save_file({"d2t": GOOD["d2t"]}, tmp_path / "vocab.safetensors")
    source = foreign.write_sglang(tmp_path / "source", Variant(full=True))
    out = convert(source, target, tmp_path / "out", options=ReadOptions(vocab=tmp_path / "vocab.safetensors"))
    full = tensors_of(Variant(full=True))["lm_head.weight"]
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], full[IDS]) and torch.equal(found["d2t"], GOOD["d2t"])
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == DRAFT
    # The map inside the checkpoint, beside a full head, means the same.
    inside = edited(tmp_path / "inside", lambda t: t.update(d2t=GOOD["d2t"]), variant=Variant(full=True))
    again = load_file(convert(inside, target, tmp_path / "again") / "model.safetensors")
    assert torch.equal(again["lm_head.weight"], full[IDS])


def test_a_null_draft_vocabulary_borrows_the_target_s_head(tmp_path, capsys):
    target = make_target(tmp_path / "target")
    source = edited(tmp_path, lambda t: t.pop("lm_head.weight"), variant=Variant(full=True))
    edit_config(source, draft_vocab_size=None)
    out = convert(source, target, tmp_path / "out")
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], head)
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == VOCAB
    assert "lm_head.weight is absent: the target's" in capsys.readouterr().err.replace("\n", " ")


def test_a_missing_head_is_never_random(tmp_path):
    target = make_target(tmp_path / "target")
    source = edited(tmp_path, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(DraftsmithError, match="--head-from-target"):
        convert(source, target, tmp_path / "out")
    out = convert(source, target, tmp_path / "out", options=ReadOptions(head_from_target=True))
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], head[IDS])


# -- biases and the double norm


def test_biases_follow_the_tensors(tmp_path):
    target = make_target(tmp_path / "target")
    zero = edited(tmp_path / "zero", lambda t: t.update({"fc.bias": torch.zeros(HIDDEN, dtype=torch.bfloat16)}))
    found = load_file(convert(zero, target, tmp_path / "out") / "model.safetensors")
    assert "fc.bias" not in found
    bias = torch.randn(HIDDEN).bfloat16()
    real = edited(tmp_path / "real", lambda t: t.update({"fc.bias": bias}))
    out = convert(real, target, tmp_path / "with")
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["fc.bias"], bias) and not found["midlayer.self_attn.o_proj.bias"].any()
    assert json.loads((out / "config.json").read_text())["bias"] is True
    assert not [check for check in verify(out, target, deep=True) if check.status == "fail"]
    with pytest.raises(DraftsmithError, match="fc has a bias"):
        convert(real, target, tmp_path / "vllm", to="vllm")
    query = edited(tmp_path / "query", lambda t: t.update({"midlayer.self_attn.q_proj.bias": bias}))
    with pytest.raises(DraftsmithError, match="drop in silence"):
        convert(query, target, tmp_path / "never")


def test_model_optimizer_s_double_norm_is_warned_of_and_can_be_folded(tmp_path, capsys):
    target = make_target(tmp_path / "target")
    source = foreign.write_modelopt(tmp_path / "source", Variant())
    convert(source, target, tmp_path / "out")
    assert "--repair-double-norm" in capsys.readouterr().err
    out = convert(source, target, tmp_path / "repaired", options=ReadOptions(repair_double_norm=True))
    weights, found = tensors_of(Variant()), load_file(out / "model.safetensors")
    gamma = weights["midlayer.input_layernorm.weight"].double()
    wanted = weights["midlayer.hidden_norm.weight"].double() * gamma / gamma.pow(2).mean().sqrt()
    assert torch.equal(found["midlayer.hidden_norm.weight"], wanted.float().bfloat16())
    old = foreign.write_modelopt_midlayer(tmp_path / "old", Variant(full=True))
    convert(old, target, tmp_path / "older")
    assert "WARNING" not in capsys.readouterr().err


def test_words_that_options_do_not_know_are_refused():
    for wrong in ({"ids_are": "output"}, {"rope_scaling": "yes"}, {"d2t_is": "ids"}, {"rope_theta": -1.0}):
        with pytest.raises(DraftsmithError):
            ReadOptions.checked(**wrong)
