"""The EAGLE-3 drafter: one decoder layer over the fused taps and the token embedding. Tensor names are the served ones.

Notable choices: the residual is the un-normed hidden state and the embedding comes first in the concatenation, as
SGLang and vLLM compute it; the target's embedding is a buffer outside the state dict, so that a checkpoint can never
hold a stale copy; modules work on rows (n, ...) without a batch dimension, since training packs conversations.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.train.attention import Segments, unroll_attention
from draftsmith.train.mla import LatentAttention
from draftsmith.train.norm import RMSNorm
from draftsmith.train.rope import Rotation, inverse_frequencies, rotate


class Attention(nn.Module):
    """Projections of the layer's grouped-query attention; q, k and v read the concatenation of width 2 * hidden."""

    reads_input = ("q_proj", "k_proj", "v_proj")
    """The projections of that width."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        query, key = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.head_dim, self.scale = spec.head_dim, spec.head_dim**-0.5
        self.q_proj = nn.Linear(2 * spec.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(2 * spec.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(2 * spec.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, spec.hidden_size, bias=False)

    def queries(self, joined: Tensor, turn: Rotation) -> Tensor:
        """joined (rows, 2 * hidden) -> (rows, heads, head_dim), rotated."""
        return turn(self._split(self.q_proj(joined)))

    def keys_values(self, joined: Tensor, turn: Rotation) -> tuple[Tensor, Tensor]:
        """joined (rows, 2 * hidden) -> two of (rows, kv_heads, head_dim), the keys rotated."""
        return turn(self._split(self.k_proj(joined))), self._split(self.v_proj(joined))

    def _split(self, projected: Tensor) -> Tensor:
        return projected.view(projected.shape[0], -1, self.head_dim)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """The one layer. Its parts are called by `Drafter.step`, since keys and queries cover different rows."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn: Attention | LatentAttention = Attention(spec) if spec.mla is None else LatentAttention(spec)
        self.mlp = MLP(spec)


class Cache:
    """Keys and values of one unroll: step 0 of every row, then one row a query for each later step."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def keep(self, rows: Tensor) -> None:
        """Drop the later steps' keys of queries that are not in `rows` (indices into the queries so far)."""
        self.own_keys = [key[rows] for key in self.own_keys]
        self.own_values = [value[rows] for value in self.own_values]


class Drafter(nn.Module):
    """`LlamaForCausalLMEagle3`, or `Eagle3DeepseekV2ForCausalLM` where `spec.mla` is set.

    Args:
        spec: dimensions; parameters are float32 and named as `spec.trainable_shapes()`.
        embedding: the target's token embedding (V, hidden_size), frozen.
    """

    embedding: Tensor
    frequencies: Tensor

    def __init__(self, spec: DrafterSpec, embedding: Tensor) -> None:
        super().__init__()
        self.spec = spec
        features = len(spec.taps) * spec.target_hidden_size
        self.fc = nn.Linear(features, spec.hidden_size, bias=spec.fc_bias)
        if spec.norm_before_fc:
            self.input_norm = RMSNorm(features, spec.rms_norm_eps)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(spec.target_hidden_size, spec.rms_norm_eps) for _ in spec.taps)
        self.midlayer = DecoderLayer(spec)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        frequencies, self.rope_factor = inverse_frequencies(spec)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def fuse(self, taps: Tensor) -> Tensor:
        """h0: taps (rows, K, H) in ascending order of layer -> (rows, hidden)."""
        if self.spec.fc_norm:
            taps = torch.stack([norm(taps[:, index]) for index, norm in enumerate(self.fc_norm)], dim=1)
        joined = taps.flatten(1)
        return self.fc(self.input_norm(joined) if self.spec.norm_before_fc else joined)

    def step(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, queries: Tensor | None, cache: Cache, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        Args:
            ids: int64 (rows,), the token fed at each row.
            hidden: (rows, hidden), h fed at each row.
            positions: int64 (rows,), RoPE positions.
            queries: at step 0, which rows draft (the others only lend their keys); at later steps None: all rows do.
            cache: filled at step 0, grown by one own key a query at later steps.
            segments: of the keys of step 0 and of the queries.

        Returns:
            The next step's h (queries, hidden), and the post-norm hidden state that the draft head reads.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        embedded = F.embedding(ids, self.embedding).to(hidden.dtype)
        normed = layer.hidden_norm(hidden)
        joined = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        hidden = normed if self.spec.norm_before_residual else hidden
        key, value = attention.keys_values(joined, self._rotation(positions))
        if cache.keys is None or cache.values is None:
            cache.keys, cache.values = key, value
        else:
            cache.own_keys.append(key)
            cache.own_values.append(value)
        if queries is not None:
            joined, hidden, positions = joined[queries], hidden[queries], positions[queries]
        query = attention.queries(joined, self._rotation(positions))
        mixed = unroll_attention(
            query, cache.keys, cache.values, cache.own_keys, cache.own_values, segments, attention.scale
        )
        attended = hidden + attention.o_proj(mixed.flatten(1))
        after = attended + layer.mlp(layer.post_attention_layernorm(attended))
        final = self.norm(after)
        return (final if self.spec.norm_output else after), final

    def _rotation(self, positions: Tensor) -> Rotation:
        return lambda states: rotate(states, positions, self.frequencies, self.rope_factor)
