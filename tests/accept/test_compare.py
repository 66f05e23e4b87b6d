"""Predicted beside served, with the engines' excess at an answer's end worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from draftsmith.accept.compare import compare, difference_text, predicted_steps, without_excess, worst_difference
from draftsmith.accept.requests import Request
from draftsmith.configs.errors import DraftsmithError
from draftsmith.train.evaluate import Chains


def request(name, start, end, answer=None, conversation="c"):
    return Request(name, conversation, start, end, (0,) * start, tuple(answer or range(end - start)), 99)


def chains(starts, accepted):
    zeros = np.zeros(3, dtype=np.int64)
    return Chains(np.array(starts), np.array(accepted), zeros, zeros, 0)


def test_the_walk_is_split_into_turns():
    """Turns [10, 16) and [20, 23): chains start at t with x[t+1] in the turn, the first at 9 and 19."""
    found = predicted_steps(
        {0: chains([9, 10, 11, 12, 13, 19, 20], [1, 3, 2, 0, 1, 0, 1])},
        {"c": 0},
        [request("first", 10, 16), request("second", 20, 23)],
        3,
    )
    assert found == {"first": [1, 2], "second": [0, 1]}  # 9 -> 11 -> past the turn; 19 -> 20 -> end
    capped = predicted_steps({0: chains([9, 10, 11, 12, 13], [1, 3, 2, 0, 1])}, {"c": 0}, [request("first", 10, 16)], 1)
    assert capped == {"first": [1, 1, 1]}
    with pytest.raises(DraftsmithError, match="not in the held-out store"):
        predicted_steps({}, {}, [request("first", 10, 16)], 3)


@pytest.mark.parametrize(
    ("histogram", "tokens", "predicted", "per_step", "expected"),
    [
        # 1 + 1 + 3 = 5 tokens, all of them the answer
        ([1, 0, 1, 0], 5, [0, 2], None, [1, 0, 1, 0]),
        # the bonus token alone lies beyond the end: every accepted draft counts
        ([1, 0, 1, 0], 4, [0, 2], None, [1, 0, 1, 0]),
        # 1 + 1 + 4 = 6 tokens of which 3: the last step accepted 3, of which 1 counts
        ([1, 0, 0, 1], 3, [0, 1], None, [1, 1, 0, 0]),
        # the last step may have accepted 3 or 2; the record of single steps decides, else the prediction
        ([0, 0, 1, 1], 6, [3, 1], None, [0, 1, 0, 1]),
        ([0, 0, 1, 1], 6, [3, 1], [2, 3], [0, 0, 2, 0]),
        # a prediction that fits nothing: the deepest step that could have been the last
        ([0, 0, 1, 1], 6, [0], None, [0, 0, 2, 0]),
        ([0, 0, 0, 0], 1, [], None, [0, 0, 0, 0]),
    ],
)
def test_what_lies_beyond_the_end_is_taken_off(histogram, tokens, predicted, per_step, expected):
    assert without_excess(histogram, tokens, predicted, per_step).tolist() == expected


def served(outputs, accept, verify):
    return {
        "accept_length": 1 + sum(accept), "accept_per_position": accept, "verify_steps": verify, "outputs": outputs,
    }  # fmt: skip


def test_equal_histograms_agree_and_one_more_draft_does_not():
    requests = [request("a", 5, 10), request("b", 5, 8)]
    predicted = {"a": [0, 2], "b": [1]}
    outputs = [
        {"id": "a", "output_ids": [0, 1, 2, 3, 4], "histogram": [1, 0, 1]},
        {"id": "b", "output_ids": [0, 1, 2], "histogram": [0, 1, 0]},
    ]
    same = compare(predicted, requests, served(outputs, [2 / 3, 1 / 3], 3), 2)
    assert same.agrees and (same.exact, same.inexact, same.other_text) == (2, 0, 0)
    assert same.predicted.accept_length == pytest.approx(2.0) and same.length_difference == 0
    outputs[0]["histogram"] = [1, 0, 1, 0]  # the engine's list is longer than the chain
    assert compare(predicted, requests, served(outputs, [2 / 3, 1 / 3], 3), 2).exact == 2
    outputs[1]["histogram"] = [0, 0, 1]
    outputs[1]["output_ids"] = [0, 1, 2, 3]
    other = compare(predicted, requests, served(outputs, [2 / 3, 2 / 3], 3), 2)
    assert not other.agrees and (other.exact, other.inexact, other.other_text) == (1, 0, 1)
    assert other.length_difference == pytest.approx((2 - 7 / 3) / (7 / 3))


def test_nothing_accepted_is_said_in_words_and_in_valid_json():
    requests = [request("a", 5, 105)]
    outputs = [{"id": "a", "output_ids": []}]
    found = compare({"a": [0] * 40 + [1] * 40}, requests, served(outputs, [0.0, 0.0], 80), 2)
    assert not found.agrees and found.position_differences == [None, 0.0]
    assert worst_difference(found) == "the first draft never right as served, in 50.0% of the verify steps as predicted"
    assert difference_text(None) == "none served" and difference_text(0.0) == "+0.00%"
    json.dumps(found.model_dump(mode="json"), allow_nan=False)


def test_without_single_requests_the_totals_are_compared():
    requests = [request("a", 5, 105)]
    predicted = {"a": [0] * 40 + [1] * 40}
    outputs = [{"id": "a", "output_ids": []}]
    assert compare(predicted, requests, served(outputs, [0.5, 0.0], 80), 2).agrees
    lower = compare(predicted, requests, served(outputs, [0.4, 0.0], 80), 2)
    assert not lower.agrees and lower.within is None and lower.position_differences[0] == pytest.approx(0.25)
