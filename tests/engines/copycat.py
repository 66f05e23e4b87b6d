"""A drafter without training: random weights, a head fitted in closed form to a few conversations it then "knows".

It gives the engine tests a checkpoint whose acceptance is far from zero, and known beforehand: `unroll` is a plain
second implementation of the EAGLE-3 forward, so the very verify steps that an engine must report can be replayed here
token by token. Only the head depends on the data, and no hidden state depends on the head, so fitting it is one
least-squares problem over all unroll steps.

Symbols: x token ids (T,); features the concatenated taps (T, 3H); z the normed state that the head reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
LAYER = "midlayer."


@dataclass(frozen=True)
class Conversation:
    """A prompt and the target's greedy continuation, longer than what is served so that drafts past its end count."""

    id: str
    prompt: list[int]
    continuation: list[int]

    @property
    def ids(self) -> torch.Tensor:
        return torch.tensor(self.prompt + self.continuation)


class Target:
    """The target model by transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.config = self.model.config

    @property
    def taps(self) -> list[int]:
        layers = self.config.num_hidden_layers
        return [2, layers // 2, layers - 3]

    def prompt(self, question: str) -> list[int]:
        turns = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)

    @torch.no_grad()
    def continue_greedily(self, prompts: dict[str, list[int]], new_tokens: int) -> list[Conversation]:
        """Greedy continuations of `new_tokens` tokens, running on past any end-of-turn token."""
        longest = max(len(ids) for ids in prompts.values())
        padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts.values()])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts.values()])
        out = self.model.generate(
            padded, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        continuations = out[:, longest:].tolist()
        return [Conversation(name, ids, new) for (name, ids), new in zip(prompts.items(), continuations, strict=True)]

    @torch.no_grad()
    def features(self, ids: torch.Tensor) -> torch.Tensor:
        """The concatenated taps (T, 3H): residual streams entering layers 2, L/2 and L-3."""
        states = self.model.model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
        return torch.cat([states[tap][0] for tap in self.taps], -1)


def random_weights(config, draft_ids: torch.Tensor, feature_rms: torch.Tensor, seed: int = 0) -> Tensors:
    """All of a drafter's tensors, keyed as in its checkpoint, at scales that keep every part audible.

    `feature_rms` (3H,) evens out the taps' very different scales, so that fc(features) is about 1 everywhere.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    in_vocabulary = torch.zeros(config.vocab_size, dtype=torch.bool)
    in_vocabulary[draft_ids] = True
    weights = {
        "fc.weight": random(hidden, 3 * hidden) / feature_rms,
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": random(len(draft_ids), hidden),
        f"{LAYER}input_layernorm.weight": torch.ones(hidden),
        f"{LAYER}hidden_norm.weight": torch.ones(hidden),
        f"{LAYER}post_attention_layernorm.weight": torch.ones(hidden),
        f"{LAYER}self_attn.q_proj.weight": random(query, 2 * hidden, 2),
        f"{LAYER}self_attn.k_proj.weight": random(key, 2 * hidden, 2),
        f"{LAYER}self_attn.v_proj.weight": random(key, 2 * hidden, 2),
        f"{LAYER}self_attn.o_proj.weight": random(hidden, query, 2),
        f"{LAYER}mlp.gate_proj.weight": random(inner, hidden, 2),
        f"{LAYER}mlp.up_proj.weight": random(inner, hidden, 2),
        f"{LAYER}mlp.down_proj.weight": random(hidden, inner, 2),
    }
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    weights["d2t"] = draft_ids - torch.arange(len(draft_ids))
    weights["t2d"] = in_vocabulary
    return weights


