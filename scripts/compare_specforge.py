"""The same harvest, batches, steps and draft vocabulary, trained by our loss and by SpecForge's own: which accepts more?

    python scripts/compare_specforge.py RUN.yaml --peer-folder DIR --seeds 0,1 [--variants ours,specforge,float8] [--out FILE]

RUN.yaml's conversations, store and draft vocabulary must exist. SpecForge's side is its PyPI package: its
`LlamaForCausalLMEagle3` with the sdpa back end, `OnlineEagle3Model`, `TargetHead` and `Eagle3TrainStrategy.forward_loss` on
batches padded as its collator pads them; its Triton loss is replaced by the eager reference that stands beside it in its own
source, since no GPU is needed here. Both start from the same weights and take the same AdamW steps with the same learning
rates and clipping. Each drafter's accept length is then counted by `draftsmith evaluate`'s replay on held-out conversations.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.configs.schema import RunConfig, load_config
from draftsmith.train.batch import Window, pack
from draftsmith.train.evaluate import replay, summarize
from draftsmith.train.initial import build_drafter
from draftsmith.train.inputs import Inputs, read_inputs
from draftsmith.train.loader import Loader
from draftsmith.train.model import Drafter
from draftsmith.train.plan import load_window, plan_windows, step_counts
from draftsmith.train.step import learning_rate
from draftsmith.train.unroll import Unroll, loss_coefficients

Loss = Callable[[list[Window], list[int]], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--peer-folder", type=Path, default=None, help="folder that holds the package specforge")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--variants", default="ours,specforge,float8")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    found = []
    for seed in options.seeds.split(","):
        config = load_config(options.config, [*options.overrides, f"train.seed={seed}"])
        inputs = read_inputs(config)
        for variant in options.variants.split(","):
            began = time.monotonic()
            drafter = train(config, inputs, variant, options.peer_folder)
            chains = replay(drafter, inputs.targets, inputs.heldout, config.evaluate.draft_steps, 4096, quiet=True)  # type: ignore[arg-type]
            figures = summarize(chains, config.evaluate.draft_steps)
            item = {
                "seed": int(seed), "variant": variant, "accept_length": figures.as_served.accept_length,
                "per_position": figures.as_served.accept_per_position, "interval": figures.as_served.interval,
                "all_positions": figures.all_positions.accept_length, "acc": figures.acc,
                "minutes": (time.monotonic() - began) / 60,
            }  # fmt: skip
            found.append(item)
            print(json.dumps(item), flush=True)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1) + "\n")


def train(config: RunConfig, inputs: Inputs, variant: str, peer_folder: Path | None) -> Drafter:
    """The drafter that one variant's loss makes of the same start, batches and steps."""
    settings = config.train
    head = inputs.target.require("head").load().float()
    embedding = inputs.target.require("embedding").load().float()
    drafter = build_drafter(inputs.spec, inputs.target, embedding, inputs.targets, settings)
    if variant == "specforge":
        module, loss = specforge_loss(config, inputs, drafter, head, embedding, peer_folder)
    else:
        module, loss = our_loss(config, inputs, drafter, head, float8=variant == "float8")
    windows = plan_windows(
        inputs.train, min(settings.max_length, settings.batch_tokens), settings.unroll_steps, settings.mask
    )
    loader = Loader(inputs.train, windows, settings, inputs.spec, rank=0, processes=1, accumulation=1)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
    )
    for step, (_, refs) in enumerate(loader.plan):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(loader), settings)
        read = [load_window(inputs.train, ref, settings.unroll_steps) for ref in refs]
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bfloat16"):
            value = loss(read, step_counts(refs, settings.unroll_steps))
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, settings.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"# {variant} step {step} of {len(loader)}, loss {value.item():.4f}", file=sys.stderr, flush=True)
    if variant == "specforge":
        own = module.draft_model.state_dict()
        drafter.load_state_dict({name: own[name].float() for name in drafter.state_dict()})
    return drafter


