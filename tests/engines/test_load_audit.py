"""The engines' own loaders say what they make of a drafter, and SGLang's own class agrees with our forward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from copycat import edit_checkpoint, unroll
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def drafters(workbench) -> list[Path]:
    """Faulty copies of the good drafter, named for their fault, and the good one last."""
    good = workbench.checkpoint
    tensors = load_file(good / "model.safetensors")
    absolute = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    variants = {
        "misspelt": ({"midlayer.mlp.up_proj.weight": "midlayer.mlp.upp_proj.weight"}, set(), {}),
        "no_head": ({}, {"lm_head.weight"}, {}),
        "no_fc": ({}, {"fc.weight"}, {}),
        "no_d2t": ({}, {"d2t"}, {}),
        "absolute_d2t": ({}, set(), {"d2t": absolute}),
        "narrow_fc": ({}, set(), {"fc.weight": tensors["fc.weight"][:, :10].contiguous()}),
    }
    folder = workbench.folder / "audit"
    return [edit_checkpoint(good, folder / name, *edits) for name, edits in variants.items()] + [good]


def _reports(out: Path) -> dict[str, dict]:
    return {Path(report["drafter"]).name: report for report in json.loads(out.read_text())["reports"]}


@pytest.fixture(scope="module")
def audit(workbench, target_folder, drafters, script) -> dict[str, dict]:
    """SGLang's reports by name, and the golden run of the good drafter; one process audits all of them."""
    folder, ids = workbench.folder / "audit", workbench.conversations["hash"].ids
    features = workbench.target.features(ids)
    save_file({"features": features[:40].contiguous(), "token_ids": ids[1:43].contiguous()}, folder / "in.safetensors")
    out = folder / "sglang.json"
    done = script(
        "audit_sglang.sh",
        *("--target", target_folder, "--out", out, "--golden", folder / "in.safetensors", "--drafter", *drafters),
    )
    assert done.returncode == 1, done.stderr  # some of them have faults
    return {**_reports(out), "golden": load_file(folder / "sglang.golden.safetensors")}


@pytest.fixture(scope="module")
def vllm_audit(workbench, target_folder, drafters, script) -> dict[str, dict]:
    out = workbench.folder / "audit" / "vllm.json"
    done = script("audit_vllm.sh", "--target", target_folder, "--out", out, "--drafter", *drafters)
    assert done.returncode == 1, done.stderr
    return _reports(out)


def test_every_tensor_of_a_good_drafter_is_read_and_every_parameter_written(audit):
    report = audit["drafter"]
    assert report["faults"] == []
    assert report["never_written"] == {}
    assert [key for key, written in report["keys"].items() if not written] == ["t2d"]
    assert report["keys"]["d2t"] == ["<hot_token_id>"]


def test_the_engine_picks_its_eagle3_class_and_the_configured_context(audit, workbench):
    config = audit["drafter"]["config"]
    assert config["class"] == "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3"
    assert config["context_length"] == workbench.target.config.max_position_embeddings


@pytest.mark.parametrize(
    ("variant", "name", "reason"),
    [
        ("misspelt", "midlayer.mlp.upp_proj.weight", "ignores this tensor"),
        ("misspelt", "model.layers.0.mlp.gate_up_proj.weight", "884736 of 1769472"),
        ("no_head", "lm_head.weight", "left uninitialised"),
        ("no_fc", "model.fc.weight", "left uninitialised"),
        ("no_d2t", "d2t", "absent"),
        ("absolute_d2t", "d2t", "absolute ids?"),
        ("narrow_fc", "AssertionError", "SGLang refuses it"),
    ],
)
def test_a_fault_that_the_engine_swallows_is_named(audit, variant, name, reason):
    assert any(name in fault and reason in fault for fault in audit[variant]["faults"]), audit[variant]["faults"]


@pytest.mark.parametrize(
    ("variant", "name", "reason"),
    [
        ("misspelt", "upp_proj", "vLLM refuses it"),
        ("no_head", "lm_head.weight", "left as they were"),
        ("no_fc", "model.fc.weight", "left as they were"),
        ("no_d2t", "draft_id_to_target_id", "left as they were"),
        ("absolute_d2t", "d2t", "absolute ids?"),
        ("narrow_fc", "AssertionError", "vLLM refuses it"),
    ],
)
def test_vllm_names_the_same_faults(vllm_audit, variant, name, reason):
    assert vllm_audit["drafter"]["faults"] == []
    assert any(name in fault and reason in fault for fault in vllm_audit[variant]["faults"]), vllm_audit[variant]


def test_our_forward_agrees_with_the_engines_class_over_three_draft_steps(audit, workbench):
    golden, ids = audit["golden"], workbench.conversations["hash"].ids[:43]
    z, h = unroll(
        workbench.drafter.weights,
        workbench.target.config,
        workbench.target.model.get_input_embeddings().weight,
        workbench.target.features(workbench.conversations["hash"].ids)[:43],
        ids,
        3,
    )
    logits = z @ workbench.drafter.weights["lm_head.weight"].float().T
    for ours, theirs in (
        (logits[:, -1], golden["logits"]),
        (h[:, -1], golden["hidden"]),
        (h[0], golden["prefill_hidden"]),
    ):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
