"""Ask SGLang itself what it makes of drafter checkpoints: its real classes, its real load_weights, no server.

    sglang_load_audit.py --target DIR --out audit.json --drafter DIR [DIR ...] [--golden in.safetensors]

SGLang loads a drafter without complaint when tensors are missing or misnamed. Here every parameter is filled with NaN
first, so that what load_weights did, and did not do, can be read off. audit.json: {"reports": [one per drafter]}; every
report lists "faults" in words (none: a good drafter), and the exit code is 1 when there is any.

--golden runs the engine's own forward of the (last named, faultless) drafter: the file holds `features` (T, 3H) and
`token_ids` (T + steps - 1): token i is fed at position i; the first T with features, the rest one by one, each with the
previous step's hidden state. Written to OUT with suffix .golden.safetensors, float32: `prefill_logits` (T, D),
`prefill_hidden` (T, H), `logits` (steps, D), `hidden` (steps, H), the latter two at the chain of the last index.

Runs under the engine's Python with scripts/engines/sglang_cpu on PYTHONPATH and SGLANG_USE_CPU_ENGINE=1:
scripts/audit_sglang.sh sets that up.
"""

import os
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import audit_common
import child
import serve_common
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

UNUSED_BY_DESIGN = "t2d"  # SGLang drops it knowingly; it lets the d2t be checked


def main() -> int:
    parser = audit_common.argument_parser("SGLang")
    parser.add_argument("--golden", type=Path, help="safetensors file of features and token_ids: run the forward too")
    options = audit_common.parse(parser)
    log = options.out.with_suffix(".log")
    log.write_text("")
    reports, model = [], None
    with child.output_to(log):
        import sglang

        embedding = read_target_embedding(options.target)
        start_sglang(options.target, options.drafter[0])
        for folder in options.drafter:
            report, model = audit(folder, options.target, embedding)
            reports.append(report)
    if options.golden:
        if model is None or reports[-1]["faults"]:
            serve_common.fail(f"--golden: {options.drafter[-1]} has faults, nothing to run: {reports[-1]['faults']}")
        run_golden(model, options.golden, options.out.with_suffix(".golden.safetensors"))
    return audit_common.finish(sglang.__version__, reports, options.out)


def read_target_embedding(target: Path) -> torch.Tensor:
    """The target's input embedding (V, H), which the engine shares with the drafter."""
    name = "model.embed_tokens.weight"
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118  (a safetensors file is not iterable)
                return file.get_tensor(name)
    return serve_common.fail(f"{target}: no safetensors file there holds {name}")


def _server_args(target: Path, drafter: Path):
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=str(target),
        device="cpu",
        dtype="float32",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(drafter),
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
    )


def start_sglang(target: Path, drafter: Path) -> None:
    """What the engine sets up before it builds a model: its published arguments and a process group of one."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish, reset_context

    reset_context()
    publish(_server_args(target, drafter), role="test", ranks=SpawnRanks(world_rank=0, dp_rank=None))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    parallel_state.initialize_model_parallel(backend="gloo")


def audit(folder: Path, target: Path, embedding: torch.Tensor) -> tuple[dict[str, Any], torch.nn.Module | None]:
    """Load one drafter the way the engine does and report on every key and every parameter."""
    report: dict[str, Any] = {"drafter": str(folder), "faults": []}
    try:
        model, report["config"] = build(folder, target)
        report["keys"] = load(model, folder)
    except Exception as error:
        traceback.print_exc()
        report["faults"].append(f"SGLang refuses it: {type(error).__name__}: {error}")
        return report, None
    model.set_embed(torch.nn.Parameter(embedding.to(model.model.embed_tokens.weight.dtype), requires_grad=False))
    unwritten = {name: f"{count} of {size}" for name, (count, size) in _unwritten(model).items() if count}
    report["never_written"] = unwritten
    report["hot_token_id"] = summarise_hot_tokens(model, folder)
    for key, written in report["keys"].items():
        if not written and key != UNUSED_BY_DESIGN:
            report["faults"].append(f"{key}: SGLang ignores this tensor, no parameter of the class has that name")
    for name, amount in unwritten.items():
        report["faults"].append(f"{name}: {amount} elements are in no tensor of the checkpoint, left uninitialised")
    report["faults"] += report["hot_token_id"].pop("faults")
    return report, model


def build(folder: Path, target: Path) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The class that the engine picks for this config, with every parameter NaN, and what it derived on the way."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.registry import ModelRegistry

    config = ModelConfig.from_server_args(_server_args(target, folder), model_path=str(folder), is_draft_model=True)
    cls, architecture = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
    default = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        model = cls(config.hf_config)
    finally:
        torch.set_default_dtype(default)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model, {
        "architecture": architecture,
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "context_length": config.context_len,
        "vocab_size": config.hf_config.vocab_size,
        "draft_vocab_size": config.hf_config.draft_vocab_size,
    }


def _unwritten(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """For every parameter: (elements that are still NaN, elements)."""
    return {name: (int(p.isnan().sum()), p.numel()) for name, p in model.named_parameters()}


def load(model: torch.nn.Module, folder: Path) -> dict[str, list[str]]:
    """Run the class's load_weights on the folder; for every checkpoint key, the parameters that it changed."""
    changed: dict[str, list[str]] = {}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        before, hot = _unwritten(model), model.hot_token_id
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118  (a safetensors file is not iterable)
                    yield key, file.get_tensor(key)
                    after = _unwritten(model)
                    changed[key] = [name for name in after if after[name] != before[name]]
                    if model.hot_token_id is not hot:
                        changed[key].append("<hot_token_id>")
                    before, hot = after, model.hot_token_id

    model.load_weights(tensors())
    return changed


