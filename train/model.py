"""The EAGLE-3 drafter: one decoder layer over the fused taps and the token embedding. Tensor names are the served ones.

Notable choices: the residual is the un-normed hidden state and the embedding comes first in the concatenation, as
SGLang and vLLM compute it; the target's embedding is no part of the module, so that a checkpoint can never hold a stale
copy and a GPU need not hold all of it; modules work on rows (n, ...) without a batch dimension, since training packs conversations.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.train.attention import Keys, Segments, unroll_attention
from draftsmith.train.layer import Fed, first_products, mlp, rotate, select
from draftsmith.train.mla import LatentAttention
from draftsmith.train.norm import RMSNorm
from draftsmith.train.products import Bank
from draftsmith.train.rope import Turned, angles, inverse_frequencies


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

    def project(
        self, bank: Bank, first: tuple[Tensor, ...], asked: Turned, everywhere: Turned
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (queries, heads, head_dim) and keys, rotated, and values, both (rows, kv_heads, their size).

        Args:
            bank: holds the weights.
            first: products of the joined input with the modules named in `reads_input`, the first one's at the queries.
            asked, everywhere: rotations of the queries and of all rows.
        """
        query, key, value = (self._split(part) for part in first)
        return rotate(query, *asked), rotate(key, *everywhere), value

    def _split(self, projected: Tensor) -> Tensor:
        return projected.view(projected.shape[0], -1, self.head_dim)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)


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
    """What one unroll holds: weights, what its tokens' embeddings bring, and keys and values of its steps."""

    def __init__(self, bank: Bank, fed: Fed, steps: int) -> None:
        self.bank, self.fed, self.keys = bank, fed, Keys(steps - 1)


class Drafter(nn.Module):
    """`LlamaForCausalLMEagle3`, or `Eagle3DeepseekV2ForCausalLM` where `spec.mla` is set.

    Args:
        spec: dimensions; parameters are float32 and named as `spec.trainable_shapes()`.
        embedding: the target's token embedding (V, hidden_size), frozen. It is no part of the module: it stays where it is,
            and batches for a GPU bring the rows that they need.
    """

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
        self.embedding = embedding
        frequencies, self.rope_factor = inverse_frequencies(spec)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def begin(
        self, taps: Tensor, fed: Tensor, steps: int, table: Tensor | None = None, bank: Bank | None = None
    ) -> tuple[Tensor, Cache]:
        """h0 (rows, hidden), and what an unroll of `steps` steps holds.

        Args:
            taps: (rows, K, H) in ascending order of layer.
            fed: int64 (slots,), all tokens that the steps will feed.
            steps: most steps of the unroll.
            table: embedding rows that `fed` counts in; None: the target's whole embedding.
            bank: of the weights; None: products in the weights' own dtype.
        """
        bank = bank or Bank()
        taps = taps.to(bank.dtype or self.fc.weight.dtype)
        if self.spec.fc_norm:
            taps = torch.stack([norm(taps[:, index].contiguous()) for index, norm in enumerate(self.fc_norm)], dim=1)
        joined = taps.flatten(1)
        hidden = bank.linear(self.fc, self.input_norm(joined) if self.spec.norm_before_fc else joined)
        attention, weight = self.midlayer.self_attn, self.midlayer.input_layernorm.weight
        modules = [getattr(attention, name) for name in attention.reads_input]
        table = self.embedding.to(taps.device) if table is None else table
        return hidden, Cache(bank, Fed(bank, modules, weight, self.spec.rms_norm_eps, table, fed, hidden.dtype), steps)

    def step(
        self, slots: Tensor, hidden: Tensor, positions: Tensor, queries: Tensor | None, cache: Cache, segments: Segments,
        *, recompute: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One draft step.

        Args:
            slots: int64 (rows,), all different: which of the fed tokens each row reads.
            hidden: (rows, hidden), h fed at each row.
            positions: int64 (rows,), RoPE positions.
            queries: at step 0, which rows draft (None: all; the others only lend their keys); later None.
            cache: of this unroll.
            segments: of the keys of step 0 and of the queries.
            recompute: keep less for the backward pass and compute gate and up again there.

        Returns:
            The next step's h (queries, hidden), and the post-norm hidden state that the draft head reads.
        """
        layer, attention, eps = self.midlayer, self.midlayer.self_attn, self.spec.rms_norm_eps
        first = first_products(cache.fed, hidden, layer.hidden_norm.weight, slots, queries, eps)
        everywhere = angles(positions, self.frequencies, self.rope_factor)
        asked = everywhere if queries is None else (everywhere[0][queries], everywhere[1][queries])
        query, key, value = attention.project(cache.bank, first, asked, everywhere)
        cache.keys.add(key, value)
        residual = hidden if queries is None else select(hidden, queries)
        if self.spec.norm_before_residual:
            residual = layer.hidden_norm(residual)
        mixed = unroll_attention(query, cache.keys, segments, attention.scale)
        attended = cache.bank.linear(attention.o_proj, mixed.flatten(1), residual)
        net = layer.mlp
        after = mlp(
            cache.bank, attended, layer.post_attention_layernorm.weight, eps, net.gate_proj, net.up_proj, net.down_proj,
            recompute=recompute,
        )  # fmt: skip
        final = self.norm(after)
        return (final if self.spec.norm_output else after), final
