"""A run configuration is strict: what is unknown or wrong is refused by name, with the nearest right key."""

from __future__ import annotations

import pytest

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import load_config, preset_names


def test_every_preset_is_valid():
    assert set(preset_names()) >= {"smollm2-135m", "qwen3-8b", "llama-3.1-8b", "kimi-k2.5", "demo"}
    for name in preset_names():
        assert load_config(name).name


def test_overrides_win_over_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("name: a\ntarget: {path: t}\ntrain: {epochs: 7}\n")
    config = load_config(file, ["train.epochs=3", "target.taps=[1, 2, 5]", "synthesize.temperature=0.5"])
    assert (config.train.epochs, config.target.taps, config.synthesize.temperature) == (3, (1, 2, 5), 0.5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.epoch=3", ["train.epoch", "did you mean epochs?"]),
        ("trian.epochs=3", ["trian", "did you mean train?"]),
        ("train.epochs=many", ["train.epochs", "'many'"]),
        ("train.epochs=0", ["train.epochs", "greater than 0"]),
        ("train.epochs", ["section.key=value"]),
        ("train.betas=[0.9, 1]", ["train.betas.1", "less than 1"]),
        ("train.learning_rate=.inf", ["train.learning_rate", "finite"]),
        ("name.x=1", ["below a plain value"]),
        ("name=../../elsewhere", ["name"]),
        ("train.learning_rate=[", ["not valid YAML"]),
    ],
)
def test_a_bad_override_is_refused_by_name(tmp_path, override, words):
    file = tmp_path / "run.yaml"
    file.write_text("name: a\ntarget: {path: t}\n")
    with pytest.raises(DraftsmithError) as error:
        load_config(file, [override])
    for word in words:
        assert word in str(error.value)


def test_a_missing_file_names_the_presets(tmp_path):
    with pytest.raises(DraftsmithError, match="smollm2-135m"):
        load_config(tmp_path / "none.yaml")


def test_a_file_that_is_no_mapping_is_refused(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("- a\n- b\n")
    with pytest.raises(DraftsmithError, match="no mapping"):
        load_config(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe\x00", "cannot be read"), (b"name: a\ntarget: {path: t}\n1: 2\n", "1: ")],
)
def test_nonsense_in_a_file_is_refused(tmp_path, content, words):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(DraftsmithError, match=words):
        load_config(file)


def test_an_override_fills_a_section_that_the_file_leaves_empty(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("name: a\ntarget: {path: t}\ntrain:\n")
    assert load_config(file, ["train.epochs=3"]).train.epochs == 3


def test_a_missing_required_key_is_named(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("name: a\n")
    with pytest.raises(DraftsmithError, match="target: missing"):
        load_config(file)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config("demo", ["runs=~/runs", "target.path=~/target"])
    assert (config.runs, config.target.path) == (tmp_path / "runs", tmp_path / "target")


def test_several_greedy_answers_to_one_prompt_are_refused():
    with pytest.raises(DraftsmithError, match="answers=1, or a temperature"):
        load_config("demo", ["synthesize.answers=2"])


def test_a_section_that_stands_twice_is_refused(tmp_path):
    """YAML readers forget the first of them."""
    file = tmp_path / "run.yaml"
    file.write_text("name: x\ntarget: {path: t}\nharvest: {codec: fp8}\nharvest: {workers: 2}\n")
    with pytest.raises(DraftsmithError, match="'harvest' stands twice"):
        load_config(file)
    file.write_text("name: x\ntarget: " + "[" * 5000)
    with pytest.raises(DraftsmithError, match="not valid YAML"):
        load_config(file)