def summarise_hot_tokens(model: torch.nn.Module, folder: Path) -> dict[str, Any]:
    """The target ids of the draft ids as SGLang derived them from d2t, checked against the vocabulary and t2d."""
    vocabulary, drafts = model.config.vocab_size, model.config.draft_vocab_size
    hot = model.hot_token_id
    if hot is None:
        missing = [f"d2t: absent, so draft ids 0..{drafts - 1} would be taken for target ids"]
        return {"present": False, "faults": missing if drafts < vocabulary else []}
    faults = audit_common.target_id_faults(hot, vocabulary, folder)
    if len(hot) != drafts:
        faults.append(f"d2t: {len(hot)} entries, draft_vocab_size is {drafts}")
    return {
        "present": True,
        "dtype": str(hot.dtype),
        "count": len(hot),
        "smallest": hot.min().item(),
        "largest": hot.max().item(),
        "faults": faults,
    }


class _CausalAttention:
    """The attention back end of run_golden: one request, keys kept in order of arrival."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        self.keys.append(k)
        self.values.append(v)
        key, value = torch.cat(self.keys).transpose(0, 1), torch.cat(self.values).transpose(0, 1)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).transpose(0, 1)
        seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(key.shape[1] - query.shape[1])
        mixed = F.scaled_dot_product_attention(query, key, value, seen, scale=layer.scaling, enable_gqa=True)
        return mixed.transpose(0, 1).reshape(q.shape[0], -1)


@torch.inference_mode()
def run_golden(model: torch.nn.Module, inputs: Path, out: Path) -> None:
    """Draft along given tokens with the engine's own class (layout: module docstring)."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    given = load_file(inputs)
    features, tokens = given["features"].float(), given["token_ids"].long()
    count = len(features)
    logits, hidden = [], []
    with forward_context(ForwardContext(attn_backend=_CausalAttention())):
        fed = features
        for first, last in [(0, count)] + [(i, i + 1) for i in range(count, len(tokens))]:
            batch = SimpleNamespace(
                forward_mode=ForwardMode.DECODE,
                mm_input_embeds=None,
                contains_mm_inputs=lambda: False,
                spec_info=SimpleNamespace(hidden_states=fed),
            )
            read, (state,) = model.model(tokens[first:last], torch.arange(first, last), batch)
            logits.append(F.linear(read, model.lm_head.weight))
            hidden.append(state.clone())
            fed = state[-1:].clone()
    save_file(
        {
            "prefill_logits": logits[0].contiguous(),
            "prefill_hidden": hidden[0].contiguous(),
            "logits": torch.stack([step[-1] for step in logits]),
            "hidden": torch.stack([step[-1] for step in hidden]),
        },
        out,
    )


if __name__ == "__main__":
    sys.exit(main())
