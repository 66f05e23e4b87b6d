"""Kimi-K2.5 in miniature: transformers' own classes, the real nesting, key names, token ids and 61 layers, all thin.

Only widths and the number of experts are small (and the experts are not quantised); the compressed keys and values have
their real width, 512 + 64, as engines' kernels know no other. The vocabulary has all 163,840 ids,
so that special tokens have the real ones; the tokenizer's own are bytes and a few merges. The template is our own text
and behaves as the real one does: an answer before the last finished one loses its reasoning, answers that end in tool
calls keep theirs until the user speaks again, the prompt opens `<think>`, and with `thinking: false` closes it too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.tiny_target import WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB, BASE = 163_840, 163_584
"""All ids, and how many of them come before the special ones."""

SPECIAL = {
    "[BOS]": 163_584, "[EOS]": 163_585, "<|im_end|>": 163_586, "<|im_user|>": 163_587, "<|im_assistant|>": 163_588,
    "[EOT]": 163_593, "<|im_system|>": 163_594, "<|im_middle|>": 163_601, "<|media_begin|>": 163_602,
    "<|media_content|>": 163_603, "<|media_end|>": 163_604, "<|media_pad|>": 163_605, "[UNK]": 163_838, "[PAD]": 163_839,
}  # fmt: skip
"""Tokens that decoding with skip_special_tokens leaves out."""

MARKUP = {
    "<|tool_calls_section_begin|>": 163_595, "<|tool_calls_section_end|>": 163_596, "<|tool_call_begin|>": 163_597,
    "<|tool_call_argument_begin|>": 163_598, "<|tool_call_end|>": 163_599, "<think>": 163_606, "</think>": 163_607,
}  # fmt: skip
"""Tokens of their own that belong to an answer's text."""

CHAT_TEMPLATE = """\
{%- macro opened(message) -%}
<|im_{{ message.role if message.role in ('user', 'assistant') else 'system' }}|>
{{- message.name or message.role }}<|im_middle|>
{%- endmacro -%}
{%- macro said(message, thought) -%}
<think>{{ thought }}</think>{{ message.content or '' }}
{%- if message.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{%- if call.function.arguments is string %}{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif -%}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
{%- endmacro -%}
{%- set finished = namespace(last=-1) -%}
{%- for message in messages if message.role == 'assistant' and not message.tool_calls -%}
{%- set finished.last = messages.index(message) -%}
{%- endfor -%}
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif -%}
{%- for message in messages -%}
{{- opened(message) -}}
{%- if message.role == 'assistant' -%}
{%- set kept = loop.index0 > finished.last and thinking is not false -%}
{{- said(message, (message.reasoning_content or '') if kept else '') -}}
{%- elif message.role == 'tool' -%}
## Return of {{ message.tool_call_id }}
{{ message.content }}
{%- else -%}
{{ message.content }}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>{{ '<think></think>' if thinking is defined and thinking is false else '<think>' }}
{%- endif -%}
"""

TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "attention_bias": False, "hidden_act": "silu",
    "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 61,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 64, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
    "vocab_size": VOCAB, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5, "rope_theta": 50_000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False, "bos_token_id": SPECIAL["[BOS]"], "eos_token_id": SPECIAL["[EOS]"],
    "pad_token_id": SPECIAL["[PAD]"], "dtype": "float32", "use_cache": True,
}  # fmt: skip

CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": TEXT,
    "vision_config": {
        "model_type": "kimi_k25_vision", "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
        "num_hidden_layers": 1, "patch_size": 14, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 2,
        "merge_kernel_size": [2, 2],
    },
    "projection_hidden_size": 16, "media_placeholder_token_id": SPECIAL["<|media_pad|>"],
    "image_token_id": SPECIAL["<|media_pad|>"], "tie_word_embeddings": False, "bos_token_id": SPECIAL["[BOS]"],
    "eos_token_id": SPECIAL["[EOS]"], "pad_token_id": SPECIAL["[PAD]"], "dtype": "float32",
}  # fmt: skip


def make_kimi_mini(path: Path, seed: int = 0) -> Path:
    """Write the target, float32 and about 45 MB, to `path`; equal seeds give equal bytes."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, Kimi_K25ForConditionalGeneration

    path.mkdir(parents=True)
    write(path / "config.json", CONFIG)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Kimi_K25ForConditionalGeneration(AutoConfig.from_pretrained(path)).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.copy_(1.0 + 0.2 * torch.randn(parameter.shape))
                elif "language_model" in name:
                    parameter.mul_(6.0)
            head = model.lm_head.weight
            head.mul_(10.0)
            head[128:].mul_(0.1)  # a random head over all ids would hesitate between near-ties at every token
            head[SPECIAL["<|im_end|>"]].mul_(13.0)
    model.save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    save_file(
        {published(name): weight for name, weight in weights.items()}, path / "model.safetensors", {"format": "pt"}
    )
    write(path / "config.json", CONFIG)  # the class's own form drops `kimi_k2` and the legacy RoPE keys
    write(path / "generation_config.json", {"eos_token_id": SPECIAL["<|im_end|>"], "max_length": 262_144})
    make_kimi_tokenizer().save_pretrained(path)
    return path


def published(name: str) -> str:
    """A weight's name in the published checkpoint; transformers 5.24 reads those names, and writes some of them wrong."""
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
    name = name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")
    return name.removeprefix("model.") if name.startswith("model.mm_projector.") else name


def make_kimi_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and some merges, filled up to 163,584 ids, and the 256 special ones behind them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    small = Tokenizer(models.BPE())
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    small.train_from_iterator(
        [WORDS], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(small.to_str())["model"]
    vocab = model["vocab"] | {f"unused {number}": number for number in range(len(model["vocab"]), BASE)}
    core = Tokenizer(models.BPE(vocab, [tuple(pair) for pair in model["merges"]]))
    core.pre_tokenizer, core.decoder = small.pre_tokenizer, decoders.ByteLevel()
    names = {number: name for name, number in (SPECIAL | MARKUP).items()}
    added = [names.get(number, f"<|reserved_token_{number}|>") for number in range(BASE, VOCAB)]
    core.add_tokens([AddedToken(name, normalized=False, special=name not in MARKUP) for name in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="[BOS]", eos_token="[EOS]", pad_token="[PAD]", unk_token="[UNK]",
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1))
