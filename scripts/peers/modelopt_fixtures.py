"""Tiny drafters that Model-Optimizer's own classes hold and its own exporter writes. Run by make_fixtures.sh.

The target's model is converted by `modelopt.torch.speculative.convert` with the EAGLE-3 recipe, changed in sizes and
in the base of RoPE alone, and exported by `export_speculative_decoding`, which replaces the RoPE by YaRN.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import modelopt.torch.speculative as mtsp
import tiny
import torch
from modelopt.torch.export import export_speculative_decoding
from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG
from transformers import LlamaConfig, LlamaForCausalLM


def main(out: Path) -> None:
    """Write `modelopt-plain` into `out`."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**tiny.TARGET)).bfloat16()
    recipe = copy.deepcopy(EAGLE3_DEFAULT_CFG["config"])
    recipe["eagle_architecture_config"] |= {
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "draft_vocab_size": tiny.DRAFT, "rope_theta": 5e6,
        "rope_scaling": {"rope_type": "default", "rope_theta": 5e6},
    }  # fmt: skip
    mtsp.convert(base, [("eagle", recipe)])
    tiny.fill(base.eagle_module, 0)
    # The maps of its tools are in order of frequency.
    order = torch.randperm(tiny.DRAFT, generator=torch.Generator().manual_seed(4))
    base.eagle_module.d2t.copy_((torch.arange(tiny.DRAFT) * 4 + 1)[order] - torch.arange(tiny.DRAFT))
    export_speculative_decoding(base, export_dir=out / "modelopt-plain")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
