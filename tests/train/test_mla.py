"""Latent attention against transformers' DeepseekV3Attention, which keeps a cache as an engine does: prefill and drafts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from draftsmith.configs.drafter import MLA, DrafterSpec, MlaSpec, RopeSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.train.attention import Segments
from draftsmith.train.model import Drafter

HIDDEN, HEADS, STEPS, EPS = (
    16,
    4,
    4,
    1e-6,
)  # transformers' norms inside the attention have this eps, whatever the config
YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0,
    "mscale": 0.7, "mscale_all_dim": 0.9,
}  # fmt: skip
LENGTHS = (9, 1, 6)


def make_spec(scaling=None, interleave=True) -> DrafterSpec:
    mla = MlaSpec(
        q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=5, rope_interleave=interleave
    )  # fmt: skip
    return DrafterSpec(
        architecture=MLA, hidden_size=HIDDEN, intermediate_size=24, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        head_dim=8, vocab_size=40, draft_vocab_size=24, target_hidden_size=HIDDEN, target_num_layers=8, taps=(2, 4, 5),
        rms_norm_eps=EPS, rope=RopeSpec(theta=100.0, scaling=scaling), max_position_embeddings=128, mla=mla,
    )  # fmt: skip


@pytest.fixture(params=[(None, True), (YARN, True), (None, False)], ids=["plain", "yarn", "halves"])
def drafter(request) -> Drafter:
    torch.manual_seed(3)
    drafter = Drafter(make_spec(*request.param), torch.randn(40, HIDDEN)).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (1.0 if parameter.ndim == 1 else 0.0))
    return drafter


class Oracle:
    """One conversation at a time, a growing cache, transformers' attention with an input twice as wide."""

    def __init__(self, drafter: Drafter) -> None:
        spec = drafter.spec
        scaling = spec.rope.scaling or {"rope_type": "default"}
        config = DeepseekV3Config(
            hidden_size=2 * HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS, attention_bias=False,
            max_position_embeddings=128, rope_parameters={**scaling, "rope_theta": spec.rope.theta},
            attn_implementation="eager", **spec.mla.model_dump(),
        )  # fmt: skip
        self.weights = {name: weight.detach().clone().requires_grad_() for name, weight in drafter.named_parameters()}
        self.attention = DeepseekV3Attention(config, 0).double()
        self.attention.o_proj = torch.nn.Linear(HEADS * spec.mla.v_head_dim, HIDDEN, bias=False).double()
        for name, _ in list(self.attention.named_parameters()):
            module, _, leaf = name.rpartition(".")
            owner = self.attention.get_submodule(module)
            del owner._parameters[leaf]
            setattr(owner, leaf, self.weights[f"midlayer.self_attn.{name}"])
        self.rotary, self.embedding = DeepseekV3RotaryEmbedding(config), drafter.embedding

    def norm(self, x, name):
        return F.rms_norm(x, (x.shape[-1],), self.weights[f"{name}.weight"], EPS)

    def step(self, ids, hidden, positions, cache):
        x = torch.cat(
            (self.norm(self.embedding[ids], "midlayer.input_layernorm"), self.norm(hidden, "midlayer.hidden_norm")), -1
        )
        seen = cache.get_seq_length()
        mask = torch.full((len(ids), seen + len(ids)), float("-inf"), dtype=x.dtype).triu(seen + 1)
        turn = [part.double() for part in self.rotary(x[None].float(), positions[None])]
        mixed, _ = self.attention(x[None], tuple(turn), mask[None, None], cache)
        attended = hidden + mixed[0]
        inner = self.norm(attended, "midlayer.post_attention_layernorm")
        gate, up, down = (self.weights[f"midlayer.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        after = attended + (F.silu(inner @ gate.T) * (inner @ up.T)) @ down.T
        return after, self.norm(after, "norm") @ self.weights["lm_head.weight"].T

    def chains(self, ids, taps):
        """Logits (n, D) of every step, one row for every index: each index's chain has a cache of its own."""
        count = len(taps)
        fused = taps.flatten(1) @ self.weights["fc.weight"].T
        rows = [[] for _ in range(STEPS)]
        for start in range(count):
            cache, reach = DynamicCache(), torch.arange(start + 1)
            hidden, logits = self.step(ids[: start + 1], fused[: start + 1], reach, cache)
            rows[0].append(logits[-1])
            for step in range(1, STEPS):
                at = torch.tensor([start + step])
                hidden, logits = self.step(ids[at], hidden[-1:], at, cache)
                rows[step].append(logits[0])
        return [torch.stack(row) for row in rows]


def unroll(drafter, conversations):
    """All conversations in one pack: logits of every step, in the order of the rows."""
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    local = torch.cat([torch.arange(length) for length in LENGTHS])
    segments = Segments.of(bounds, bounds, torch.arange(bounds[-1]))
    fed = torch.cat([ids for ids, _ in conversations])
    starts = torch.tensor([0, *(length + STEPS for length in LENGTHS)]).cumsum(0)[:-1]
    slots = local + torch.repeat_interleave(starts, torch.tensor(LENGTHS))
    hidden, cache = drafter.begin(torch.cat([taps for _, taps in conversations]), fed, STEPS)
    outputs = []
    for step in range(STEPS):
        hidden, normed = drafter.step(slots + step, hidden, local + step, None, cache, segments)
        outputs.append(drafter.lm_head(normed))
    return outputs


@pytest.fixture
def conversations():
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randint(40, (length + STEPS,), generator=generator),
            torch.randn(length, 3, HIDDEN, generator=generator, dtype=torch.float64),
        )
        for length in LENGTHS
    ]


