"""Several GPUs of one host: is DDP or ZeRO on n of them what one of them computes, how fast, in how much memory?

    python scripts/bench_gpus.py                              # Kimi-K2.5's drafter on all GPUs: DDP, ZeRO-1, -2, -3
    python scripts/bench_gpus.py --back-ends none --kill      # one rank dies by SIGKILL, the launch is repeated
    python scripts/bench_gpus.py --tiny --processes 2 --kill  # the same on a CPU (gloo), at toy sizes

Makes a target (embedding, norm and head only), a store of random states whose tokens are the head's own choice, and a
draft vocabulary; then runs `accelerate launch -m draftsmith.train` with each file of configs/accelerate/ named, and one
process for comparison, with the same global batch, and reads `metrics.jsonl`: loss and gradient norm of each step beside
one process's, median tokens/s, peak memory of the first rank. A run ends when it has logged --steps steps; nothing is
saved but for --kill.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftsmith.configs.target import read_target
from draftsmith.data.store import HarvestedConversation, Provenance
from draftsmith.data.store_writer import StoreWriter
from draftsmith.data.target_model import target_mark
from draftsmith.data.vocab import choose_vocab

ROOT = Path(__file__).resolve().parents[1]
KIMI = {"hidden": 7168, "intermediate": 18432, "heads": 64, "head_dim": 128, "vocab": 40960, "draft": 32000}
TINY = {"hidden": 64, "intermediate": 96, "heads": 4, "head_dim": 16, "vocab": 512, "draft": 384}
SMALL = {"hidden": 1024, "intermediate": 2048, "heads": 16, "head_dim": 64, "vocab": 8192, "draft": 4096}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--back-ends", default="ddp,zero1,zero2,zero3", help="of configs/accelerate, or none")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-tokens", type=int, default=16384, help="of one optimiser step over all processes")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each conversation")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kill", action="store_true", help="kill one rank of a smaller DDP run and go on")
    parser.add_argument("--harvest", action="store_true", help="harvest a small target by one process and by all")
    parser.add_argument("--limit", type=float, default=180, help="seconds after which a run is given up")
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        sizes = TINY if options.tiny else KIMI
        try:
            if options.back_ends != "none":
                speed = Path(folder) / "speed"
                config = prepare(speed, sizes, options.conversations, options.length, options.batch_tokens)
                found["speed"] = compare(options, config)
            if options.kill:
                config = prepare(Path(folder) / "kill", TINY if options.tiny else SMALL, 16, 512, 2048)
                found["kill"] = kill(options, config)
            if options.harvest:
                found["harvest"] = harvests(options, Path(folder) / "harvest")
        finally:
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(found, indent=1) + "\n")


def say(text: str) -> None:
    print(text, flush=True)


def prepare(folder: Path, sizes: dict[str, int], conversations: int, length: int, batch_tokens: int) -> Path:
    """A run's configuration, ready to train."""
    began = time.perf_counter()
    target, run = folder / "target", folder / "runs" / "bench"
    target.mkdir(parents=True)
    hidden, vocab = sizes["hidden"], sizes["vocab"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

    head = random(vocab, hidden) * 0.05
    save_file(
        {
            "model.embed_tokens.weight": random(vocab, hidden).cpu() * 0.02,
            "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            "lm_head.weight": head.cpu(),
        },
        target / "model.safetensors",
    )
    described = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": 61,
        "intermediate_size": sizes["intermediate"], "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["heads"], "head_dim": sizes["head_dim"], "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0, "max_position_embeddings": 262144, "tie_word_embeddings": False, "hidden_act": "silu",
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(described))
    mark = target_mark(read_target(target))
    provenance = Provenance(
        target=read_target(target).fingerprint(), target_mark=mark, taps=(2, 30, 58), hidden_size=hidden, vocab_size=vocab,
        computed_in="bfloat16", source="random", planned=conversations, max_length=length, shard_tokens=8192,
    )  # fmt: skip
    counts = torch.zeros(vocab, dtype=torch.int64)
    with StoreWriter(run / "harvest" / "train", provenance) as writer:
        for number in range(conversations):
            final = random(length, hidden)
            choice = (final @ head.t()).argmax(-1).cpu()
            ids = torch.cat([torch.zeros(1, dtype=torch.int64), choice[:-1]])
            generated = torch.arange(length) > 0
            counts += torch.bincount(ids[1:], minlength=vocab)
            writer.append(
                HarvestedConversation(
                    str(number), ids, generated, random(length, 3, hidden).cpu(), final.cpu(),
                    torch.where(generated.roll(-1), choice, -1), True, None,
                )
            )  # fmt: skip
    values = {
        "name": "bench",
        "runs": str(folder / "runs"),
        "target": {"path": str(target), "taps": [2, 30, 58]},
        "drafter": {
            "intermediate_size": sizes["intermediate"], "num_attention_heads": sizes["heads"],
            "num_key_value_heads": sizes["heads"], "head_dim": sizes["head_dim"],
        },
        "vocab": {"size": sizes["draft"]},
        "train": {
            "epochs": 1000, "batch_tokens": batch_tokens, "max_length": length, "log_every": 1, "evaluate_every": 10**6,
            "save_every": 10**6, "learning_rate": 1e-4, "warmup_ratio": 0.0001, "check_shards": "header",
            "out_of_vocabulary": "keep", "guard_threshold": 0.0,
        },
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(json.dumps(values))
    choose_vocab(counts, sizes["draft"], [0, 1], source="random", target=mark).save(run / "vocab.safetensors")
    say(f"prepared {conversations} conversations of {length} tokens in {time.perf_counter() - began:.0f} s")
    return file


def launch(config: Path, name: str, back_end: str, processes: int, *overrides: str) -> subprocess.Popen[bytes]:
    """Start training; its output goes to NAME.log beside the configuration."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / f"configs/accelerate/{back_end}.yaml"),
    ]
    command += ["--num_processes", str(processes), "--main_process_port", "0"]
    if back_end == "single":
        command = [sys.executable]
    environment = os.environ | ({} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1"})
    if back_end == "single" and torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    with (config.parent / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "-m", "draftsmith.train", "--config", str(config), f"name={name}", *overrides],
            cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def rows_of(config: Path, name: str) -> list[dict[str, Any]]:
    file = config.parent / "runs" / name / "train" / "metrics.jsonl"
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def end(process: subprocess.Popen[bytes], name: str) -> None:
    """Kill the launcher and its workers, and wait until all are gone."""
    process.kill()
    process.wait()
    for _ in range(100):
        left = [pid for pid, _ in workers(name)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.1)


def workers(name: str) -> list[tuple[int, str | None]]:
    """Process numbers of a run's training processes, and their ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            pairs = (folder / "environ").read_bytes().split(b"\0")
            running = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            continue
        if running and b"name=" + name.encode() in words and b"accelerate.commands.launch" not in words:
            found.append((int(folder.name), next((p[5:].decode() for p in pairs if p.startswith(b"RANK=")), None)))
    return found


def own_folder(config: Path, name: str) -> None:
    """A run's folder of its own over the same store and vocabulary."""
    runs = config.parent / "runs"
    (runs / name).mkdir(exist_ok=True)
    for part in ("harvest", "vocab.safetensors"):
        if not (runs / name / part).exists():
            (runs / name / part).symlink_to(runs / "bench" / part)


def measured(
    options: argparse.Namespace, config: Path, name: str, back_end: str, processes: int
) -> list[dict[str, Any]]:
    """The logged rows of `--steps` steps."""
    own_folder(config, name)
    process, began = launch(config, name, back_end, processes), time.monotonic()
    rows: list[dict[str, Any]] = []
    while len(rows) < options.steps and process.poll() is None and time.monotonic() - began < options.limit:
        time.sleep(0.5)
        rows = rows_of(config, name)
    end(process, name)
    if len(rows) < options.steps:
        say(
            f"{name}: {len(rows)} of {options.steps} steps in {time.monotonic() - began:.0f} s\n"
            + (config.parent / f"{name}.log").read_text()[-3000:]
        )
    shutil.rmtree(config.parent / "runs" / name / "train", ignore_errors=True)
    return rows[: options.steps]


def compare(options: argparse.Namespace, config: Path) -> list[dict[str, Any]]:
    """Every back end beside one process."""
    table, alone = [], measured(options, config, "one", "single", 1)
    for back_end in ["single", *options.back_ends.split(",")]:
        count = 1 if back_end == "single" else options.processes
        rows = alone if back_end == "single" else measured(options, config, back_end, back_end, count)
        if not rows:
            continue
        late = [row["tokens_per_second"] for row in rows[len(rows) // 3 :]]
        item = {
            "back_end": back_end, "processes": count, "steps": len(rows), "tokens_per_second": statistics.median(late),
            "waiting": statistics.median(row["waiting"] for row in rows[len(rows) // 3 :]),
            "peak_gib": max(row.get("peak_memory", 0) for row in rows) / 2**30,
            "loss": [row["loss"] for row in rows], "grad_norm": [row["grad_norm"] for row in rows],
        }  # fmt: skip
        item["loss_off"], item["norm_off"] = (
            max(abs(a[key] / b[key] - 1) for a, b in zip(rows, alone, strict=False)) for key in ("loss", "grad_norm")
        )
        item["scaling"] = item["tokens_per_second"] / table[0]["tokens_per_second"] / count if table else 1.0
        table.append(item)
        say(
            f"{back_end} on {count}: {item['tokens_per_second']:,.0f} tokens/s ({item['scaling']:.2f} of linear, waiting "
            f"{item['waiting']:.0%}), {item['peak_gib']:.1f} GiB; furthest loss {item['loss_off']:.1e}, gradient norm "
            f"{item['norm_off']:.1e}; first and last loss {rows[0]['loss']:.4f} {rows[-1]['loss']:.4f}"
        )
    return table


def kill(options: argparse.Namespace, config: Path) -> dict[str, Any]:
    """kill -9 of the last rank in mid-run; how long until the launch ends, what it says, and where the re-run ends."""
    overrides = ["train.epochs=10", "train.save_every=4", "train.keep_checkpoints=2", "train.deterministic=true"]
    for name in ("whole", "killed"):
        own_folder(config, name)
    process = launch(config, "whole", "ddp", options.processes, *overrides)
    if process.wait(options.limit):
        say((config.parent / "whole.log").read_text()[-3000:])
    whole = rows_of(config, "whole")
    process = launch(config, "killed", "ddp", options.processes, *overrides)
    began = time.monotonic()
    while len(rows_of(config, "killed")) < 10 and process.poll() is None and time.monotonic() - began < options.limit:
        time.sleep(0.05)
    victims = [pid for pid, rank in workers("killed") if rank == str(options.processes - 1)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    status = process.wait(options.limit)
    seconds = time.monotonic() - killed
    lines = [line for line in (config.parent / "killed.log").read_text().splitlines() if "error" in line.lower()]
    again = launch(config, "killed", "ddp", options.processes, *overrides)
    again_status = again.wait(options.limit)
    rerun = rows_of(config, "killed")

    def curve(rows: list[dict[str, Any]]) -> list[Any]:
        return [(row["step"], row.get("loss"), row.get("grad_norm")) for row in rows]

    found = {
        "status": status, "seconds": seconds, "message": lines[:3], "again_status": again_status, "victims": len(victims),
        "steps": len(whole), "equal": curve(whole) == curve(rerun),
        "furthest": max((abs(a["loss"] / b["loss"] - 1) for a, b in zip(whole, rerun, strict=False)), default=None),
    }  # fmt: skip
    say(f"kill: {json.dumps(found)}")
    return found


def harvests(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same conversations of a small random target harvested by one process and by one a GPU: equal files?"""
    spec = importlib.util.spec_from_file_location("tiny_target", ROOT / "tests" / "tiny_target.py")
    assert spec is not None and spec.loader is not None
    tiny_target = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny_target)
    folder.mkdir()
    subjects = ["the quick fox", "a river", "numbers", "gardens", "music", "physics", "colours", "a lazy dog"]
    for split in ("train", "heldout"):
        rows = [
            {"id": f"{split}-{n}", "category": "chat", "turns": [f"{split}: tell me {n} times about {subjects[n % 8]}"]}
            for n in range(64)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = tiny_target.make_tiny_target(folder / "target")
    config, stores = folder / "run.yaml", []
    for processes in (1, options.processes):
        values = {
            "name": f"by-{processes}", "runs": str(folder / "runs"), "target": {"path": str(target)},
            "prompts": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")},
            "synthesize": {"batch_size": 32, "max_new_tokens": 64}, "harvest": {"batch_tokens": 1024, "shard_tokens": 512},
        }  # fmt: skip
        config.write_text(json.dumps(values))
        draftsmith = [sys.executable, "-m", "draftsmith"]
        run = folder / "runs" / f"by-{processes}"
        if processes == 1:
            subprocess.run([*draftsmith, "synthesize", str(config)], cwd=ROOT, check=True)
        else:
            shutil.copytree(folder / "runs" / "by-1" / "conversations", run / "conversations")
            draftsmith = [
                *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "configs/accelerate/ddp.yaml")),
                *("--num_processes", str(processes), "--main_process_port", "0", "-m", "draftsmith"),
            ]  # fmt: skip
        subprocess.run([*draftsmith, "harvest", str(config), "--split", "train"], cwd=ROOT, check=True)
        files = sorted((run / "harvest" / "train").iterdir())
        stores.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})
    found = {"files": len(stores[0]), "equal": stores[0] == stores[1], "processes": options.processes}
    say(f"harvest: {json.dumps(found)}")
    return found


if __name__ == "__main__":
    main()
