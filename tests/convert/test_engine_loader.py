"""Finding and asking an engine, without one: each test's Python is a small script."""

from __future__ import annotations

import sys

import pytest

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import read_target
from draftsmith.convert.engine_loader import engine_checks, find_python, parse_engines, parse_pythons


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    for name in ("DRAFTSMITH_SGLANG_PYTHON", "DRAFTSMITH_VLLM_PYTHON", "DRAFTSMITH_VENVS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def make_python(path, text="#!/bin/sh\nexit 0\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_options_value_wins_over_the_variable_and_the_variable_over_folders(tmp_path, monkeypatch):
    here = make_python(tmp_path / "here" / ".venvs" / "sglang" / "bin" / "python")
    assert find_python("sglang")[0] == here
    venvs = make_python(tmp_path / "venvs" / "sglang" / "bin" / "python")
    monkeypatch.setenv("DRAFTSMITH_VENVS", str(tmp_path / "venvs"))
    assert find_python("sglang")[0] == venvs
    named = make_python(tmp_path / "named")
    monkeypatch.setenv("DRAFTSMITH_SGLANG_PYTHON", str(named))
    assert find_python("sglang")[0] == named
    given = make_python(tmp_path / "given" / "bin" / "python")
    assert find_python("sglang", tmp_path / "given")[0] == given


def test_an_interpreter_that_is_a_link_is_not_followed_out_of_its_environment(tmp_path):
    link = tmp_path / "venv" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to(sys.executable)
    assert find_python("vllm", tmp_path / "venv")[0] == link


def test_without_an_engine_the_check_fails_and_names_the_builder(drafter, target, tmp_path):
    (check,) = engine_checks(drafter, read_target(target), "vllm", python=tmp_path / "none")
    assert (check.name, check.status) == ("engine.vllm.load", "fail")
    assert str(tmp_path / "none") in check.message
    assert "scripts/setup_engine.sh vllm" in check.mend


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/sh\necho No module named sglang >&2\nexit 1\n", "No module named sglang"),
        ("#!/bin/sh\nexec sleep 60\n", "no answer within 1 seconds"),
        ("#!/no/such/interpreter\n", "does not start"),
    ],
)
def test_a_python_that_gives_no_report_is_told_from_a_bad_drafter(drafter, target, tmp_path, text, said):
    python = make_python(tmp_path / "python", text)
    (check,) = engine_checks(drafter, read_target(target), "sglang", python=python, limit=1)
    assert check.status == "fail"
    assert "could not be asked" in check.message
    assert said in check.message


def test_engines_by_name():
    assert parse_engines([]) == ()
    assert parse_engines(["vllm", "sglang", "vllm"]) == ("sglang", "vllm")
    assert parse_engines(["both"]) == ("sglang", "vllm")
    with pytest.raises(DraftsmithError, match="no such engine"):
        parse_engines(["tensorrt"])


def test_pythons_by_engine(tmp_path):
    assert parse_pythons([str(tmp_path)], ("vllm",)) == {"vllm": tmp_path}
    both = parse_pythons([f"sglang={tmp_path}/a", f"vllm={tmp_path}/b"], ("sglang", "vllm"))
    assert both == {"sglang": tmp_path / "a", "vllm": tmp_path / "b"}
    for engines in ((), ("sglang", "vllm")):
        with pytest.raises(DraftsmithError, match="which engine"):
            parse_pythons([str(tmp_path)], engines)
