"""EAGLE-3 written a second time, as an engine runs it: one token at a time, with a cache that grows. The tests' oracle.

Nothing here is shared with `draftsmith.train`; it reads tensors by their served names and follows the formulas of the
paper (arXiv 2503.01840) literally: for every chain start t, a cache holding the step-0 keys of indices 0..t, then one
forward pass a draft with the previous pass's hidden state.
"""

from __future__ import annotations

import math

import torch


class NaiveDrafter:
    """tensors: served name -> tensor; `embedding` is the target's (V, H). Works in the dtype of the tensors."""

    def __init__(self, tensors, embedding, *, heads, kv_heads, head_dim, theta, eps, fc_norm=False, norm_output=False):
        self.w, self.embedding = tensors, embedding
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.theta, self.eps, self.fc_norm, self.norm_output = theta, eps, fc_norm, norm_output

    def rms(self, x, name):
        return x / torch.sqrt((x * x).mean() + self.eps) * self.w[name]

    def rotate(self, x, position):
        """Complex multiplication of the pairs (j, j + d/2)."""
        half = self.head_dim // 2
        angle = torch.tensor(
            [position * self.theta ** (-2 * j / self.head_dim) for j in range(half)], dtype=torch.float64
        )
        turned = []
        for head in x.view(-1, self.head_dim):
            pair = torch.complex(head[:half].double(), head[half:].double()) * torch.polar(
                torch.ones_like(angle), angle
            )
            turned.append(torch.cat([pair.real, pair.imag]).to(x.dtype))
        return turned

    def fuse(self, taps):
        """taps (K, H) of one position."""
        parts = [self.rms(tap, f"fc_norm.{i}.weight") if self.fc_norm else tap for i, tap in enumerate(taps)]
        return self.w["fc.weight"] @ torch.cat(parts)

    def forward(self, token, hidden, position, cache):
        """One token through the layer; appends to `cache`. Returns (next hidden, logits)."""
        attn = "midlayer.self_attn."
        joined = torch.cat(
            [
                self.rms(self.embedding[token], "midlayer.input_layernorm.weight"),
                self.rms(hidden, "midlayer.hidden_norm.weight"),
            ]
        )
        keys = self.rotate(self.w[attn + "k_proj.weight"] @ joined, position)
        values = (self.w[attn + "v_proj.weight"] @ joined).view(-1, self.head_dim)
        cache.append((keys, values))
        outputs = []
        for index, query in enumerate(self.rotate(self.w[attn + "q_proj.weight"] @ joined, position)):
            shared = index // (self.heads // self.kv_heads)
            scores = torch.stack([query @ k[shared] / math.sqrt(self.head_dim) for k, _ in cache])
            weights = torch.exp(scores - scores.max())
            weights = weights / weights.sum()
            outputs.append(sum(weight * v[shared] for weight, (_, v) in zip(weights, cache, strict=True)))
        attended = hidden + self.w[attn + "o_proj.weight"] @ torch.cat(outputs)
        inner = self.rms(attended, "midlayer.post_attention_layernorm.weight")
        gate = self.w["midlayer.mlp.gate_proj.weight"] @ inner
        after = attended + self.w["midlayer.mlp.down_proj.weight"] @ (
            gate / (1 + torch.exp(-gate)) * (self.w["midlayer.mlp.up_proj.weight"] @ inner)
        )
        normed = self.rms(after, "norm.weight")
        return (normed if self.norm_output else after), self.w["lm_head.weight"] @ normed

    def chain(self, ids, taps, start, steps):
        """Drafts from index `start` when x is fed as in training: list of (hidden, logits), one a step."""
        cache, hidden, logits = [], None, None
        for t in range(start + 1):
            hidden, logits = self.forward(ids[t + 1], self.fuse(taps[t]), t, cache)
        result = [(hidden, logits)]
        for step in range(1, steps):
            if start + 1 + step >= len(ids):
                break
            result.append(self.forward(ids[start + 1 + step], result[-1][0], start + step, cache))
        return result


def naive_supervised(generated, step):
    """Straight from the definition: x[t+1] .. x[t+2+step] all generated in one turn."""
    result = []
    for t in range(len(generated)):
        needed = range(t + 1, t + 3 + step)
        result.append(needed[-1] < len(generated) and all(generated[j] for j in needed))
    return result


def naive_loss(drafter, conversations, d2t, head, steps, decay):
    """Sum over steps of decay^i * mean over all supervised positions (those outside the vocabulary count, without loss)."""
    targets = torch.arange(len(d2t)) + d2t
    rows = head[targets]
    total = 0.0
    counts = [sum(sum(naive_supervised(c["generated"], i)) for c in conversations) for i in range(steps)]
    for c in conversations:
        for t in range(len(c["ids"])):
            if not naive_supervised(c["generated"], 0)[t]:
                continue
            for i, (_, logits) in enumerate(drafter.chain(c["ids"], c["taps"], t, steps)):
                if not naive_supervised(c["generated"], i)[t] or c["ids"][t + 2 + i] not in targets:
                    continue
                teacher = torch.softmax(rows @ c["final"][t + 1 + i], -1)
                total = total - decay**i / counts[i] * (teacher * torch.log_softmax(logits, -1)).sum()
    return total