def our_loss(
    config: RunConfig, inputs: Inputs, drafter: Drafter, head: Tensor, *, float8: bool
) -> tuple[torch.nn.Module, Loss]:
    settings = config.train
    unroll = Unroll(drafter, head[inputs.targets], inputs.targets, float8=float8)

    def loss(windows: list[Window], counts: list[int]) -> Tensor:
        batch = pack(windows, settings.unroll_steps, settings.mask)
        return unroll(batch, loss_coefficients(counts, settings.step_decay))[0]

    return unroll, loss


def specforge_loss(
    config: RunConfig, inputs: Inputs, drafter: Drafter, head: Tensor, embedding: Tensor, folder: Path | None
) -> tuple[Any, Loss]:
    """The peer's model with our first weights, and its loss on padded conversations."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True
    if folder is not None:
        sys.path.insert(0, str(folder))
    stand_in_for_triton()
    from specforge.algorithms.eagle3 import model as peer_model
    from specforge.core.loss import _compute_loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.strategies.base import Eagle3TrainStrategy
    from transformers import LlamaConfig

    peer_model.LogSoftmaxLoss = types.SimpleNamespace(apply=_compute_loss)
    spec, settings = inputs.spec, config.train
    sizes = {
        "hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": spec.num_attention_heads, "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim, "vocab_size": spec.vocab_size, "hidden_act": "silu", "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "rope_theta": spec.rope.theta, "pad_token_id": None,
    }  # fmt: skip
    described = LlamaConfig(**sizes)
    described.draft_vocab_size, described.target_hidden_size = spec.draft_vocab_size, spec.target_hidden_size
    described.pretraining_tp, described.rope_theta = 1, spec.rope.theta
    draft = LlamaForCausalLMEagle3(described, attention_backend="sdpa").float()
    ours = drafter.state_dict()
    unlike = draft.load_state_dict(ours, strict=False)
    assert not unlike.unexpected_keys and set(unlike.missing_keys) <= {"embed_tokens.weight", "t2d", "d2t"}, unlike
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(embedding)
        draft.t2d.copy_(inputs.vocab.t2d)
        draft.d2t.copy_(inputs.vocab.d2t)
    draft.freeze_embedding()
    with tempfile.TemporaryDirectory() as place:
        LlamaConfig(**sizes).save_pretrained(place)
        target_head = TargetHead(place)
    target_head = target_head.float()
    with torch.no_grad():
        target_head.fc.weight.copy_(head)
    target_head.freeze_weights()
    model = peer_model.OnlineEagle3Model(draft_model=draft, length=settings.unroll_steps, attention_backend="sdpa")
    model.train()
    strategy = Eagle3TrainStrategy(model, target_head=target_head, ploss_decay=settings.step_decay)

    def loss(windows: list[Window], counts: list[int]) -> Tensor:
        longest = max(len(window.ids) for window in windows)

        def padded(tensors: list[Tensor]) -> Tensor:
            return torch.stack([torch.cat([t, t.new_zeros(longest - len(t), *t.shape[1:])]) for t in tensors])

        batch = TrainBatch(
            sample_ids=[str(number) for number in range(len(windows))],
            strategy="eagle3",
            tensors={
                "input_ids": padded([w.ids for w in windows]),
                "attention_mask": padded([torch.ones_like(w.ids) for w in windows]),
                "loss_mask": padded([w.generated.long() for w in windows]),
                "hidden_state": padded([w.taps.flatten(1).float() for w in windows]),
                "target": padded([w.final.float() for w in windows]),
            },
            metadata={"target_repr": "hidden_state"},
        )
        return strategy.forward_loss(batch).loss

    return model, loss


def stand_in_for_triton() -> None:
    """An importable `triton` where there is none: the peer's kernels are defined with it and never called here."""
    try:
        import triton  # noqa: F401
    except ImportError:
        module, language = types.ModuleType("triton"), types.ModuleType("triton.language")
        module.jit = lambda function: function  # type: ignore[attr-defined]
        language.constexpr = object  # type: ignore[attr-defined]
        module.language = language  # type: ignore[attr-defined]
        sys.modules |= {"triton": module, "triton.language": language}


if __name__ == "__main__":
    main()
