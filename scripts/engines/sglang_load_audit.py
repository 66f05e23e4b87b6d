"""Ask SGLang itself what it makes of drafter checkpoints: its real classes, its real load_weights, no server.

    sglang_load_audit.py --target DIR --out audit.json --drafter DIR [DIR ...] [--forward] [--golden in.safetensors]

SGLang loads a drafter without complaint when tensors are missing or misnamed. Here every parameter is filled with NaN
first, so that what load_weights did, and did not do, can be read off. audit.json: {"reports": [one per drafter]}; every
report lists "faults" in words (none: a good drafter), and the exit code is 1 when there is any.

--forward runs the engine's own forward of every drafter without unwritten parameters on random inputs; --golden that
of the last one on `features` (T, 3H) and `token_ids` (T + steps - 1). A report's "golden" names the file that holds
inputs and outputs (audit_common.run_chain).

Runs under the engine's Python and sets up the rest by itself; scripts/audit_sglang.sh builds that Python first.
"""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import audit_common
import child
import serve_common
import torch
import torch.nn.functional as F

UNUSED_BY_DESIGN = "t2d"  # SGLang drops it knowingly; it lets the d2t be checked
EMBEDDING = "model.embed_tokens.weight"
FUSED = ("q_a_proj", "kv_a_proj_with_mqa")  # SGLang writes the two of them at once, when it has seen both


def main() -> int:
    options = audit_common.parse(audit_common.argument_parser("SGLang"))
    log = options.out.with_suffix(".log")
    log.write_text("")
    with child.output_to(log):
        import sglang

        start_sglang(options.target, options.drafter[0])
        embedding = audit_common.read_target_embedding(options.target)
        reports = [audit(folder, options, embedding) for folder in options.drafter]
    return audit_common.finish(sglang.__version__, reports, options)


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
    _let_latent_attention_run_on_a_cpu()


def _let_latent_attention_run_on_a_cpu() -> None:
    """What stands in the way of `Eagle3DeepseekV2ForCausalLM` on a CPU and has nothing to do with the drafter.

    set_embed waits for a GPU; the CPU's factory of rotary embeddings knows `deepseek_yarn` alone, and its YaRN class
    turns neighbours on a CPU even where rope_interleave is false. The GPU's factory and the plain turn of the base
    class take their place.
    """
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.models import deepseek_v2

    torch.cuda.synchronize = lambda *_: None

    def get_rope(*arguments, device=None, **options):
        rotary = factory.get_rope(*arguments, **options)
        rotary._forward_method = lambda *states: RotaryEmbedding.forward_native(rotary, *states)
        return rotary

    deepseek_v2.get_rope_wrapper = get_rope


def audit(folder: Path, options, embedding: torch.Tensor) -> dict[str, Any]:
    """Load one drafter the way the engine does and report on every key and every parameter."""
    report: dict[str, Any] = {"drafter": str(folder), "faults": []}
    faults = report["faults"]
    try:
        model, config, report["config"] = build(folder, options.target)
        report["keys"] = load(model, config)
    except Exception as error:
        faults.append(audit_common.refusal("SGLang", error))
        return report
    share_with_target(model, options.target, embedding)
    report["parameters"] = [name for name, _ in model.named_parameters()]
    unwritten = {name: f"{count} of {size}" for name, (count, size) in _unwritten(model).items() if count}
    report["never_written"] = unwritten
    report["hot_token_id"] = summarise_hot_tokens(model, folder)
    for key, written in report["keys"].items():
        if not written and key != UNUSED_BY_DESIGN:
            faults.append(f"{key}: SGLang ignores this tensor, no parameter of the class has that name")
    for name, amount in unwritten.items():
        faults.append(f"{name}: {amount} elements are in no tensor of the checkpoint, left uninitialised")
    faults += report["hot_token_id"].pop("faults")
    if not unwritten:
        columns, vocabulary = model.model.fc.weight.shape[1], model.config.vocab_size
        inputs = audit_common.forward_inputs(options, folder, columns, vocabulary, config.context_len)
        try:
            if inputs is not None:
                report["golden"] = audit_common.save_golden(options, folder, forward(model, inputs))
        except Exception as error:
            report["forward_error"] = audit_common.refusal("SGLang", error)
    return report


