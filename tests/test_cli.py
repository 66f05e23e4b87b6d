"""Every verb turns a fault into one message that says what is wrong and how to mend it, exit code not 0, nothing written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from draftsmith.cli import main

FACTS = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "torch_dtype": "float32",
}  # fmt: skip

CONFIG_VERBS = ["plan", "synthesize", "inspect", "vocab", "harvest", "train", "evaluate"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Call the command line in an empty folder; gives (exit code, standard error, files that appeared)."""
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(FACTS))
    (tmp_path / "run.yaml").write_text(json.dumps({"name": "r", "target": {"path": "target"}}))

    def call(*arguments):
        before = set(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["draftsmith", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err, set(tmp_path.rglob("*")) - before

    return call


@pytest.mark.parametrize("verb", CONFIG_VERBS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.yaml"], ["none.yaml", "smollm2-135m"]),
        (["run.yaml", "train.epoch=3"], ["train.epoch", "did you mean epochs?"]),
        (["run.yaml", "target.path=nowhere"], ["nowhere", "make_smollm2.py"]),
    ],
    ids=["missing configuration", "unknown key", "missing target"],
)
def test_a_fault_of_the_configuration(run, verb, arguments, words):
    code, message, appeared = run(verb, *arguments)
    assert code == 2 and message.startswith("error ") and not appeared, (code, message, appeared)
    assert any(word in message for word in words), message


@pytest.mark.parametrize(
    ("verb", "mend"),
    [
        ("vocab", "draftsmith synthesize"),
        ("harvest", "draftsmith synthesize"),
        ("train", "draftsmith harvest"),
        ("evaluate", "draftsmith harvest"),
    ],
)
def test_a_verb_without_its_input_names_the_verb_that_makes_it(run, verb, mend):
    code, message, appeared = run(verb, "run.yaml")
    assert code == 2 and mend in message and not appeared, message


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "nothing", "--target", "target", "--out", "out"],
        ["convert", "target", "--target", "nowhere", "--out", "out"],
        ["export", "nothing", "out", "--target", "target"],
        ["verify", "nothing", "--target", "target"],
        ["verify", "target", "--target", "nowhere"],
    ],
    ids=" ".join,
)
def test_missing_folders(run, arguments):
    code, message, appeared = run(*arguments)
    assert code in (1, 2) and ("nothing" in message or "nowhere" in message) and not appeared, message


def test_a_split_that_does_not_exist(run):
    code, message, _ = run("harvest", "run.yaml", "--split", "test")
    assert code == 2 and "train, heldout, both" in message


def test_the_launchers_entry_point_refuses_alike(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "draftsmith.train", "--config", str(tmp_path / "none.yaml")],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and result.stderr.startswith("error ") and "none.yaml" in result.stderr


def test_verify_and_help_start_without_the_training_stack():
    """Seconds count for a person with a crashing server: no torch, accelerate, DeepSpeed or transformers at start."""
    probe = "import sys, draftsmith.cli, draftsmith.convert.verify; print([m for m in ('torch', 'accelerate', 'deepspeed', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert (
        shutil.which("draftsmith") is None
        or subprocess.run(["draftsmith", "--help"], capture_output=True).returncode == 0
    )