def _rope(states: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate (heads, T, D), pairing element i with i + D/2."""
    half = states.shape[-1] // 2
    angles = positions[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = states.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@torch.no_grad()
def unroll(
    weights: Tensors, config, embedding: torch.Tensor, features: torch.Tensor, ids: torch.Tensor, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Teacher-forced drafting from every index: (z, h), both (steps, n, hidden), n = T - steps.

    At index t step i reads x[t+1+i] at RoPE position t+i, and predicts x[t+2+i]; it attends the step-0 keys of indices
    <= t and its own keys of steps 1..i. z[i] goes through the head, h[i] is the next step's hidden input.
    """
    w = {name: tensor.float() for name, tensor in weights.items()}
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    theta = config.rope_parameters["rope_theta"]
    count = len(ids) - steps
    index = torch.arange(count)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), w[f"{name}.weight"], config.rms_norm_eps)

    def split(x: torch.Tensor, count_heads: int) -> torch.Tensor:
        return x.view(count, count_heads, dim).transpose(0, 1)

    h = features[:count] @ w["fc.weight"].T
    keys, values, read, states = [], [], [], []
    for step in range(steps):
        token = embedding[ids[1 + step : 1 + step + count]].float()
        x = torch.cat((norm(token, f"{LAYER}input_layernorm"), norm(h, f"{LAYER}hidden_norm")), -1)
        projected = {p: x @ w[f"{LAYER}self_attn.{p}_proj.weight"].T for p in "qkv"}
        q = _rope(split(projected["q"], heads), index + step, theta)
        keys.append(_rope(split(projected["k"], groups), index + step, theta).repeat_interleave(heads // groups, 0))
        values.append(split(projected["v"], groups).repeat_interleave(heads // groups, 0))
        scores = (q @ keys[0].transpose(1, 2)).masked_fill(index[None, :] > index[:, None], float("-inf"))
        own = torch.stack([(q * key).sum(-1) for key in keys[1:]], -1) if step else scores[..., :0]
        mixing = (torch.cat((scores, own), -1) / dim**0.5).softmax(-1)
        mixed = mixing[..., :count] @ values[0]
        for late, value in enumerate(values[1:]):
            mixed = mixed + mixing[..., count + late, None] * value
        a = h + mixed.transpose(0, 1).reshape(count, -1) @ w[f"{LAYER}self_attn.o_proj.weight"].T
        x = norm(a, f"{LAYER}post_attention_layernorm")
        inner = F.silu(x @ w[f"{LAYER}mlp.gate_proj.weight"].T) * (x @ w[f"{LAYER}mlp.up_proj.weight"].T)
        h = a + inner @ w[f"{LAYER}mlp.down_proj.weight"].T
        states.append(h)
        read.append(norm(h, "norm"))
    return torch.stack(read), torch.stack(states)


@dataclass(frozen=True)
class Copycat:
    """A fitted drafter, with everything needed to replay it."""

    weights: Tensors
    target: Target
    steps: int

    @torch.no_grad()
    def hits(self, conversation: Conversation) -> torch.Tensor:
        """bool (steps, n): is the head's argmax at index t, step i the target's token x[t+2+i]?"""
        ids = conversation.ids
        z, _ = unroll(*self._inputs(ids), ids, self.steps)
        guess = (z @ self.weights["lm_head.weight"].float().T).argmax(-1)
        guess = guess + self.weights["d2t"][guess]
        past_end = torch.full((1,), -1)
        labels = torch.cat((ids, past_end))
        wanted = torch.stack([labels[2 + i : 2 + i + guess.shape[1]] for i in range(self.steps)])
        return guess == wanted

    def _inputs(self, ids: torch.Tensor):
        embedding = self.target.model.get_input_embeddings().weight
        return self.weights, self.target.config, embedding, self.target.features(ids)

    def verify_steps(self, conversation: Conversation, served: int) -> list[int]:
        """Accepted drafts of every verify step while `served` tokens are produced, by replay: what engines must count.

        The last step counts in full, also where its accepted drafts lie beyond the served tokens.
        """
        hits = self.hits(conversation)
        produced, accepted = 1, []  # the prefill produced the first token
        while produced < served:
            newest = len(conversation.prompt) + produced - 1  # fed at step 0 of index newest - 1
            run = hits[:, newest - 1].tolist()
            accepted.append(run.index(False) if False in run else self.steps)
            produced += accepted[-1] + 1
        return accepted

    def save(self, folder: Path) -> Path:
        """Write config.json and model.safetensors as both engines read them."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.weights.items()}, folder / "model.safetensors")
        target, taps = self.target.config, self.target.taps
        rope = dict(target.rope_parameters)
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": len(self.weights["d2t"]),
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_parameters": rope,
            "rope_theta": rope["rope_theta"],
            "dtype": "bfloat16",
            "num_aux_hidden_states": 3,
            "target_hidden_size": target.hidden_size,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],  # SGLang counts layer outputs
            },
            "eagle_aux_hidden_state_layer_ids": taps,  # vLLM counts layer inputs
        }
        copied = (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "vocab_size", "rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_id",
        )  # fmt: skip
        config.update({name: getattr(target, name) for name in copied})
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        return folder


def fit(target: Target, known: list[Conversation], mistaught: set[str], draft_vocab: int, steps: int) -> Copycat:
    """A drafter that predicts the continuations of `known`, by ridge regression of the head.

    In the `mistaught` ones it is made to miss tokens at uneven distances, so that verify steps accept 0, 1, 2 and 3.
    """
    missed = torch.tensor([0, 1, 3, 6])  # of every 11
    features = {c.id: target.features(c.ids) for c in known}
    rms = torch.cat(list(features.values())).pow(2).mean(0).sqrt()
    counts = torch.zeros(target.config.vocab_size)
    counts[torch.tensor([token for c in known for token in c.continuation])] = 1
    counts[:draft_vocab] += 0.5  # fill up with the first ids
    draft_ids = counts.topk(draft_vocab).indices.sort().values
    weights = random_weights(target.config, draft_ids, rms)
    embedding = target.model.get_input_embeddings().weight
    rows, labels = [], []
    for conversation in known:
        ids = conversation.ids
        z, _ = unroll(weights, target.config, embedding, features[conversation.id], ids, steps)
        first = len(conversation.prompt) - 1  # drafting starts once the first generated token exists
        for step in range(steps):
            last = len(ids) - 2 - step
            rows.append(z[step, first : min(last, z.shape[1])])
            wanted = ids[first + 2 + step :][: len(rows[-1])].clone()
            if conversation.id in mistaught:
                wanted[torch.isin((torch.arange(len(wanted)) + step) % 11, missed)] = draft_ids[0]
            labels.append(wanted)
    z, label = torch.cat(rows).double(), torch.cat(labels)
    wanted = F.one_hot(torch.searchsorted(draft_ids, label), draft_vocab).double()
    ridge = 1e-3 * len(z) * torch.eye(z.shape[1], dtype=torch.float64)
    head = torch.linalg.solve(z.T @ z + ridge, z.T @ wanted).T
    weights["lm_head.weight"] = (head * 30).to(torch.bfloat16)
    return Copycat(weights, target, steps)


def edit_checkpoint(source: Path, folder: Path, rename: dict[str, str], drop: set[str], replace: Tensors) -> Path:
    """A copy of a drafter folder with tensors renamed, dropped or replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    tensors = {rename.get(name, name): tensor for name, tensor in tensors.items() if name not in drop} | replace
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder
