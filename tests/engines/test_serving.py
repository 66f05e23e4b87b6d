"""The real engines serve SmolLM2-135M with a drafter: same tokens as without, same counters as a replay by hand."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.engine
ENGINES = ("sglang", "vllm")


@pytest.fixture(params=ENGINES)
def result(request: pytest.FixtureRequest) -> dict:
    return request.getfixturevalue(f"{request.param}_result")


def test_the_drafter_changes_no_token(result):
    assert result["identical"] is True
    assert result["first_divergence"] == []
    pairs = zip(result["spec"]["outputs"], result["base"]["outputs"], strict=True)
    assert all(spec["output_ids"] == base["output_ids"] for spec, base in pairs)


def test_tokens_are_those_of_transformers_greedy_decoding(result, workbench):
    for output in result["base"]["outputs"]:
        assert output["output_ids"] == workbench.expected(output["id"])


def test_a_stop_token_ends_a_request_and_is_part_of_the_output(result, workbench):
    hello = next(output for output in result["spec"]["outputs"] if output["id"] == "hello")
    assert hello["output_ids"].index(workbench.stop_token) == len(hello["output_ids"]) - 1


def test_histograms_equal_a_token_by_token_replay_of_the_drafter(result, workbench):
    for output in result["spec"]["outputs"]:
        conversation = workbench.conversations[output["id"]]
        accepted = workbench.drafter.verify_steps(conversation, len(output["output_ids"]))
        assert output["histogram"] == torch.bincount(torch.tensor(accepted, dtype=torch.long), minlength=4).tolist(), (
            output["id"]
        )
        assert output["verify_steps"] == len(accepted)
        assert output.get("per_step", accepted) == accepted


@pytest.mark.parametrize("name", ["hash", "hello"])
def test_drafts_accepted_beyond_the_end_of_a_request_are_counted(result, name):
    """`hash` ends by max_new_tokens, `hello` by its stop token; the last verify step of both counts in full."""
    output = next(output for output in result["spec"]["outputs"] if output["id"] == name)
    accepted = sum(i * count for i, count in enumerate(output["histogram"]))
    assert 1 + output["verify_steps"] + accepted > len(output["output_ids"]) + 1  # the bonus token alone would be + 1


def test_the_prefill_token_belongs_to_no_verify_step(result):
    """`times` is never drafted right, so that every token but the first costs one verify step."""
    output = next(output for output in result["spec"]["outputs"] if output["id"] == "times")
    accepted = sum(i * count for i, count in enumerate(output["histogram"]))
    assert output["verify_steps"] + accepted == len(output["output_ids"]) - 1


def test_a_request_of_one_token_has_no_verify_steps(result):
    output = next(output for output in result["spec"]["outputs"] if output["id"] == "france")
    assert (len(output["output_ids"]), output["verify_steps"], output["histogram"]) == (1, 0, [0, 0, 0, 0])


def test_every_number_of_accepted_drafts_occurs(result):
    assert all(count > 0 for count in result["spec"]["histogram"])


def test_totals_follow_from_the_requests(result):
    spec, outputs = result["spec"], result["spec"]["outputs"]
    histogram = [sum(column) for column in zip(*(output["histogram"] for output in outputs), strict=True)]
    assert spec["histogram"] == histogram
    assert spec["verify_steps"] == sum(histogram)
    assert spec["accepted_drafts"] == histogram[1] + 2 * histogram[2] + 3 * histogram[3]
    assert spec["accept_length"] == 1 + spec["accepted_drafts"] / spec["verify_steps"]
    assert spec["accept_per_position"] == pytest.approx(
        [sum(histogram[1:]) / sum(histogram), sum(histogram[2:]) / sum(histogram), histogram[3] / sum(histogram)]
    )
    assert spec["tokens"] == sum(len(output["output_ids"]) for output in outputs)


def test_engines_agree_on_every_token_and_counter(sglang_result, vllm_result):
    for ours, theirs in zip(sglang_result["spec"]["outputs"], vllm_result["spec"]["outputs"], strict=True):
        assert ours == {key: value for key, value in theirs.items() if key != "per_step"}
    for key in ("accept_length", "accept_per_position", "verify_steps", "accepted_drafts", "histogram"):
        assert sglang_result["spec"][key] == vllm_result["spec"][key]


def test_versions_are_the_pinned_ones(sglang_result, vllm_result):
    assert (sglang_result["engine"], sglang_result["version"]) == ("sglang", "0.5.23")
    assert (vllm_result["engine"], vllm_result["version"].split("+")[0]) == ("vllm", "0.32.0")
