"""Frequencies and amplitude against transformers' own functions; the fields of config.json against its parser."""

from __future__ import annotations

import math

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.configs.drafter import RopeSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.rope import amplitude, check_rope, inverse_frequencies, rope_fields, without_bridge

KIMI = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_plain_frequencies_by_hand():
    assert inverse_frequencies(RopeSpec(theta=10000.0), 4) == pytest.approx([1.0, 0.01])


@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (5e4, KIMI),
        (5e4, KIMI | {"truncate": False}),
        (1e6, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
        (1e6, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.3}),
        (5e5, LLAMA3),
        (1e4, {"rope_type": "linear", "factor": 2.0}),
    ],
)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_scaled_frequencies_are_those_of_transformers(theta, scaling, head_dim):
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=262144,
        rope_parameters={"rope_theta": theta, **scaling},
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    rope = RopeSpec(theta=theta, scaling=scaling)
    assert inverse_frequencies(rope, head_dim) == pytest.approx(frequencies.tolist(), rel=1e-5)
    assert amplitude(rope, sglang=False) == pytest.approx(factor)


def test_kimi_keeps_cosine_and_sine_as_they_are():
    assert amplitude(RopeSpec(theta=5e4, scaling=KIMI), sglang=True) == 1.0


def test_yarn_without_mscale_grows_by_the_paper_s_formula():
    rope = RopeSpec(theta=1e6, scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024})
    assert amplitude(rope, sglang=True) == amplitude(rope, sglang=False) == pytest.approx(0.1 * math.log(4) + 1)


def test_an_attention_factor_reaches_sglang_too():
    """SGLang reads attn_factor, the others attention_factor."""
    rope = RopeSpec(
        theta=1e6,
        scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.3},
    )
    written = RopeSpec(theta=1e6, scaling=rope_fields(rope)["rope_scaling"])
    assert amplitude(rope, sglang=True) != pytest.approx(1.3)
    assert amplitude(written, sglang=True) == pytest.approx(1.3) == amplitude(written, sglang=False)
    assert without_bridge(written) == rope


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "not computed alike"),
        ({"rope_type": "longrope"}, "not computed alike"),
        ({"rope_type": "yarn", "factor": 4.0}, "missing original_max_position_embeddings"),
        (KIMI | {"mrope_section": [8, 4, 4]}, "unknown mrope_section"),
    ],
)
def test_scalings_that_engines_compute_differently_are_refused(scaling, words):
    with pytest.raises(DraftsmithError, match=words):
        check_rope(RopeSpec(theta=1e4, scaling=scaling), where="here")
