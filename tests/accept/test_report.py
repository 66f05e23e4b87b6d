"""Pages hold everything they show, and say what the JSON says."""

from __future__ import annotations

import base64
import json
import re

import pytest

from draftsmith.accept.evaluate import evaluate
from draftsmith.accept.report import write_served
from draftsmith.accept.serve_check import conclude, show
from tests.accept.test_compare import compare, request, served


@pytest.fixture
def outcome(tmp_path):
    """A served result beside a prediction, and its JSON file."""
    requests = [request("a", 5, 10)]
    outputs = [{"id": "a", "output_ids": [0, 1, 2, 3, 4], "histogram": [1, 0, 1]}]
    spec = served(outputs, [0.5, 0.5], 2) | {"tokens_per_second": 30.0}

    def make(predicted, identical=True, dtype="float32", without=20.0):
        result = {
            "version": "1", "dtype": dtype, "identical": identical, "spec": spec,
            "base": {"tokens_per_second": without}, "first_divergence": [] if identical else [{"id": "a"}],
        }  # fmt: skip
        return conclude("vllm", tmp_path, result, compare({"a": predicted}, requests, spec, 2), requests)

    return make


def test_an_evaluation_leaves_a_picture_and_a_page(trained):
    file = evaluate(trained)
    content = json.loads(file.read_text())
    assert file.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    page = file.with_suffix(".html").read_text()
    assert f"{content['as_served']['accept_length']:.3f}" in page and "context 0-1024" in page
    assert page.count("<tr>") > 8 + len(content["by_category"])
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(picture) == file.with_suffix(".png").read_bytes()
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_the_verdict_follows_from_answers_and_counters(outcome):
    assert outcome([0, 2]).good
    wrong = outcome([0, 0])
    assert not wrong.good and "differ, by -100.0% at most" in wrong.verdict
    changed = outcome([0, 2], identical=False)
    assert not changed.good and "1 of 1 answers differ" in changed.verdict
    assert outcome([0, 2], identical=False, dtype="bfloat16").good  # near-ties round otherwise there


def test_a_served_page_has_both_numbers_and_the_break_even(outcome, tmp_path):
    found = outcome([0, 2]).model_copy(update={"causes": ["taps -1: <trained> elsewhere"]})
    png, html = write_served(found.model_dump(mode="json"), tmp_path / "serve-check-vllm.json", None)
    page = html.read_text()
    assert png.read_bytes()[:4] == b"\x89PNG" and "accept_length@2" in page
    assert "pays from an accept length of about 1.33" in page  # 2.0 tokens a step at 1.5 times the speed
    assert "likely cause: taps -1: &lt;trained&gt; elsewhere" in page


def test_nothing_accepted_is_finite_on_the_page_and_in_the_table(tmp_path, capsys):
    requests = [request("a", 5, 10)]
    spec = served([{"id": "a", "output_ids": [0, 1, 2, 3, 4]}], [0.0, 0.0], 250) | {"tokens_per_second": 10.9}
    result = {
        "version": "1", "dtype": None, "identical": None, "spec": spec, "base": None, "first_divergence": [],
    }  # fmt: skip
    found = conclude("vllm", tmp_path, result, compare({"a": [1] * 250}, requests, spec, 2), requests)
    _, html = write_served(found.model_dump(mode="json"), tmp_path / "serve-check-vllm.json", None)
    show(found)
    page, said = html.read_text(), capsys.readouterr().out
    assert "none served" in page and "none served" in said
    assert "never right as served, in 100.0%" in found.verdict and "inf%" not in page + said


@pytest.mark.parametrize("predicted", [[0, 0], [1, 1]])
def test_a_drafter_that_drafts_nothing_right_is_never_good(tmp_path, capsys, predicted):
    """Served 1.004 as predicted, and slower than without: agreement alone is no success."""
    requests = [request("a", 5, 10)]
    spec = served([{"id": "a", "output_ids": [0, 1, 2, 3, 4]}], [0.004, 0.0], 250) | {"tokens_per_second": 10.9}
    result = {
        "version": "1", "dtype": "float32", "identical": True, "spec": spec, "base": {"tokens_per_second": 16.4},
        "first_divergence": [],
    }  # fmt: skip
    found = conclude("vllm", tmp_path, result, compare({"a": predicted * 125}, requests, spec, 2), requests)
    assert not found.good and "nothing that is right" in found.verdict
    assert found.verdict.startswith("served as predicted") is (predicted == [0, 0])
    _, html = write_served(found.model_dump(mode="json"), tmp_path / "serve-check-vllm.json", None)
    show(found)
    page, said = html.read_text(), " ".join(capsys.readouterr().out.split())
    for words in ("accept_length@2 is 1.004", "slower with the drafter: 10.9 tokens/s with, 16.4 without"):
        assert any(words in one for one in found.warnings) and words in page and words in said
    assert "BAD: " in page and "BAD: " in said


def test_a_good_drafter_on_a_slow_machine_is_warned_of_and_good(outcome):
    assert outcome([0, 2]).warnings == []
    slow = outcome([0, 2], without=31.0)
    assert slow.good and slow.warnings == ["slower with the drafter: 30.0 tokens/s with, 31.0 without"]
