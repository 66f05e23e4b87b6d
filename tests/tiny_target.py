"""A tiny random Llama target with a byte-level tokenizer and a ChatML template, made in code in about a second."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2."""

END_OF_TURN = 2

WORDS = (
    "the quick brown fox jumps over the lazy dog while system user assistant messages ask and answer questions about "
    "numbers words colours rivers cities cooking music history physics and gardens in short and long sentences"
)


def make_tiny_target(
    path: Path, *, tied: bool = False, seed: int = 0, vocab_size: int = 512, num_layers: int = 8
) -> Path:
    """Write a float32 target to `path`: hidden 64, 4 heads, 2 KV heads, head_dim 32, every norm weight off one.

    Weights are scaled so that greedy text varies and ends by itself now and then; equal arguments give equal bytes.

    Args:
        tied: share embedding and head (no lm_head.weight in the file).
        vocab_size: at least 300 (256 bytes, 3 special tokens, some merges); ids above the tokenizer's own are unused.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tiny_tokenizer(min(vocab_size, 400))
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(1.0 + 0.3 * torch.randn(parameter.shape, generator=generator))
            elif not name.startswith("lm_head"):
                parameter.mul_(5.0)
            else:
                parameter.mul_(10.0)
        model.get_output_embeddings().weight[END_OF_TURN].mul_(1.6)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_tiny_tokenizer(vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a sentence, with the ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([WORDS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
