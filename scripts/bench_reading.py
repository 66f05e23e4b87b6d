"""How fast random windows of 4,096 rows come off a cold store, beside the disk's own sequential reading of the same files.

    python scripts/bench_reading.py [--store DIR | --gigabytes G --hidden H --codec bf16|fp8] [--rounds N] [--folder DIR]

Without `--store` one of random bytes is written first. A round drops the files from the page cache (fsync, then
posix_fadvise), asks the kernel with mincore that nothing is left, reads them from end to end, drops them again, and reads
every window once in random order. Both happen in turns and medians count, since disks of shared
machines change their speed from second to second. The drop reaches this machine's memory, not a cache of the disk's host.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.configs.console import out, table
from draftsmith.data.codec import Codec, layout
from draftsmith.data.store import HarvestReader, Provenance, StoredConversation
from draftsmith.data.store_writer import StoreWriter

WINDOW = 4096
"""Rows of a random read."""

SHARD_BYTES = 1_000_000_000
TAPS = (2, 16, 29)


def drop(files: list[Path]) -> None:
    """Have the system forget what it keeps of these files in memory.

    Raises:
        SystemExit: it still has more than one page in a hundred.
    """
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    left = resident(files)
    if left > 0.01:
        raise SystemExit(f"{left:.0%} of the files' pages stayed in memory: this would measure no disk")


def resident(files: list[Path]) -> float:
    """Share of the files' pages that are in memory, by mincore."""
    libc, pages, held = ctypes.CDLL(None, use_errno=True), 0, 0
    for file in files:
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            states = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
            view = np.frombuffer(mapped, dtype=np.uint8)
            where, size = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped))
            if libc.mincore(where, size, ctypes.c_void_p(states.ctypes.data)):
                raise SystemExit(f"mincore: {os.strerror(ctypes.get_errno())}")
            del view
            pages, held = pages + len(states), held + int((states & 1).sum())
    return held / pages


def sequential(files: list[Path]) -> float:
    """Bytes a second of reading whole files in pieces of 8 MiB."""
    total, buffer = 0, memoryview(bytearray(8 << 20))
    began = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as handle:
            while count := handle.readinto(buffer):
                total += count
    return total / (time.perf_counter() - began)


def windows(path: Path, *, decoded: bool = False) -> float:
    """Bytes of the store a second when every window of 4,096 rows is read once, in random order."""
    reader = HarvestReader(path)
    each = sum(shard.bytes for shard in reader.manifest.shards) / reader.manifest.tokens
    long = [index for index, length in enumerate(reader.lengths) if length >= WINDOW] or list(range(len(reader)))
    places = [(index, start) for index in long for start in range(0, reader.lengths[index], WINDOW)]
    random.Random(0).shuffle(places)
    total, began = 0, time.perf_counter()
    for index, start in places:
        stop = min(start + WINDOW, reader.lengths[index])
        (reader.window if decoded else reader.stored)(index, start, stop)
        total += int((stop - start) * each)
    return total / (time.perf_counter() - began)


def measure(path: Path, rounds: int) -> dict[str, Any]:
    """Figures of one store, cold and then warm."""
    files = sorted(path.glob("*.safetensors"))
    found: dict[str, list[float]] = {"sequential": [], "windows": []}
    for _ in range(rounds):
        drop(files)
        found["sequential"].append(sequential(files))
        drop(files)
        found["windows"].append(windows(path))
    shares = [one / other for one, other in zip(found["windows"], found["sequential"], strict=True)]
    return {
        "sequential_MB_per_second": round(statistics.median(found["sequential"]) / 1e6),
        "windows_MB_per_second": round(statistics.median(found["windows"]) / 1e6),
        "windows_share_of_sequential": round(statistics.median(shares), 2),
        "shares_of_rounds": [round(share, 2) for share in shares],
        "warm_windows_MB_per_second": round(windows(path) / 1e6),
        "warm_windows_as_bf16_MB_per_second": round(windows(path, decoded=True) / 1e6),
    }


def make_store(path: Path, codec: Codec, hidden: int, size: float) -> Path:
    """A store of random bytes: conversations of two windows, shards of about a gigabyte."""
    widths = {
        name: one.dtype.itemsize * int(np.prod(one.shape)) for name, one in layout(codec, len(TAPS), hidden).items()
    }
    length = 2 * WINDOW
    count = max(2, round(size / (sum(widths.values()) * length)))
    a_shard = max(1, round(SHARD_BYTES / (sum(widths.values()) * length)))
    provenance = Provenance(
        target={}, target_mark="bench", taps=TAPS, hidden_size=hidden, vocab_size=1 << 20, computed_in="bfloat16",
        stored_in=codec, source="bench", planned=count, max_length=length, shard_tokens=a_shard * length,
    )  # fmt: skip
    dice = np.random.default_rng(0)
    with StoreWriter(path, provenance) as writer:
        for number, first in enumerate(range(0, count, a_shard)):
            part = range(first, min(first + a_shard, count))
            shard = writer.shard(number, [length] * len(part)).open()
            for place, index in enumerate(part):
                ids = np.zeros(length, dtype=np.int32)
                states = {
                    name: np.frombuffer(dice.bytes(length * width), dtype=np.uint8).reshape(length, width)
                    for name, width in widths.items()
                }
                about = StoredConversation(id=f"c{index}", length=length, generated=0, greedy=True)
                shard.put(place, about, ids, ids.astype(bool), ids, states)
            writer.record(shard.close())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="read this one")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--codec", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder, which may be memory")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        codec: Codec = "fp8" if options.codec == "fp8" else "bfloat16"
        path = options.store or make_store(Path(folder) / "store", codec, options.hidden, options.gigabytes * 1e9)
        found = measure(path, options.rounds)
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    out.print(table(f"{size / 1e9:.2f} GB of {path}", ["", ""], [[key, str(value)] for key, value in found.items()]))
    if options.json:
        options.json.write_text(json.dumps({"bytes": size, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
