"""Load what `draftsmith convert` wrote with a peer's own drafter class, and compare every tensor with the file's.

python load_written.py speculators|specforge FOLDER TARGET       in that peer's environment, see load_written.sh
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def main(peer: str, folder: Path, target: Path) -> str:
    """What was loaded, in one line.

    Raises:
        AssertionError: a tensor was ignored, is missing, or has other values than the file's.
    """
    if peer == "speculators":
        from speculators.models.eagle3 import Eagle3DraftModel

        net, info = Eagle3DraftModel.from_pretrained(str(folder), dtype=torch.bfloat16), None
    else:
        from specforge.modeling.auto import AutoDraftModel

        net, info = AutoDraftModel.from_pretrained(str(folder), dtype=torch.bfloat16, output_loading_info=True)
        net.load_embedding(str(target))
        assert not info["unexpected_keys"] and set(info["missing_keys"]) <= {"embed_tokens.weight"}, info
    held, written = net.state_dict(), load_file(folder / "model.safetensors")
    # Frozen parts of the target, which its trainer fetches from there.
    rest = held.keys() - written.keys() - {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    if json.loads((folder / "config.json").read_text())["draft_vocab_size"] == len(held["embed_tokens.weight"]):
        rest -= {"d2t", "t2d"}
    assert not written.keys() - held.keys(), f"ignored: {written.keys() - held.keys()}"
    assert not rest, f"not in the file: {rest}"
    for name, value in written.items():
        assert torch.equal(held[name].to(value.dtype), value), name
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    shared = torch.equal(held["embed_tokens.weight"].to(embedding.dtype), embedding)
    said = "the target's" if shared else "NOT the target's"
    return f"{folder.name}: {type(net).__name__}, {len(written)} tensors equal bit by bit; embedding {said}"


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