def test_prefill_drafts_and_gradients_equal_transformers(drafter, conversations):
    oracle = Oracle(drafter)
    want = [torch.cat(rows) for rows in zip(*(oracle.chains(*each) for each in conversations), strict=True)]
    got = unroll(drafter, conversations)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # attention scores are float32 here
    assert max((first - second).abs().max() for first, second in pairwise(want)) > 0.1
    weight = torch.randn(want[0].shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    sum((logits * weight).sum() for logits in got).backward()
    sum((logits * weight).sum() for logits in want).backward()
    for name, parameter in drafter.named_parameters():
        expected = oracle.weights[name].grad
        assert expected.abs().max() > 1e-3, name
        torch.testing.assert_close(
            parameter.grad,
            expected,
            rtol=1e-4,
            atol=1e-5 * float(expected.abs().max()),
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_parameters_are_the_checkpoints_tensors(drafter):
    shapes = {name: tuple(parameter.shape) for name, parameter in drafter.named_parameters()}
    assert shapes == drafter.spec.trainable_shapes()


def test_yarn_turns_as_deepseek_does_where_transformers_ignores_a_lone_mscale():
    """Worked by hand: factor 8, ln 8 = 2.0794; mscale 0.7 alone: 0.1 * 0.7 * ln 8 + 1 = 1.14556; scores stay as they are."""
    alone = {key: value for key, value in YARN.items() if key != "mscale_all_dim"}
    drafter = Drafter(make_spec(alone), torch.zeros(40, HIDDEN))
    assert drafter.rope_factor == pytest.approx(1.145561)
    assert drafter.midlayer.self_attn.scale == pytest.approx(14**-0.5)
    both = Drafter(make_spec(YARN), torch.zeros(40, HIDDEN))
    assert both.rope_factor == pytest.approx(1.145561 / 1.187150)
    assert both.midlayer.self_attn.scale == pytest.approx(14**-0.5 * 1.187150**2)


def test_a_scaling_that_engines_would_take_for_yarn_is_refused():
    with pytest.raises(DraftsmithError, match="as YaRN"):
        Drafter(make_spec({"rope_type": "linear", "factor": 2.0}), torch.zeros(40, HIDDEN))
