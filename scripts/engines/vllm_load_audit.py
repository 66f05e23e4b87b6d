"""Ask vLLM itself what it makes of drafter checkpoints: its real EAGLE-3 classes, its real loader, no target.

    vllm_load_audit.py --target DIR --out audit.json --drafter DIR [DIR ...] [--forward] [--golden in.safetensors]

vLLM refuses tensors that it does not know, but says nothing about missing ones. Here every parameter is filled with a
mark before load_weights, so that what was left unwritten can be read off. audit.json: {"reports": [one per drafter]};
every report lists "faults" in words (none: a good drafter), and the exit code is 1 when there is any.

--forward and --golden run the engine's own forward as sglang_load_audit.py does. The class, its layers and operators
are vLLM's; attention itself, which needs a KV cache and a scheduler's metadata, is audit_common.CausalCache.

Runs under the engine's Python and sets up the rest by itself; scripts/audit_vllm.sh builds that Python first.
"""

import argparse
import functools
import socket
import sys
import time
from pathlib import Path
from typing import Any

import audit_common
import child
import serve_common
import torch

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNSET_ID = -1
TIME_LIMIT = 300  # seconds a drafter


def main() -> int:
    options = audit_common.parse(audit_common.argument_parser("vLLM"))
    child.end_on_signals()
    log = options.out.with_suffix(".log")
    log.write_text("")
    with child.output_to(log):  # imported before the audits are forked, so that it is done once for all of them
        import vllm
        import vllm.engine.arg_utils
        import vllm.model_executor.model_loader
        import vllm.model_executor.models.deepseek_eagle3
        import vllm.model_executor.models.llama_eagle3
        import vllm.v1.worker.cpu_model_runner

    vllm.v1.worker.cpu_model_runner._set_torch_accelerator_to_noop()  # as the CPU's model runner does
    reports = []
    for folder in options.drafter:
        work = functools.partial(audit, options, folder)
        try:
            reports.append(child.run_in_child(work, log, time.monotonic() + TIME_LIMIT, f"vLLM with {folder}"))
        except child.ChildError as error:
            serve_common.fail(str(error))
    return audit_common.finish(vllm.__version__, reports, options)


