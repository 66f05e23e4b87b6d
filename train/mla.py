"""Multi-head latent attention of the drafter (DeepSeek-V2, arXiv 2405.04434, section 2.1), as engines' MLA drafter has it.

Queries and keys-with-values pass through narrow latents with a norm of their own; a head's query and key are a part
without position and a rotated part, the key's rotated part being one for all heads. Keys and values are expanded to
all heads here, since training needs gradients; engines keep the latents in their cache and compute the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftsmith.configs.drafter import DrafterSpec
from draftsmith.train.layer import rotate
from draftsmith.train.norm import RMSNorm
from draftsmith.train.products import Bank
from draftsmith.train.rope import Turned, latent_growth


class LatentAttention(nn.Module):
    """Projections of the layer's attention, named as served; both first ones read the concatenation of 2 * hidden."""

    reads_input = ("q_a_proj", "kv_a_proj_with_mqa")
    """The projections of width 2 * hidden."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        assert spec.mla is not None
        mla, heads = spec.mla, spec.num_attention_heads
        self.heads, self.interleave = heads, mla.rope_interleave
        self.without, self.turned, self.latent = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank
        self.value_dim = mla.v_head_dim
        self.scale = (self.without + self.turned) ** -0.5 * latent_growth(spec.rope) ** 2
        self.q_a_proj = nn.Linear(2 * spec.hidden_size, mla.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(mla.q_lora_rank, spec.rms_norm_eps)
        self.q_b_proj = nn.Linear(mla.q_lora_rank, heads * (self.without + self.turned), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(2 * spec.hidden_size, self.latent + self.turned, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent, spec.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.latent, heads * (self.without + self.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.value_dim, spec.hidden_size, bias=False)

    def project(
        self, bank: Bank, first: tuple[Tensor, ...], asked: Turned, everywhere: Turned
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Attention.project`: queries and keys (.., heads, nope + rope), the latter part rotated, and values."""
        narrow, latents = first
        wide = bank.linear(self.q_b_proj, self.q_a_layernorm(narrow)).view(len(narrow), self.heads, -1)
        plain, rotated = wide.split([self.without, self.turned], dim=-1)
        query = torch.cat([plain, rotate(self._halves(rotated), *asked)], dim=-1)
        latent, shared = latents.split([self.latent, self.turned], dim=-1)
        expanded = bank.linear(self.kv_b_proj, self.kv_a_layernorm(latent.contiguous())).view(
            len(latent), self.heads, -1
        )
        plain, value = expanded.split([self.without, self.value_dim], dim=-1)
        rotated = rotate(self._halves(shared[:, None]), *everywhere).expand(-1, self.heads, -1)
        return query, torch.cat([plain, rotated], dim=-1), value.contiguous()

    def _halves(self, states: Tensor) -> Tensor:
        """Bring neighbours that turn together half a head apart; reordering queries and keys alike changes no score."""
        halves = torch.cat([states[..., 0::2], states[..., 1::2]], dim=-1) if self.interleave else states
        return halves.contiguous()
