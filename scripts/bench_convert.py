"""How fast a drafter converts, beside `cp` of the same bytes on the same disk in the same run; and what verify takes.

    python scripts/bench_convert.py [--gigabytes 4] [--folder DIR] [--source-dtype bfloat16]

Makes a drafter of Kimi-K2.5's width whose draft vocabulary fills the size asked for, converts it, copies the result with
`cp` followed by `sync` of the copy (conversion, too, is done only when all is on disk), alternating, three times each.
Memory is the child process's own peak (ru_maxrss); the largest tensor is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HIDDEN, INTERMEDIATE, HEADS, DIM, LAYERS, VOCAB = 7168, 18432, 64, 128, 61, 163840
CHILD = """
import json, resource, sys, time
from pathlib import Path
start = time.perf_counter()
from draftsmith.convert.{module} import {verb}
loaded = time.perf_counter()
{call}
print(json.dumps({{"seconds": time.perf_counter() - start, "work": time.perf_counter() - loaded,
                   "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the converted file, 10^9 bytes")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; default: a temporary folder")
    parser.add_argument("--source-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        run(Path(place), options.gigabytes, options.source_dtype, options.rounds)


def run(place: Path, gigabytes: float, dtype: str, rounds: int) -> None:
    target, source, largest = make_target(place / "target"), place / "source", 0
    draft, largest = make_drafter(source, gigabytes, dtype)
    out, copy = place / "out", place / "copy.safetensors"
    converted, copied, bare, peaks = [], [], [], []
    for _ in range(rounds):
        shutil.rmtree(out, ignore_errors=True)
        result = child("write", "convert", f"convert(Path({str(source)!r}), Path({str(target)!r}), Path({str(out)!r}))")
        converted.append(result["work"])
        peaks.append(result["peak"])
        copy.unlink(missing_ok=True)
        start = time.perf_counter()
        subprocess.run(["cp", str(out / "model.safetensors"), str(copy)], check=True)
        bare.append(time.perf_counter() - start)
        subprocess.run(["sync", str(copy)], check=True)
        copied.append(time.perf_counter() - start)
    size = (out / "model.safetensors").stat().st_size
    checked = [child("verify", "verify", f"verify(Path({str(out)!r}), Path({str(target)!r}))") for _ in range(rounds)]
    fast, slow = statistics.median(converted), statistics.median(copied)
    print(
        f"drafter: {size / 1e9:.2f} GB ({dtype} -> bfloat16), draft vocabulary {draft:,}, largest tensor {largest / 1e6:,.0f} MB"
    )
    print(f"convert:  {fast:6.2f} s  {size / 1e6 / fast:7,.0f} MB/s  {spread(converted)}")
    print(f"cp+sync:  {slow:6.2f} s  {size / 1e6 / slow:7,.0f} MB/s  {spread(copied)}")
    print(
        f"cp alone: {statistics.median(bare):6.2f} s  {size / 1e6 / statistics.median(bare):7,.0f} MB/s (page cache, not on disk)"
    )
    print(f"convert / cp+sync: {slow / fast:.2f}x the speed (wanted: 0.8)")
    print(f"peak memory: {max(peaks) / 1e6:,.0f} MB (wanted: at most {(largest * 1.2 + 300e6) / 1e6:,.0f} MB)")
    seconds = [entry["seconds"] for entry in checked]
    print(
        f"verify: {statistics.median(seconds):.2f} s with Python's start of the module (wanted: under 2), {checked[0]['work']:.3f} s of work"
    )


def spread(seconds: list[float]) -> str:
    return "(" + ", ".join(f"{value:.2f}" for value in seconds) + ")"


def child(module: str, verb: str, call: str) -> dict[str, float]:
    """Run one verb in a process of its own and return its seconds and peak memory."""
    code = CHILD.format(module=module, verb=verb, call=call)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def make_target(folder: Path) -> Path:
    """A Kimi-K2.5 config without weights."""
    folder.mkdir()
    text = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
            "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "dtype": "bfloat16", "model_type": "kimi_k2"}  # fmt: skip
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_drafter(folder: Path, gigabytes: float, dtype: str) -> tuple[int, int]:
    """Random weights; returns the draft vocabulary and the bytes of the largest tensor."""
    query = HEADS * DIM
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.hidden_norm.weight": (HIDDEN,), "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (query, 2 * HIDDEN), "midlayer.self_attn.k_proj.weight": (query, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (query, 2 * HIDDEN), "midlayer.self_attn.o_proj.weight": (HIDDEN, query),
        "midlayer.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN), "midlayer.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }  # fmt: skip
    fixed = 2 * sum(int(np.prod(shape)) for shape in shapes.values())
    draft = min(VOCAB, max(1000, int((gigabytes * 1e9 - fixed) / (2 * HIDDEN))))
    shapes["lm_head.weight"] = (draft, HIDDEN)
    width = 2 if dtype == "bfloat16" else 4
    header, end = {}, 0
    for name, shape in shapes.items():
        first, end = end, end + width * int(np.prod(shape))
        header[name] = {"dtype": "BF16" if width == 2 else "F32", "shape": list(shape), "data_offsets": [first, end]}
    ids = np.linspace(0, VOCAB - 1, draft).astype(np.int64)
    d2t = ids - np.arange(draft)
    header["d2t"] = {"dtype": "I64", "shape": [draft], "data_offsets": [end, end + d2t.nbytes]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    folder.mkdir()
    random = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32) * 0.02
    block = random.tobytes() if width == 4 else (random.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    with (folder / "model.safetensors").open("wb") as handle:
        handle.write(len(head).to_bytes(8, "little") + head)
        left = end
        while left:
            handle.write(block[:left])
            left -= min(left, len(block))
        handle.write(d2t.tobytes())
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
              "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM,
              "vocab_size": VOCAB, "draft_vocab_size": draft, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
              "rope_theta": 50000.0, "dtype": dtype, "num_hidden_layers": 1,
              "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    subprocess.run(["sync", str(folder / "model.safetensors")], check=True)
    return draft, width * max(int(np.prod(shape)) for shape in shapes.values())


if __name__ == "__main__":
    main()
