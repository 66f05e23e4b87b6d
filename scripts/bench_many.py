"""Memory and minutes of very many short conversations through vocabulary, harvest and store, on a CPU.

    python scripts/bench_many.py [--conversations 100000] [--folder DIR] [--json FILE]

A target with 16 channels and 4 layers stands in, so that only what depends on the number of conversations weighs: the
conversations file, the plan of shards and batches, records, manifest, counting, and reading the finished store at random.
The resident memory of this process is sampled all the time; it begins at what torch itself takes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.configs.console import out, table
from draftsmith.configs.schema import load_config
from draftsmith.configs.target import read_target
from draftsmith.data.conversations import Conversation, write_conversations
from draftsmith.data.harvest import harvest
from draftsmith.data.store import HarvestReader
from draftsmith.data.target_model import target_mark
from draftsmith.data.vocab import DraftVocab, build_vocab, count_store

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tiny_target import make_tiny_tokenizer


class Memory:
    """Resident bytes of this process, sampled twice a second."""

    def __init__(self) -> None:
        self.samples: list[tuple[str, int]] = []
        self.stage = "start"
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.samples.append((self.stage, resident()))
            time.sleep(0.5)

    def of(self, stage: str) -> list[int]:
        return [size for name, size in self.samples if name == stage]


def resident() -> int:
    """Bytes in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def make_thin_target(path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    make_tiny_tokenizer(400).save_pretrained(path)
    return path


def conversations(count: int, mark: str):  # type: ignore[no-untyped-def]
    dice = random.Random(0)
    for number in range(count):
        length = dice.randrange(20, 80)
        ids = tuple(dice.randrange(3, 512) for _ in range(length))
        yield Conversation(
            id=f"c{number}", category="x", messages=({"role": "assistant", "content": "x"},), input_ids=ids,  # type: ignore[arg-type]
            spans=((length // 3, length),), finish=("stop",), mean_logprob=None, greedy=True, target=mark,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        target = make_thin_target(folder / "target")
        file = folder / "config.json"
        values: dict[str, Any] = {
            "name": "many", "runs": str(folder / "runs"), "target": {"path": str(target), "taps": [1, 2, 3]}, "vocab": {"size": 300},
            "harvest": {"batch_tokens": 16384},
        }  # fmt: skip
        file.write_text(json.dumps(values))
        config = load_config(file)
        memory, seconds = Memory(), {}

        def step(stage: str, work: Callable[[], Any]) -> Any:
            memory.stage, began = stage, time.monotonic()
            result = work()
            seconds[stage] = time.monotonic() - began
            memory.samples.append((stage, resident()))
            return result

        mark = target_mark(read_target(target))
        step(
            "write",
            lambda: write_conversations(config.conversations("train"), conversations(options.conversations, mark)),
        )
        step("vocabulary", lambda: build_vocab(config))
        step("harvest", lambda: harvest(config, "train"))

        def read() -> tuple[int, bool]:
            reader, dice = HarvestReader(config.store("train")), random.Random(1)
            for _ in range(2000):
                reader[dice.randrange(len(reader))]
            return reader.manifest.tokens, bool(
                (count_store(reader) == DraftVocab.load(config.vocab_file).counts).all()
            )

        tokens, same = step("read", read)
        if not same:
            sys.exit("the store's tokens are not those of the conversations")
        size = sum(one.stat().st_size for one in config.store("train").iterdir())
        manifest = (config.store("train") / "manifest.json").stat().st_size
    rows = []
    for stage, took in seconds.items():
        found = memory.of(stage)
        rows.append([stage, f"{took:,.0f} s", f"{found[0] / 1e6:,.0f}", f"{found[len(found) // 2] / 1e6:,.0f}", f"{max(found) / 1e6:,.0f}"])  # fmt: skip
    title = f"{options.conversations:,} conversations, {tokens:,} tokens, store {size / 1e6:,.0f} MB, manifest {manifest / 1e6:,.1f} MB"
    out.print(table(title, ["step", "took", "MB at first", "halfway", "peak"], rows))
    if options.json:
        peak = max(size for _, size in memory.samples)
        options.json.write_text(json.dumps({"tokens": tokens, "peak_bytes": peak, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
