"""Every fault that an engine would pass over in silence, or stop at without saying why, has a check that names it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import sha256_json
from draftsmith.configs.target import read_target
from draftsmith.convert.launch import sglang_line, vllm_line
from draftsmith.convert.verify import verify, verify_command
from draftsmith.convert.write import convert
from tests.convert.conftest import DRAFT, edit_config, edit_tensors, make_checkpoint, make_target, random_tensors
from tests.convert.test_convert import kimi_drafter


def statuses(checks):
    found = {}
    for check in checks:
        found.setdefault(check.status, []).append(check.name)
    return found


def message(checks, name):
    return " ".join(check.message for check in checks if check.name == name)


def test_what_conversion_wrote_passes_every_check(drafter, target):
    checks = verify(drafter, target, deep=True)
    assert statuses(checks).keys() == {"pass"} and len(checks) == len({check.name for check in checks}) > 30


@pytest.mark.parametrize(
    ("changes", "drop", "name", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, (), "config.architecture", "pick the class by it"),
        ({"model_type": "qwen3"}, (), "config.architecture", "qwen3"),
        ({}, ("head_dim",), "config.fields", "head_dim (engines take hidden_size / num_attention_heads)"),
        ({}, ("rms_norm_eps",), "config.fields", "1e-6"),
        ({"num_hidden_layers": 8}, (), "config.fields", "num_hidden_layers is 8"),
        ({}, ("draft_vocab_size",), "config.draft_vocab_size", "AttributeError"),
        ({"draft_vocab_size": None}, (), "config.draft_vocab_size", "borrows the target's"),
        ({"draft_vocab_size": 600}, (), "config.draft_vocab_size", "600"),
        ({"target_hidden_size": None}, (), "config.target_hidden_size", "TypeError"),
        ({"target_hidden_size": 128}, (), "config.target_hidden_size", "the target has 64"),
        ({"tie_word_embeddings": True}, (), "config.tie_word_embeddings", "drops the trained lm_head"),
        ({"attention_bias": True}, (), "config.bias", "attention_bias"),
        ({"bias": True}, (), "config.bias", "bias"),
        ({"norm_before_residual": True}, (), "config.norm_before_residual", "another network"),
        ({"fc_norm": True}, (), "config.features", "norm with ones"),
        ({"norm_before_fc": True}, (), "config.features", "norm with ones"),
        (
            {"eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
            (),
            "config.features",
            "no taps",
        ),
        ({"num_nextn_predict_layers": 0}, (), "config.num_nextn_predict_layers", "cache budget"),
        ({}, ("dtype", "torch_dtype"), "config.dtype", "float16"),
        ({"quantization_config": {"quant_method": "fp8"}}, (), "config.quantization", "unquantised"),
        ({"vocab_size": 600}, (), "vocab.sizes", "vocab_size 600, expected 512"),
        ({"draft_vocab_size": 64}, (), "vocab.sizes", "rows of lm_head 128, expected 64"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (), "taps.sglang", "[3, 5, 6]"),
        ({}, ("eagle_config",), "taps.width", ""),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (), "taps.vllm-v2", "[1, 3, 4]"),
        ({}, ("eagle_aux_hidden_state_layer_ids",), "taps.vllm-v1", "[1, 3, 4]"),
        ({"num_aux_hidden_states": 4}, (), "taps.width", "4 taps of 64 give 256"),
        ({"rope_theta": 10000.0}, (), "rope.spelling", "two ways"),
        ({}, ("rope_theta", "rope_parameters", "rope_scaling"), "rope.spelling", "10000 in silence"),
        (
            {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            (),
            "rope.frequencies",
            "training used theta 5e+06",
        ),
        ({"max_position_embeddings": 2048}, (), "context.sglang", "greater than the derived context_length (2048)"),
        ({"model_max_length": 1024}, (), "context.sglang", "model_max_length 1,024"),
    ],
)
def test_a_fault_in_the_config_is_named(drafter, target, changes, drop, name, words):
    edit_config(drafter, drop=drop, **changes)
    checks = verify(drafter, target)
    if name == "taps.width" and "eagle_config" in drop:  # ids absent: the default is [2, 4, 5], which is right here
        assert "fail" not in statuses(checks)
        return
    assert name in statuses(checks)["fail"] and words in message(checks, name)
    assert "record.config" in statuses(checks)["warn"]


def swap(tensors, first, second):
    tensors[first], tensors[second] = tensors[second], tensors[first]


@pytest.mark.parametrize(
    ("edit", "name", "words"),
    [
        (lambda t: t.pop("norm.weight"), "tensors.keys", "missing: norm.weight"),
        (lambda t: t.pop("lm_head.weight"), "tensors.keys", "missing: lm_head.weight"),
        (
            lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(32)}),
            "tensors.keys",
            "unknown: midlayer.self_attn.q_norm.weight",
        ),
        (
            lambda t: t.update({f"model.{name}": t.pop(name) for name in list(t) if name != "lm_head.weight"}),
            "tensors.prefix",
            "model.model.",
        ),
        (
            lambda t: t.update({"input_norm.weight": torch.ones(192)}),
            "config.features",
            "input_norm.weight is in the file",
        ),
        (lambda t: t.update({"fc.bias": torch.ones(64)}), "config.bias", "fc.bias"),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"][:, :128]}),
            "tensors.shapes",
            "fc.weight is [64, 128], expected [64, 192]",
        ),
        (lambda t: t.update({"norm.weight": torch.empty(0)}), "tensors.shapes", "no elements: norm.weight"),
        (lambda t: t["d2t"].add_(torch.arange(DRAFT)), "vocab.d2t", "absolute target ids"),
        (lambda t: t["d2t"][-1].fill_(9999), "vocab.d2t", "outside 0..511"),
        (lambda t: t["d2t"].copy_(t["d2t"][[1, 0, *range(2, DRAFT)]]), "vocab.d2t", "must ascend"),
        (lambda t: t.update({"d2t": t["d2t"].float()}), "vocab.d2t", "fractions"),
        (lambda t: t.pop("d2t"), "vocab.d2t", "draft ids for target ids"),
        (lambda t: t["t2d"].copy_(t["t2d"].roll(1)), "vocab.t2d", "disagree"),
        (
            lambda t: t["midlayer.hidden_norm.weight"][0].fill_(float("nan")),
            "tensors.norms",
            "midlayer.hidden_norm.weight",
        ),
    ],
)
def test_a_fault_in_the_tensors_is_named(drafter, target, edit, name, words):
    edit_tensors(drafter, edit)
    checks = verify(drafter, target)
    assert name in statuses(checks)["fail"] and words in message(checks, name)


@pytest.mark.parametrize(
    ("edit", "name", "words"),
    [
        (lambda t: t["fc.weight"].view(-1)[0].fill_(float("inf")), "tensors.values", "NaN or infinity in fc.weight"),
        (lambda t: t["fc.weight"].view(-1)[5].fill_(float("nan")), "tensors.values", "NaN or infinity in fc.weight"),
        (lambda t: t["midlayer.mlp.up_proj.weight"].zero_(), "tensors.values", "midlayer.mlp.up_proj.weight (all 0)"),
        (
            lambda t: t.update({"embed_tokens.weight": torch.zeros(512, 64).bfloat16()}),
            "tensors.embedding",
            "two different drafters",
        ),
        (lambda t: t["fc.weight"].view(-1)[0].add_(1), "record.tensors", "fc.weight"),
    ],
)
def test_deep_reading_finds_what_headers_cannot_tell(drafter, target, edit, name, words):
    edit_tensors(drafter, edit)
    assert name not in statuses(verify(drafter, target)).get("fail", []) or name == "record.tensors"
    checks = verify(drafter, target, deep=True)
    assert name in statuses(checks)["fail"] and words in message(checks, name)


def test_norms_that_are_all_one_are_suspicious(drafter, target):
    edit_tensors(drafter, lambda t: [tensor.fill_(1) for name, tensor in t.items() if "norm" in name])
    assert "tensors.norms" in statuses(verify(drafter, target))["warn"]


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: (10**9).to_bytes(8, "little") + data[8:]])
def test_a_damaged_file_is_a_failed_check(drafter, target, damage):
    file = drafter / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert "tensors.files" in statuses(verify(drafter, target))["fail"]


def test_131072_against_kimi_s_262144_fails_with_sglang_s_reason_and_convert_mends_it(tmp_path):
    target, checkpoint = kimi_drafter(tmp_path)
    out = convert(checkpoint, target, tmp_path / "out")
    assert "fail" not in statuses(verify(out, target, deep=True))
    edit_config(out, max_position_embeddings=131072)
    checks = verify(out, target)
    assert statuses(checks)["fail"] == ["context.sglang", "context.vllm"]
    said = message(checks, "context.sglang")
    assert "Target model's context_length (262144) is greater than the derived context_length (131072)" in said
    assert "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN" in said and "--context-length 131072 or less" in said
    assert "proposes token 0" in message(checks, "context.vllm")
    mend = next(check.mend for check in checks if check.name == "context.sglang")
    assert mend == f"draftsmith convert {out} --target {target} --out {out} --overwrite"
    convert(out, target, out, overwrite=True)
    assert "fail" not in statuses(verify(out, target, deep=True))


def test_serving_far_beyond_the_trained_length_is_worth_a_warning(tmp_path):
    target = make_target(tmp_path / "t", max_position_embeddings=262144)
    out = convert(make_checkpoint(tmp_path / "c", target), target, tmp_path / "out")
    checks = verify(out, target)
    assert "context.trained" in statuses(checks)["warn"] and "trained on at most 2,048" in message(
        checks, "context.trained"
    )


def test_float32_is_warned_of(tmp_path, target, checkpoint):
    out = convert(checkpoint, target, tmp_path / "out", dtype="float32")
    checks = verify(out, target)
    assert statuses(checks)["warn"] == ["config.dtype"] and "float16" in message(checks, "config.dtype")


def test_another_tokenizer_fails_and_another_config_warns(tmp_path, drafter, target):
    (target / "tokenizer.json").write_text('{"other": 1}')
    assert "target.fingerprint" in statuses(verify(drafter, target))["fail"]
    other = make_target(tmp_path / "other", rope_theta=4e6)
    assert "target.fingerprint" in statuses(verify(drafter, other))["warn"]


def store(folder, target, changes=None):
    folder.mkdir()
    manifest = {"taps": [2, 4, 5], "tap_convention": "layer-input", "target": read_target(target).fingerprint()} | (
        changes or {}
    )
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"taps": [1, 3, 4]}, "store.taps"),
        ({"tap_convention": "layer-output"}, "store.taps"),
        ({"target": {"tokenizer": "0" * 64}}, "store.target"),
    ],
)
def test_a_store_that_does_not_fit_fails(tmp_path, drafter, target, changes, name):
    good = store(tmp_path / "good", target)
    assert "fail" not in statuses(verify(drafter, target, store=good))
    assert name in statuses(verify(drafter, target, store=store(tmp_path / "bad", target, changes)))["fail"]


def test_the_store_of_training_is_recognised_by_its_manifest(tmp_path, target):
    harvest = store(tmp_path / "harvest", target)
    checkpoint = make_checkpoint(tmp_path / "c", target)
    described = json.loads((checkpoint / "drafter" / "drafter.json").read_text())
    described["provenance"]["store"]["manifest"] = sha256_json(json.loads((harvest / "manifest.json").read_text()))
    (checkpoint / "drafter" / "drafter.json").write_text(json.dumps(described))
    out = convert(checkpoint, target, tmp_path / "out")
    assert "the very store" in message(verify(out, target, store=harvest), "store.manifest")


def test_a_drafter_as_wide_as_its_taps_would_skip_fc(tmp_path, drafter, target):
    """3 taps of 64 make 192: a drafter of hidden size 192 would never apply fc."""
    edit_config(drafter, hidden_size=192)
    checks = verify(drafter, target)
    assert "SGLang skips fc" in message(checks, "taps.width")


def test_a_full_vocabulary_needs_no_maps(tmp_path, target):
    tensors = random_tensors() | {
        "lm_head.weight": torch.randn(512, 64),
        "d2t": torch.zeros(512, dtype=torch.int64),
        "t2d": torch.ones(512, dtype=torch.bool),
    }
    out = convert(make_checkpoint(tmp_path / "c", target, tensors, draft_vocab_size=512), target, tmp_path / "out")
    assert not {"d2t", "t2d"} & load_file(out / "model.safetensors").keys()
    (out / "draftsmith.json").unlink()
    assert "fail" not in statuses(verify(out, target))
    edit_tensors(out, lambda t: t.update(d2t=tensors["d2t"]))
    found = {check.name: check for check in verify(out, target)}["vocab.d2t"]
    assert found.status == "fail" and "vLLM refuses" in found.message


def test_switches_that_fake_results_are_pointed_out(drafter, target, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    assert "invented accept length" in message(verify(drafter, target), "environment")


def test_launch_lines_carry_the_flags_that_matter(drafter, target, tmp_path):
    line = sglang_line(drafter, read_target(target))
    for words in (
        "--speculative-algorithm EAGLE3", "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        "--speculative-draft-model-quantization unquant",
    ):  # fmt: skip
        assert words in line
    assert "attention-backend" not in line
    kimi = kimi_drafter(tmp_path)[0]
    assert "--speculative-draft-attention-backend" in sglang_line(drafter, read_target(kimi))
    speculative = json.loads(vllm_line(drafter, read_target(target)).split("--speculative-config ")[1].strip("'"))
    assert speculative["method"] == "eagle3" and speculative["num_speculative_tokens"] == 3


def test_json_is_for_other_programs(drafter, target, capsys):
    assert verify_command(drafter, target, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert (
        report["ok"]
        and report["launch"]["sglang"].startswith("python -m sglang")
        and report["checks"][0]["status"] == "pass"
    )
    edit_config(drafter, tie_word_embeddings=True)
    assert not verify_command(drafter, target, as_json=True)
    assert not json.loads(capsys.readouterr().out)["ok"]


def test_the_table_shows_findings_in_brackets_as_they_are(drafter, target, capsys):
    edit_config(drafter, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    assert not verify_command(drafter, target)
    shown = "".join(capsys.readouterr().out.replace("│", "").split())
    assert "feedstaps[1,3,4]" in shown and "mendtaps.vllm-v1:draftsmithconvert" in shown


@pytest.mark.parametrize("strange", ["x", [1], {"factor": "x"}, -1, 10**9])
def test_no_value_in_the_config_breaks_the_verification(drafter, target, strange):
    """Nonsense is a failed check or one clear error, never a traceback, and never passes as what conversion wrote."""
    config = json.loads((drafter / "config.json").read_text())
    for key in config:
        (drafter / "config.json").write_text(json.dumps(config | {key: strange}))
        assert {"warn", "fail"} & statuses(verify(drafter, target)).keys(), key


@pytest.mark.parametrize(
    "damage",
    [
        {"spec": "x"},
        {"taps": {"convention": "layer-output", "layers": [2, 4, 5]}},
        {"taps": {"convention": "layer-input", "layers": [1, 3, 4]}},
        {"tensors": []},
    ],
)
def test_a_damaged_record_stops_by_name(drafter, target, damage):
    record = json.loads((drafter / "draftsmith.json").read_text())
    (drafter / "draftsmith.json").write_text(json.dumps(record | damage))
    with pytest.raises(DraftsmithError, match=r"(?s)record is damaged.*draftsmith\.json"):
        verify(drafter, target)


def test_a_folder_that_was_never_converted_says_what_to_do(checkpoint, target):
    with pytest.raises(DraftsmithError, match="convert a training checkpoint first"):
        verify(checkpoint / "drafter", target)


def test_verify_and_convert_start_without_the_heavy_libraries():
    code = (
        "import sys, draftsmith.convert.verify, draftsmith.convert.write, draftsmith.convert.export\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'deepspeed', 'safetensors'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_head_cut_at_the_bare_offsets_is_found(tmp_path, target):
    """Rows of the target at d2t instead of at arange + d2t: every shape is right, and every token another."""
    head = load_file(target / "model.safetensors")["lm_head.weight"].float()
    for name, rows in (("right", lambda d2t: d2t + torch.arange(DRAFT)), ("wrong", lambda d2t: d2t)):
        tensors = random_tensors()
        tensors["lm_head.weight"] = head[rows(tensors["d2t"])] + 0.01
        out = convert(
            make_checkpoint(tmp_path / name / "checkpoint-1", target, tensors), target, tmp_path / f"{name}-out"
        )
        check = next(c for c in verify(out, target, deep=True) if c.name == "tensors.head_rows")
        assert (check.status == "fail") == (name == "wrong"), check
