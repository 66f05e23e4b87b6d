"""Layer ids resolve to the taps that the engines' own code captures; the table was worked out by hand from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import read_target
from draftsmith.convert.layer_ids import RULES, EngineIds, encode, engine_default, resolve_sglang, resolve_vllm

KIMI, LLAMA, GPT_OSS = "KimiK25ForConditionalGeneration", "LlamaForCausalLM", "GptOssForCausalLM"
MINIMAX = "MiniMaxM3SparseForConditionalGeneration"


@pytest.mark.parametrize(
    ("architecture", "layers", "nested", "taps"),
    [
        (LLAMA, 61, None, (2, 30, 58)),
        (LLAMA, 61, [2, 30, 58], (3, 31, 59)),
        (LLAMA, 61, [1, 29, 57], (2, 30, 58)),
        (KIMI, 61, None, (2, 30, 58)),
        (KIMI, 61, [2, 30, 58], (2, 30, 58)),
        (KIMI, 61, [1, 29, 57], (2, 30, 58)),
        (KIMI, 61, [1, 20, 40], (2, 21, 41)),
        (KIMI, 61, [0, 20, 40], (0, 20, 40)),
        (KIMI, 61, [57, 29, 1], (1, 29, 57)),
        (GPT_OSS, 36, None, (2, 18, 33)),
        (GPT_OSS, 36, [2, 18, 33], (3, 19, 34)),
        (GPT_OSS, 36, [2, 18, 36], (2, 18, 36)),
        (MINIMAX, 61, None, (3, 31, 59)),
        (MINIMAX, 61, [1, 29, 57], (2, 30, 58)),
        ("Qwen3ForCausalLM", 36, [1, 17, 32], (2, 18, 33)),
        ("DeepseekV3ForCausalLM", 61, [1, 29, 57], (2, 30, 58)),
        (LLAMA, 8, [4, 1, 3], (2, 4, 5)),
    ],
)
def test_sglang_captures_these_taps(architecture, layers, nested, taps):
    assert resolve_sglang(architecture, nested, layers) == taps


@pytest.mark.parametrize(
    ("runner", "top", "nested", "layer_ids", "taps"),
    [
        ("v1", [2, 30, 58], [1, 29, 57], None, (2, 30, 58)),
        ("v2", [2, 30, 58], [1, 29, 57], None, (2, 30, 58)),
        ("v1", None, [1, 29, 57], None, (1, 29, 57)),
        ("v2", None, [1, 29, 57], None, (2, 30, 58)),
        ("v2", None, [1, 29, 57], [3, 31, 59], (3, 31, 59)),
        ("v1", [58, 2, 30, 2], None, None, (2, 30, 58)),
    ],
)
def test_vllm_captures_these_taps(runner, top, nested, layer_ids, taps):
    assert resolve_vllm(runner, top, nested, 61, layer_ids=layer_ids) == taps


@pytest.mark.parametrize(
    ("layers", "taps"), [(61, (2, 30, 58)), (32, (2, 16, 29)), (8, (2, 4, 5)), (36, (3, 18, 33)), (61, (5, 6, 60))]
)
def test_written_ids_resolve_to_the_same_taps_in_every_engine_and_class(target, layers, taps):
    for architecture in RULES:
        ids = encode(taps, replace(read_target(target), architecture=architecture, num_layers=layers))
        assert ids.top == taps
        assert resolve_sglang(architecture, ids.nested, layers) == taps, architecture
        for runner in ("v1", "v2"):
            assert resolve_vllm(runner, ids.top, ids.nested, layers) == taps, architecture


def test_default_taps_are_written_one_lower_for_sglang(target):
    kimi = replace(read_target(target), architecture=KIMI, num_layers=61)
    assert engine_default(61) == (2, 30, 58)
    assert encode((2, 30, 58), kimi) == EngineIds((1, 29, 57), (2, 30, 58))


@pytest.mark.parametrize(("architecture", "taps"), [(KIMI, (1, 30, 58)), (LLAMA, (0, 4, 5))])
def test_taps_that_sglang_cannot_express_are_refused(target, architecture, taps):
    with pytest.raises(DraftsmithError, match="cannot capture"):
        encode(taps, replace(read_target(target), architecture=architecture, num_layers=61))
