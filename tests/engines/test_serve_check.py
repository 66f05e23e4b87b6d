"""serve-check with both real engines: a trained drafter is served as predicted, request by request."""

from __future__ import annotations

import json

import pytest

from draftsmith.accept.serve_check import serve_check
from tests.accept import smollm2_run

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
    assert one.served.accept_length > 1.3
    content = json.loads((config.folder / f"serve-check-{engine}.json").read_text())
    assert content["good"] is True and content["tokens_per_second"]["without"] > 0
    page = (config.folder / f"serve-check-{engine}.html").read_text()
    assert "Predicted and served" in page and "data:image/png;base64," in page
    assert sorted(file.suffix for file in config.folder.glob(f"serve-check-{engine}*") if "progress" in file.name) == []
