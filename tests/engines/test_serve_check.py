"""serve-check with both real engines: a trained drafter is served as predicted, request by request."""

from __future__ import annotations

import json

import pytest

from draftsmith.accept.serve_check import serve_check
from draftsmith.configs.errors import DraftsmithError
from tests.accept import smollm2_run
from tests.engines.vllm_server import vllm_server

pytestmark = pytest.mark.engine
CONVERSATIONS = 6


@pytest.fixture(scope="module")
def config(target_folder, tmp_path_factory):
    config = smollm2_run.make_run(tmp_path_factory.mktemp("serve-check"), target_folder, CONVERSATIONS)
    smollm2_run.write_store(config, smollm2_run.harvested(config))
    return config


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_drafter_is_served_as_predicted(config, engine):
    found = serve_check(engine, config)
    one = found.comparison
    assert found.good and found.identical is True, found.verdict
    assert abs(one.length_difference) <= 0.02 and all(abs(d) <= 0.03 for d in one.position_differences)
    assert (one.exact, one.inexact, one.other_text) == (found.requests, 0, 0)
    assert one.served.accept_length > 2.0
    content = json.loads((config.folder / f"serve-check-{engine}.json").read_text())
    assert content["good"] is True and content["tokens_per_second"]["without"] > 0
    page = (config.folder / f"serve-check-{engine}.html").read_text()
    assert "Predicted and served" in page and "data:image/png;base64," in page
    assert sorted(file.suffix for file in config.folder.glob(f"serve-check-{engine}*") if "progress" in file.name) == []


def test_servers_that_run_already_are_asked_by_url(config, tmp_path):
    """vLLM's own HTTP servers, with the drafter and without: its counters' difference is what was predicted."""
    drafting = json.dumps({"method": "eagle3", "model": str(config.drafter_folder), "num_speculative_tokens": 3})
    with (
        vllm_server(config.target.path, tmp_path / "spec.log", "--speculative-config", drafting) as url,
        vllm_server(config.target.path, tmp_path / "plain.log") as plain,
    ):
        found = serve_check("vllm", config, url=url, plain_url=f"{plain}/v1", max_running=4)
        again = serve_check("vllm", config, url=url, conversations=2, explain=False)
        with pytest.raises(DraftsmithError, match="reported no counters"):
            serve_check("vllm", config, url=plain, conversations=1)
    one = found.comparison
    assert found.good and found.identical is True and found.first_divergence == [], found.verdict
    assert one.steps == 3 and one.served.accept_length > 2.0
    assert (
        abs(one.length_difference) <= 0.02 and one.agrees
    )  # counters of a server hold what lies behind answers' ends too
    assert found.tokens_per_second["with"] > 0 and found.tokens_per_second["without"] > 0
    assert again.requests < found.requests and again.identical is None  # counters of these requests alone
    assert again.comparison.served.verify_steps < one.served.verify_steps
    with pytest.raises(DraftsmithError, match="was not healthy"):
        serve_check("vllm", config, url=url, start_limit=1.0)