def build(folder: Path, target: Path) -> tuple[torch.nn.Module, Any, dict[str, Any]]:
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
    derived = {
        "architecture": architecture,
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "context_length": config.context_len,
        "vocab_size": config.hf_config.vocab_size,
        "draft_vocab_size": config.hf_config.draft_vocab_size,
    }
    return model, config, derived


def share_with_target(model: torch.nn.Module, target: Path, embedding: torch.Tensor) -> None:
    """What the draft worker does after loading: the target's embedding, and its head where the drafter borrows it."""
    weight = model.model.embed_tokens.weight
    shared = torch.nn.Parameter(embedding.to(weight.dtype), requires_grad=False)
    if getattr(model, "load_lm_head_from_target", False):
        head = audit_common.read_target_head(target).to(weight.dtype)
        model.set_embed_and_head(shared, torch.nn.Parameter(head, requires_grad=False))
    else:
        model.set_embed(shared)


def _unwritten(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """For every parameter: (elements that are still NaN, elements)."""
    return {name: (int(p.isnan().sum()), p.numel()) for name, p in model.named_parameters()}


def load(model: torch.nn.Module, config) -> dict[str, list[str]]:
    """Feed the class's load_weights from the engine's own loader; for every key, the parameters that it changed."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    changed: dict[str, list[str]] = {}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        before, hot = _unwritten(model), model.hot_token_id
        for key, tensor in DefaultModelLoader(LoadConfig())._get_all_weights(config, model):
            yield key, tensor
            after = _unwritten(model)
            changed[key] = [name for name in after if after[name] != before[name]]
            if model.hot_token_id is not hot:
                changed[key].append("<hot_token_id>")
            before, hot = after, model.hot_token_id

    model.load_weights(tensors())
    fused = [key for key in changed if key.split(".")[-2:-1] and key.split(".")[-2] in FUSED]
    for key in fused:
        changed[key] = sorted({name for other in fused for name in changed[other]})
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


class _Attention:
    """The attention back end of `forward`: one request. Its name sends latent attention the way of any GPU's decode."""

    prefill_attention_backend_str = decode_attention_backend_str = "triton"

    def __init__(self) -> None:
        self.cache = audit_common.CausalCache()

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options):
        query = q.reshape(len(q), layer.tp_q_head_num, layer.qk_head_dim)
        key = k.reshape(len(k), layer.tp_k_head_num, layer.qk_head_dim)
        value = v.reshape(len(v), layer.tp_v_head_num, layer.v_head_dim)
        return self.cache.attend(query, key, value, layer.scaling)


@torch.inference_mode()
def forward(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Draft along given tokens with the engine's own class (audit_common.run_chain)."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    def step(tokens: torch.Tensor, fed: torch.Tensor, positions: torch.Tensor, first: bool):
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            mm_input_embeds=None,
            extend_prefix_lens_cpu=None,
            attn_cp_metadata=None,
            contains_mm_inputs=lambda: False,
            spec_info=SimpleNamespace(hidden_states=fed),
        )
        read, (state,) = model.model(tokens, positions, batch)
        return F.linear(read, model.lm_head.weight[: model.config.draft_vocab_size]), state

    with forward_context(ForwardContext(attn_backend=_Attention())):
        return audit_common.run_chain(step, inputs)


if __name__ == "__main__":
    serve_common.run_with(SGLANG_USE_CPU_ENGINE="1", PYTHONPATH=str(Path(__file__).resolve().parent / "sglang_cpu"))
    sys.exit(main())
