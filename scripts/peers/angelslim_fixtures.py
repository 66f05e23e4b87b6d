"""A tiny drafter that AngelSlim's own class holds, saved as its trainer does. Run by make_fixtures.sh.

The 0.5.0 wheel cannot be imported as it is: `angelslim.compressor` imports its package qat, which the wheel lacks. The
packages above the drafter's are therefore entered without their `__init__`; the drafter's own modules run unchanged.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import tiny

PACKAGE = "angelslim.compressor.speculative.train"


def entered(package: str, root: Path) -> None:
    """Make a package and those above it importable, without running what their `__init__` imports."""
    parts = package.split(".")
    for depth in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:depth]))
        module.__path__ = [str(root.joinpath(*parts[1:depth]))]
        sys.modules[module.__name__] = module


def main(out: Path, target: Path) -> None:
    """Write `angelslim-plain` into `out`."""
    root = Path(find_spec("angelslim").origin).parent
    for package in ("models.draft", "data"):
        entered(f"{PACKAGE}.{package}", root)
    import_module(f"{PACKAGE}.models.draft.llama_eagle3")  # registers the class
    factory = import_module(f"{PACKAGE}.models.draft.draft_model_factory")
    file = out / "draft-config.json"
    fields = tiny.DRAFTER | {
        "architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": tiny.DRAFT,
        "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    file.write_text(json.dumps(fields))
    net = factory.create_draft_model(factory.DraftModelConfig.from_file(file))
    file.unlink()
    tiny.fill(net, 0)
    net.load_embed_weights(str(target), "model.embed_tokens.weight")
    net.freeze_embed_weights()
    for name, value in tiny.maps().items():
        getattr(net, name).copy_(value)
    # The trainer leaves the frozen embedding out in the same way.
    net.save_pretrained(
        out / "angelslim-plain",
        state_dict={key: value for key, value in net.state_dict().items() if "embed" not in key},
    )
    table = net.midlayer.self_attn.rotary_emb.inv_freq
    print("rotary base that training uses:", float(table[1] ** -(net.config.head_dim / 2)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
