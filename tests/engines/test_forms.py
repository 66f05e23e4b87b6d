"""Every form of drafter, loaded and run by both engines' own classes: who reads what, who drops what, who agrees with us.

One audit an engine takes all the folders, since importing an engine costs more than a drafter.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import handmade
import pytest
import torch
from handmade import ABSENT, DRAFT, HIDDEN, LATENT, VOCAB, YARN, make_spec
from safetensors.torch import load_file, save_file

from draftsmith.configs.drafter import DrafterSpec, RopeSpec
from draftsmith.configs.target import read_target
from draftsmith.convert.engine_forward import compare
from draftsmith.convert.engine_loader import ENGINES, TOLERANCE, report_checks
from draftsmith.train.model import Drafter

pytestmark = pytest.mark.engine

SPEC = make_spec()
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
QKV_BIAS = {f"midlayer.self_attn.{part}_proj.bias": torch.randn(rows) for part, rows in (("q", 96), ("k", 48), ("v", 48))}  # fmt: skip
O_BIAS = {"midlayer.self_attn.o_proj.bias": torch.zeros(HIDDEN)}
WHOLE = make_spec(draft_vocab_size=VOCAB)
IDS = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
UNREAD, UNWRITTEN = "ignores this tensor", "are in no tensor of the checkpoint"


@dataclass(frozen=True)
class Form:
    """A drafter, and what each engine makes of it.

    Attributes:
        faults: for each engine the pieces of text of which each names one fault, none: a good drafter.
        agrees: whether the engine computes what `spec` says; None: its forward does not run.
    """

    spec: DrafterSpec = SPEC
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    sglang: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()
    agrees: tuple[bool | None, bool | None] = (True, True)


QKV_UNREAD = tuple(f"self_attn.{part}_proj.bias: SGLang {UNREAD}" for part in "qkv")
FORMS = {
    "eagle3": Form(),
    "yarn": Form(make_spec(rope=RopeSpec(theta=50000.0, scaling=YARN))),
    "llama3": Form(make_spec(rope=RopeSpec(theta=50000.0, scaling=LLAMA3))),
    "norm_before_fc": Form(make_spec(norm_before_fc=True)),
    "norm_before_fc_nested": Form(
        make_spec(norm_before_fc=True), config={"norm_before_fc": ABSENT, "eagle_config": IDS | {"norm_before_fc": True}}
    ),
    "norm_before_fc_unflagged": Form(
        extra={"input_norm.weight": torch.ones(3 * HIDDEN)},
        sglang=(f"input_norm.weight: SGLang {UNREAD}",),
        vllm=(f"input_norm.weight: vLLM {UNREAD}",),
    ),
    "norm_before_residual": Form(make_spec(norm_before_residual=True), agrees=(False, True)),
    "norm_output": Form(make_spec(norm_output=True)),
    "fc_norm": Form(make_spec(fc_norm=True)),
    "eagle3.1": Form(make_spec(fc_norm=True, norm_output=True)),
    "one_tap_of_another_width": Form(make_spec(taps=(4,), hidden_size=48)),
    "four_taps": Form(make_spec(taps=(1, 2, 4, 5))),
    "narrower_than_its_target": Form(make_spec(hidden_size=48)),
    "fc_bias": Form(
        make_spec(fc_bias=True),
        sglang=(f"o_proj.bias: 64 of 64 elements {UNWRITTEN}",),
        vllm=(f"fc.bias: vLLM {UNREAD}", f"o_proj.bias: 64 of 64 elements {UNWRITTEN}"),
        agrees=(None, None),
    ),
    "fc_bias_and_zero_o_proj_bias": Form(
        make_spec(fc_bias=True), extra=O_BIAS, vllm=(f"fc.bias: vLLM {UNREAD}",), agrees=(True, False)
    ),
    "fc_bias_unflagged": Form(
        extra={"fc.bias": torch.ones(HIDDEN)},
        sglang=(f"fc.bias: SGLang {UNREAD}",),
        vllm=(f"fc.bias: vLLM {UNREAD}",),
    ),
    "attention_bias": Form(
        extra=QKV_BIAS | O_BIAS, config={"attention_bias": True}, sglang=QKV_UNREAD, agrees=(True, False)
    ),
    "attention_bias_of_o_proj_alone": Form(
        extra=O_BIAS,
        config={"attention_bias": True},
        vllm=(f"qkv_proj.bias: 192 of 192 elements {UNWRITTEN}",),
        agrees=(True, None),
    ),
    "whole_vocabulary": Form(WHOLE),
    "whole_vocabulary_with_d2t": Form(
        WHOLE,
        extra={"d2t": torch.zeros(VOCAB, dtype=torch.int64)},
        vllm=("no module or parameter named 'draft_id_to_target_id'",),
        agrees=(True, None),
    ),
    "targets_head": Form(WHOLE, without=("lm_head.weight",), config={"draft_vocab_size": None}),
    "null_vocabulary_with_own_head": Form(WHOLE, config={"draft_vocab_size": None}, agrees=(False, True)),
    "mla": Form(make_spec(mla=LATENT)),
    "mla_yarn": Form(make_spec(mla=LATENT, rope=RopeSpec(theta=50000.0, scaling=YARN))),
    "mla_eagle3.1_four_taps": Form(make_spec(mla=LATENT, fc_norm=True, norm_output=True, taps=(1, 2, 4, 5))),
    "mla_halves": Form(
        make_spec(mla=LATENT.model_copy(update={"rope_interleave": False})), agrees=(True, False)
    ),
    "mla_of_model_type_deepseek_v3": Form(
        make_spec(mla=LATENT),
        config={"model_type": "deepseek_v3"},
        vllm=("Eagle3DeepSeekMTPModel",),
        agrees=(True, None),
    ),
    "mla_without_q_a_proj": Form(
        make_spec(mla=LATENT),
        without=("midlayer.self_attn.q_a_proj.weight",),
        sglang=(
            f"kv_a_proj_with_mqa.weight: SGLang {UNREAD}",
            f"fused_qkv_a_proj_with_mqa.weight: 11264 of 11264 elements {UNWRITTEN}",
        ),
        vllm=("fused_qkv_a_proj.weight: 6144 of 11264 elements",),
        agrees=(None, None),
    ),
}  # fmt: skip
CONVERTED = {
    "good": {},
    "norm_output": {"norm_output": True},
    "fc_norm_dropped": {"fc_norm": ABSENT},
    "two_taps": {"num_aux_hidden_states": 2, "eagle_config": IDS | {"eagle_aux_hidden_state_layer_ids": [1, 4]}},
    "theta": {
        "rope_theta": 10000.0, "rope_scaling": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "short": {"max_position_embeddings": 1024},
}  # fmt: skip
"""Edits of the config.json of a converted EAGLE-3.1 drafter, whose record still says what training was."""


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """A target, all forms, and the converted drafter with its edits."""
    room = tmp_path_factory.mktemp("forms")
    handmade.make_target(room / "target")
    for name, form in FORMS.items():
        tensors = {key: value for key, value in _tensors(form).items() if key not in form.without}
        handmade.write(room / name, form.spec, tensors, **form.config)
    spec = make_spec(fc_norm=True)
    checkpoint = room / "checkpoint" / "drafter"
    checkpoint.mkdir(parents=True)
    save_file(handmade.random_tensors(spec), checkpoint / "model.safetensors")
    described = {"schema": 1, "spec": spec.model_dump(mode="json"), "provenance": {}}
    (checkpoint / "drafter.json").write_text(json.dumps(described))
    (checkpoint.parent / "trainer.json").write_text("{}")
    done = _draftsmith("convert", checkpoint.parent, "--target", room / "target", "--out", room / "converted-good")
    assert done.returncode == 0, done.stderr
    for name, edits in CONVERTED.items():
        if name != "good":
            shutil.copytree(room / "converted-good", room / f"converted-{name}")
        file = room / f"converted-{name}" / "config.json"
        config = json.loads(file.read_text()) | edits
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not ABSENT}))
    return room


def _tensors(form: Form) -> dict[str, torch.Tensor]:
    return handmade.random_tensors(form.spec) | form.extra


def _draftsmith(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "draftsmith", *map(str, arguments)], capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def answers(room, script) -> dict[str, dict[str, Any]]:
    """engine -> {"version", "reports": by folder name}."""
    folders = [room / name for name in FORMS] + [room / f"converted-{name}" for name in CONVERTED]
    answers = {}
    for engine in ENGINES:
        out = room / f"{engine}.json"
        done = script(
            f"audit_{engine}.sh", "--target", room / "target", "--out", out, "--forward", "--drafter", *folders
        )
        assert done.returncode == 1, done.stdout + done.stderr  # some of them have faults
        answers[engine] = json.loads(out.read_text())
        answers[engine]["reports"] = {Path(report["drafter"]).name: report for report in answers[engine]["reports"]}
    return answers


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FORMS)
def test_what_an_engine_loads_and_drops(answers, name, engine):
    faults, expected = answers[engine]["reports"][name]["faults"], getattr(FORMS[name], engine)
    assert len(faults) == len(expected), faults
    for piece in expected:
        assert any(piece in fault for fault in faults), faults


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FORMS)
def test_whose_forward_is_ours(answers, room, name, engine):
    form, report = FORMS[name], answers[engine]["reports"][name]
    agrees = form.agrees[ENGINES.index(engine)]
    assert "forward_error" not in report
    assert ("golden" in report) == (agrees is not None)
    if agrees is not None:
        worst = max(difference.relative for difference in compare(_ours(form, room), load_file(report["golden"])))
        assert worst < 1e-5 if agrees else worst > 100 * TOLERANCE, worst  # float32 sums in another order


def _ours(form: Form, room: Path, swapped: bool = False) -> Drafter:
    """Our forward of a form; `swapped`: with embedding and hidden state in the wrong order before attention."""
    target = load_file(room / "target" / "model.safetensors")
    tensors = _tensors(form)
    if "lm_head.weight" in form.without:
        tensors["lm_head.weight"] = target["lm_head.weight"]
    if swapped:
        for part in "qkv":
            name = f"midlayer.self_attn.{part}_proj.weight"
            tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)
    drafter = Drafter(form.spec, tensors.get("embed_tokens.weight", target["model.embed_tokens.weight"]))
    drafter.load_state_dict({name: tensors[name] for name in form.spec.trainable_shapes()})
    return drafter


@pytest.mark.parametrize("engine", ENGINES)
def test_embedding_and_hidden_state_in_the_wrong_order_are_seen_from_the_prefill_on(answers, room, engine):
    golden = load_file(answers[engine]["reports"]["eagle3"]["golden"])
    assert all(difference.relative > TOLERANCE for difference in compare(_ours(FORMS["eagle3"], room, True), golden))


def test_the_minimal_config_of_a_latent_drafter_is_read_by_both(answers):
    """kimi_k2 without a field of the experts; deepseek_v3, which vLLM takes for a multi-token predictor, is not."""
    config = handmade.config_of(FORMS["mla"].spec)
    assert config["model_type"] == "kimi_k2"
    assert not {"n_routed_experts", "first_k_dense_replace", "head_dim", "attention_bias"} & config.keys()
    classes = {engine: answers[engine]["reports"]["mla"]["config"]["class"] for engine in ENGINES}
    assert classes == {
        "sglang": "sglang.srt.models.kimi_k25_eagle3.Eagle3DeepseekV2ForCausalLM",
        "vllm": "vllm.model_executor.models.deepseek_eagle3.Eagle3DeepseekV2ForCausalLM",
    }
    assert all(answers[engine]["reports"]["mla"]["config"]["context_length"] == handmade.CONTEXT for engine in ENGINES)


def _checks(answers, room: Path, engine: str, name: str) -> dict[str, Any]:
    folder, answer = room / f"converted-{name}", answers[engine]
    report = answer["reports"][folder.name]
    checks = report_checks(engine, answer["version"], report, folder, read_target(room / "target"))
    return {check.name.removeprefix(f"engine.{engine}."): check for check in checks}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_converted_drafter_passes(answers, room, engine):
    checks = _checks(answers, room, engine, "good")
    assert {name: check.status for name, check in checks.items()} == dict.fromkeys(
        ("load", "context", "forward"), "pass"
    )
    assert f"{DRAFT} draft ids of {VOCAB}" in checks["load"].message
    assert "3 recurrent drafts" in checks["forward"].message


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "load", "forward"),
    [
        ("norm_output", None, "recurrent step 1 on|prefill on: hidden"),
        ("theta", None, "prefill on: logits"),
        ("fc_norm_dropped", "fc_norm", "prefill on: logits"),
        ("two_taps", "refuses it", None),
    ],
)
def test_a_config_that_describes_another_network_fails_by_step_and_size(answers, room, engine, name, load, forward):
    checks = _checks(answers, room, engine, name)
    assert checks["load"].status == ("fail" if load else "pass")
    assert load is None or load in checks["load"].message
    if forward and "forward" in checks:
        assert checks["forward"].status == "fail"
        assert any(part in checks["forward"].message for part in forward.split("|"))
        assert "% of the largest" in checks["forward"].message
        assert "draftsmith.json" in checks["forward"].mend
    else:  # vLLM refuses tensors that no module of the class has
        assert checks["load"].status == "fail"
        assert forward is None or (engine, name) == ("vllm", "fc_norm_dropped")


def test_a_short_context_fails_for_sglang_and_warns_for_vllm(answers, room):
    found = {engine: _checks(answers, room, engine, "short")["context"] for engine in ENGINES}
    assert {engine: check.status for engine, check in found.items()} == {"sglang": "fail", "vllm": "warn"}
    assert all("1,024" in check.message and "2,048" in check.message for check in found.values())


def test_the_command_asks_both_engines(room):
    done = _draftsmith("verify", room / "converted-good", "--target", room / "target", "--engine", "both", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    for engine in ENGINES:
        for part in ("load", "context", "forward"):
            assert checks[f"engine.{engine}.{part}"]["status"] == "pass", checks
