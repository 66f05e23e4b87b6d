"""Stand-in for `sgl_kernel`, the compiled operators of SGLang's CPU engine, in plain PyTorch.

SGLang ships a CPU engine (`SGLANG_USE_CPU_ENGINE=1`, attention back end `intel_amx`), but no package registry carries
a CPU build of its operator library. This package defines the operators that a dense Llama-style target and an EAGLE-3
drafter call at tensor parallel size 1, with the names, signatures and in-place effects of the originals.

Real when an engine runs on it: scheduler, EAGLE worker, model classes, weight loading, KV pool, draft and verify data
flow, counters, HTTP server. Replaced: the arithmetic of attention, norms, RoPE, SiLU and packed linear layers
(`_dense`, `_attention`), and the bookkeeping of draft trees and cache slots (`_speculative`). A run on it therefore
proves a checkpoint, its config and the data flow; it says nothing about SGLang's CUDA kernels or their speed.

Everything is computed in float32 and rounded once to the caller's dtype. Operators of features that are not covered
(mixture of experts, vision, quantisation, sliding-window sinks) are absent or refuse to run, never approximated.
"""

from . import _attention, _dense  # noqa: F401  (importing them registers torch.ops.sgl_kernel.*)
from ._registry import declare_unused
from ._speculative import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.0.0+pytorch"

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

# SGLang's model files look these up at import time, whatever model is served.
declare_unused(
    "apply_rotary_pos_emb_cpu",
    "causal_conv1d_fwd_cpu",
    "causal_conv1d_update_cpu",
    "chunk_gated_delta_rule_cpu",
    "conv3d_embed_cpu",
    "flash_attn_varlen_func",
    "fused_dual_residual_rmsnorm_cpu",
    "fused_gdn_gating_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_sigmoid_mul_cpu",
)
