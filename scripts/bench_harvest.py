"""What harvesting costs beside the target's plain forward passes, writer included; bytes a token; reading speed.

    python scripts/bench_harvest.py [--device cuda|cpu] [--target DIR | --shape NAME] [--tokens N] [--folder DIR]

Plain forward and harvest run the same token-budget batches of the same random conversations in one process, in turns,
and the better of two rounds counts for each. `--shape` makes a random target of that size on the device (nothing is
downloaded); `--head` lets the plain forward compute the logits too, as `model(input_ids)` does. Reading is that of the
stores that were written, off the cold disk: bench_reading.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_reading
import numpy as np
import torch
from bench_reading import WINDOW

from draftsmith.configs.console import out, table
from draftsmith.configs.drafter import default_taps
from draftsmith.configs.schema import TargetSection
from draftsmith.data.codec import Codec
from draftsmith.data.harvest import plan_batches
from draftsmith.data.rows import Task
from draftsmith.data.shard_queue import Piece, ShardQueue
from draftsmith.data.store import Provenance, StoredConversation
from draftsmith.data.store_writer import StoreWriter, plan_shards
from draftsmith.data.target_model import LoadedTarget, load_target
from draftsmith.data.trunk import Trunk

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 1024},
    "smollm2-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                     "num_key_value_heads": 3, "vocab_size": 49152},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "vocab_size": 151936},
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "vocab_size": 128256},
    "qwen3-32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
                  "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip
"""Llama configurations of known sizes."""


@dataclass(frozen=True)
class Work:
    """Random conversations, and their batches by shard."""

    pieces: list[list[Piece]]
    lengths: list[int]
    shards: list[range]
    batches: list[list[list[int]]]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def make_target(options: argparse.Namespace, device: torch.device) -> LoadedTarget:
    if options.target:
        return load_target(TargetSection(path=options.target), "bfloat16")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[options.shape], max_position_embeddings=32768, dtype="bfloat16")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(before)
    import inspect

    cache = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"
    return LoadedTarget(
        model=model, trunk=model.model, layers=model.model.layers, norm=model.model.norm, head=model.lm_head,
        device=device, dtype=torch.bfloat16, cache_argument=cache,
    )  # fmt: skip


def make_work(options: argparse.Namespace, vocab: int) -> Work:
    """Greedy conversations of about log-normal lengths, half of them generated; every 16th is four windows long."""
    dice = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < options.tokens:
        length = int(np.clip(dice.lognormal(np.log(options.length), 0.5), 16, 8 * options.length))
        lengths.append(length if len(lengths) % 16 else max(length, min(4 * WINDOW, options.tokens // 4)))
    shards = plan_shards(lengths, options.shard_tokens)
    pieces = []
    for shard in shards:
        pieces.append([])
        for place, index in enumerate(shard):
            generated = np.arange(lengths[index]) >= lengths[index] // 2
            about = StoredConversation(
                id=f"c{index}", length=lengths[index], generated=int(generated.sum()), greedy=True
            )
            ids = dice.integers(0, vocab, lengths[index], dtype=np.int32)
            pieces[-1].append(Piece(about, place, ids, generated, np.zeros(0, dtype=np.int64)))
    batches = [plan_batches([lengths[index] for index in shard], options.batch_tokens) for shard in shards]
    return Work(pieces, lengths, shards, batches)


def plain(target: LoadedTarget, work: Work, *, head: bool) -> None:
    """The same batches through the target, nothing kept."""
    for pieces, batches in zip(work.pieces, work.batches, strict=True):
        for batch in batches:
            width = max(len(pieces[place].ids) for place in batch)
            ids = np.zeros((len(batch), width), dtype=np.int64)
            for row, place in enumerate(batch):
                ids[row, : len(pieces[place].ids)] = pieces[place].ids
            tensor = torch.from_numpy(ids)
            if target.device.type == "cuda":
                tensor = tensor.pin_memory().to(target.device, non_blocking=True)
            with torch.no_grad():
                (target.model if head else target.trunk)(input_ids=tensor, use_cache=False)


def harvest(target: LoadedTarget, work: Work, path: Path, codec: Codec, taps: tuple[int, ...], hidden: int) -> None:
    """The whole way of `draftsmith harvest` behind the loading of target and conversations."""
    provenance = Provenance(
        target={}, target_mark="bench", taps=taps, hidden_size=hidden, vocab_size=1 << 20, computed_in="bfloat16",
        stored_in=codec, source="bench", planned=len(work.lengths), max_length=max(work.lengths), shard_tokens=1 << 30,
    )  # fmt: skip
    trunk = Trunk(target, taps, codec, None)
    with StoreWriter(path, provenance) as writer, ShardQueue(writer) as queue:
        for number, (pieces, batches) in enumerate(zip(work.pieces, work.batches, strict=True)):
            queue.open(number, [len(piece.ids) for piece in pieces])
            for batch in batches:
                chosen = [pieces[place] for place in batch]
                queue.put(chosen, trunk.run(Task([one.ids for one in chosen], [one.wanted for one in chosen])))
            queue.close()


def timed(device: torch.device, work: Callable[[], None]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def rounds(options: argparse.Namespace, device: torch.device, folder: Path) -> Iterator[dict[str, Any]]:
    target = make_target(options, device)
    config = target.model.config.get_text_config()
    taps, hidden = default_taps(config.num_hidden_layers), config.hidden_size
    work = make_work(options, config.vocab_size)
    plain(
        target, make_work(argparse.Namespace(**vars(options) | {"tokens": 2000}), config.vocab_size), head=options.head
    )
    times: dict[str, list[float]] = {"plain": [], "bfloat16": [], "fp8": []}
    for _ in range(options.rounds):
        times["plain"].append(timed(device, lambda: plain(target, work, head=options.head)))
        for codec in ("bfloat16", "fp8"):
            path = folder / codec
            shutil.rmtree(path, ignore_errors=True)
            times[codec].append(timed(device, lambda c=codec, p=path: harvest(target, work, p, c, taps, hidden)))  # type: ignore[misc]
    best = {name: min(found) for name, found in times.items()}
    for codec in ("bfloat16", "fp8"):
        path = folder / codec
        files = sorted(path.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        yield {
            "codec": codec,
            "tokens": work.tokens,
            "plain_tokens_per_second": round(work.tokens / best["plain"]),
            "harvest_tokens_per_second": round(work.tokens / best[codec]),
            "share_of_plain": round(best["plain"] / best[codec], 3),
            "bytes_per_token": round(size / work.tokens, 1),
            "written_MB_per_second": round(size / best[codec] / 1e6),
            **(bench_reading.measure(path, options.reading_rounds) if options.reading_rounds else {}),
            "seconds": {name: [round(one, 2) for one in found] for name, found in times.items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--target", type=Path, help="a target's folder")
    parser.add_argument("--shape", default="smollm2-135m", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, help="default: 400,000 on a GPU, 20,000 on a CPU")
    parser.add_argument("--length", type=int, default=1024, help="median length of a conversation")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--shard-tokens", type=int, help="default: 32,768 on a GPU, 131,072 on a CPU")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--reading-rounds", type=int, default=3, help="0: the stores are not read")
    parser.add_argument("--head", action="store_true", help="the plain forward computes logits too")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    options.tokens = options.tokens or (400_000 if options.device == "cuda" else 20_000)
    options.shard_tokens = options.shard_tokens or (32_768 if options.device == "cuda" else 131_072)
    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = list(rounds(options, device, Path(folder)))
    keys = [key for key in results[0] if key not in ("codec", "seconds", "shares_of_rounds")]
    rows = [[key.replace("_", " "), *(f"{one[key]:,}" for one in results)] for key in keys]
    title = f"{options.target or options.shape} on {name}, torch {torch.__version__}, batches of {options.batch_tokens:,} tokens"
    out.print(table(title, ["", *(one["codec"] for one in results)], rows))
    if options.json:
        options.json.write_text(
            json.dumps({"on": title, "arguments": sys.argv[1:], "results": results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