def audit(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Load one drafter the way the engine does and report on every parameter."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    report: dict[str, Any] = {"drafter": str(folder), "faults": []}
    faults = report["faults"]
    try:
        config = EngineArgs(
            model=str(options.target),
            dtype="float32",
            max_num_seqs=1,
            enforce_eager=True,
            skip_tokenizer_init=True,
            speculative_config={"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3},
        ).create_engine_config()
        with set_current_vllm_config(config):
            _start_process_group()
            model, report["never_written"], ignored = load(config, options.target)
    except Exception as error:
        faults.append(audit_common.refusal("vLLM", error))
        return report
    draft = config.speculative_config.draft_model_config
    report["config"] = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "context_length": draft.max_model_len,
        "vocab_size": draft.hf_config.vocab_size,
        "draft_vocab_size": draft.hf_config.draft_vocab_size,
    }
    for name in ignored:
        faults.append(f"{name}: vLLM ignores this tensor, no parameter of the class has that name")
    for name, amount in report["never_written"].items():
        faults.append(f"{name}: {amount} elements are in no tensor of the checkpoint, left as they were")
    faults += _target_id_faults(model, folder)
    if not report["never_written"]:
        columns = model.model.fc.input_size
        context = config.model_config.max_model_len
        inputs = audit_common.forward_inputs(options, folder, columns, draft.hf_config.vocab_size, context)
        try:
            if inputs is not None:
                with set_current_vllm_config(config):
                    report["golden"] = audit_common.save_golden(options, folder, forward(model, inputs))
        except Exception as error:
            report["forward_error"] = audit_common.refusal("vLLM", error)
    return report


def _start_process_group() -> None:
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
    ensure_model_parallel_initialized(1, 1)


def load(config, target: Path) -> tuple[torch.nn.Module, dict[str, str], list[str]]:
    """The drafter by the engine's own loader, its parameters that no tensor wrote, and the tensors that it dropped."""
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.model_executor.models import utils

    draft = config.speculative_config.draft_model_config
    cls, _ = get_model_architecture(draft)
    load_weights, left, ignored = cls.load_weights, {}, []
    tolerates, renames = utils.AutoWeightsLoader._can_ignore_unexpected, utils.WeightsMapper._map_name_with_shard

    def watched(model, weights):
        for parameter in model.parameters():
            parameter.data.fill_(float("nan") if parameter.is_floating_point() else UNSET_ID)
        loaded = load_weights(model, weights)
        left.update(_unwritten(model))
        share_with_target(model, target)
        return loaded

    def tolerates_noted(loader, name: str) -> bool:
        tolerated = tolerates(loader, name)
        if tolerated:
            ignored.append(name.removesuffix("."))
        return tolerated

    def renames_noted(mapper, name: str):
        renamed = renames(mapper, name)
        if renamed is None:
            ignored.append(name)
        return renamed

    cls.load_weights = watched
    utils.AutoWeightsLoader._can_ignore_unexpected = tolerates_noted
    utils.WeightsMapper._map_name_with_shard = renames_noted
    return get_model(vllm_config=config, model_config=draft), left, list(dict.fromkeys(ignored))


def _unwritten(model) -> dict[str, str]:
    """Parameters with elements that still hold their mark, apart from those that vLLM takes from the target."""
    left = {}
    for name, parameter in model.named_parameters():
        if _from_target(model, name):
            continue
        marked = parameter.isnan() if parameter.is_floating_point() else parameter == UNSET_ID
        count = int(marked.sum())
        if count == parameter.numel() or (count and parameter.is_floating_point()):
            left[name] = f"{count} of {parameter.numel()}"
    return left


def _from_target(model, name: str) -> bool:
    """Whether vLLM takes a parameter from the target, as it may: where the checkpoint has none and the sizes agree."""
    config = model.config
    if name == EMBEDDING:
        same_width = getattr(config, "target_hidden_size", None) in (None, config.hidden_size)
        return same_width and not getattr(model, "has_own_embed_tokens", False)
    whole = config.draft_vocab_size == config.vocab_size
    return name == HEAD and whole and not getattr(model, "has_own_lm_head", False)


def share_with_target(model, target: Path) -> None:
    """Fill in what the engine takes from the target."""
    for name, read in ((EMBEDDING, audit_common.read_target_embedding), (HEAD, audit_common.read_target_head)):
        if _from_target(model, name):
            model.get_parameter(name).data.copy_(read(target))


def _target_id_faults(model, folder: Path) -> list[str]:
    offsets = model.draft_id_to_target_id
    if offsets is None or bool((offsets == UNSET_ID).all()):
        return []
    return audit_common.target_id_faults(torch.arange(len(offsets)) + offsets.data, model.config.vocab_size, folder)


def _replace_attention(model) -> None:
    """Put one request's attention in the place of the engine's, in grouped-query and in latent layers.

    Latent layers turn queries (rows, heads, dim) by vLLM's own PyTorch RoPE: its compiled operator for the CPU gives
    other values for three dimensions than for two (vLLM 0.32, RoPE without YaRN), which says nothing of the GPU's.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

    cache = audit_common.CausalCache()

    def grouped(layer, query, key, value, *_, **options):
        q, k, v = (
            states.view(len(states), heads, -1)
            for states, heads in (
                (query, layer.num_heads), (key, layer.num_kv_heads), (value, layer.num_kv_heads),
            )
        )  # fmt: skip
        return cache.attend(q, k, v, layer.impl.scale)

    def latent(layer, query, compressed, rotated, *_, **options):
        expanded = layer.kv_b_proj(compressed)[0].view(len(query), layer.num_heads, -1)
        key, value = expanded.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=-1)
        key = torch.cat((key, rotated.expand(-1, layer.num_heads, -1)), dim=-1)
        return cache.attend(query, key, value, layer.scale)

    for module in model.modules():
        for kind, stand_in in ((Attention, grouped), (MLAAttention, latent)):
            if isinstance(module, kind):
                module.forward = functools.partial(stand_in, module)
        if isinstance(module, MultiHeadLatentAttentionWrapper):
            module.rotary_emb.forward = module.rotary_emb.forward_native


@torch.inference_mode()
def forward(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Draft along given tokens with the engine's own class (audit_common.run_chain)."""
    _replace_attention(model)
    offsets = model.draft_id_to_target_id
    columns = slice(None) if offsets is None else torch.arange(len(offsets)) + offsets.data

    def step(tokens: torch.Tensor, fed: torch.Tensor, positions: torch.Tensor, first: bool):
        hidden = model.combine_hidden_states(fed) if first else fed
        read, state = model(tokens, positions, hidden)
        return model.compute_logits(read)[:, columns], state

    return audit_common.run_chain(step, inputs)


if __name__ == "__main__":
    serve_common.run_with(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine must start inside the audited process
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        PYTHONPATH="",
    )
    sys.exit(main())
