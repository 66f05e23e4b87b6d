"""SpecForge's own EAGLE-3 training step, timed for `bench_train.py` on the same dimensions; nothing of it is kept here."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch


class SpecForge:
    """The peer's `LlamaForCausalLMEagle3` with flex attention, `OnlineEagle3Model`, `TargetHead` with its full vocabulary,
    `Eagle3TrainStrategy.forward_loss` and `BF16Optimizer`, on one GPU without a wrapper; random weights."""

    name = "SpecForge"

    def __init__(self, options: argparse.Namespace, lengths: list[int]) -> None:
        if options.peer_folder:
            sys.path.insert(0, str(options.peer_folder))
        warnings.filterwarnings("ignore", message="flash_attn is not found")
        from specforge.algorithms.eagle3.model import OnlineEagle3Model
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
        from specforge.modeling.target.target_head import TargetHead
        from specforge.optimizer import BF16Optimizer
        from specforge.runtime.contracts import TrainBatch
        from specforge.training.strategies.base import Eagle3TrainStrategy
        from transformers import LlamaConfig

        torch.manual_seed(0)
        sizes = {
            "hidden_size": options.hidden, "intermediate_size": options.intermediate, "num_hidden_layers": 1,
            "num_attention_heads": options.heads, "num_key_value_heads": options.kv_heads, "head_dim": options.head_dim,
            "vocab_size": options.vocab, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "max_position_embeddings": max(lengths) + 64, "tie_word_embeddings": False, "attention_bias": False,
            "mlp_bias": False, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
        }  # fmt: skip
        config = LlamaConfig(**sizes)
        config.draft_vocab_size, config.target_hidden_size = options.draft_vocab, options.hidden
        config.pretraining_tp = 1
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            draft = LlamaForCausalLMEagle3(config, attention_backend="flex_attention")
            with tempfile.TemporaryDirectory() as folder:
                LlamaConfig(**sizes).save_pretrained(folder)
                head = TargetHead(folder)
            torch.set_default_dtype(torch.float32)
        draft, head = draft.to("cuda", torch.bfloat16), head.to("cuda", torch.bfloat16)
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
            ids = torch.randperm(options.vocab, device="cuda")[: options.draft_vocab].sort().values
            draft.t2d.zero_()
            draft.t2d[ids] = True
            draft.d2t.copy_(ids - torch.arange(options.draft_vocab, device="cuda"))
            head.fc.weight.normal_(0, 0.02)
            head.fc.weight[ids] *= 4  # the draft vocabulary wins every argmax, so that every position carries loss
        draft.freeze_embedding()
        head.freeze_weights()
        head.eval()
        model = OnlineEagle3Model(
            draft_model=draft, length=options.unroll_steps, attention_backend="flex_attention"
        ).to("cuda", torch.bfloat16)
        model.train()
        self.options, self.draft, self.head, self.model = options, draft, head, model
        self.make_batch, self.make_strategy, self.make_optimizer = TrainBatch, Eagle3TrainStrategy, BF16Optimizer

    def step(self, length: int, *, optimizer: bool = False) -> Callable[[], None]:
        """One forward and backward pass over a conversation of random states, or a whole optimiser step."""
        hidden, vocab = self.options.hidden, self.options.vocab
        batch = self.make_batch(
            sample_ids=["0"],
            strategy="eagle3",
            tensors={
                "input_ids": torch.randint(0, vocab, (1, length), device="cuda"),
                "attention_mask": torch.ones(1, length, dtype=torch.long, device="cuda"),
                "loss_mask": torch.ones(1, length, dtype=torch.long, device="cuda"),
                "hidden_state": torch.randn(1, length, 3 * hidden, device="cuda", dtype=torch.bfloat16),
                "target": torch.randn(1, length, hidden, device="cuda", dtype=torch.bfloat16),
            },
            metadata={"target_repr": "hidden_state"},
        )
        strategy = self.make_strategy(self.model, target_head=self.head, compact_teacher=False)
        stepper = self.make_optimizer(self.draft, lr=1e-6, total_steps=1000) if optimizer else None

        def step() -> None:
            strategy.forward_loss(batch).loss.backward()
            if stepper is not None:
                stepper.step()
            self.draft.zero_grad(set_to_none=True)

        return step
