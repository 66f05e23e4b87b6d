"""How fast a training step is on a GPU: tokens/s, share of the matmul ceiling, memory, and where the time goes.

    python scripts/bench_train.py                                   # Kimi-K2.5's drafter, 4096 tokens
    python scripts/bench_train.py --tokens 512,4096,16384 --mix --float8 --profile
    python scripts/bench_train.py --peer specforge --peer-folder DIR    # beside SpecForge's own step, in the same run
    python scripts/bench_train.py --check                           # the GPU's fast paths against float64

Hidden states and tokens are random; every position is supervised, except in `--mix`: log-normal conversations of
700 tokens on average of which 45 % are generated, whole optimiser steps. FLOPs are counted as 2 a multiply-add, forward
and both gradients of every product, and attention's pairs; recomputed ones do not count. One JSON object goes to --out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.configs.drafter import DrafterSpec, RopeSpec
from draftsmith.train.batch import Batch, Window, pack
from draftsmith.train.masters import MasterAdamW
from draftsmith.train.model import Drafter
from draftsmith.train.unroll import Unroll, loss_coefficients

DECAY = 0.8
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=18432)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=163840)
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--unroll-steps", type=int, default=7)
    parser.add_argument("--tokens", default="4096", help="batch sizes, comma-separated; each is one conversation")
    parser.add_argument("--recompute-tokens", default="", help="batch sizes that are timed with recomputation too")
    parser.add_argument("--float8", action="store_true", help="time float8 products too")
    parser.add_argument("--optimizer", action="store_true", help="time whole optimiser steps too")
    parser.add_argument("--mix", action="store_true", help="time a realistic mix of lengths too")
    parser.add_argument("--mix-batch", type=int, default=16384, help="tokens of one optimiser step of the mix")
    parser.add_argument("--profile", action="store_true", help="say where the time goes at the first batch size")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--peer", choices=("specforge",), default=None)
    parser.add_argument("--peer-folder", type=Path, default=None, help="folder that holds the peer's package")
    parser.add_argument("--peer-tokens", default="512,4096")
    parser.add_argument("--check", action="store_true", help="compare with float64 and stop")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_train: no GPU here; its figures would mean nothing")
    if options.check:
        check()
        return
    found = run(options)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All measurements asked for."""
    began = time.perf_counter()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    found["ceiling"] = ceiling()
    say(f"{found['device']}, torch {found['torch']}; matmul ceiling {found['ceiling'] / 1e12:.0f} TFLOP/s (8192^3)")
    spec, peer = make_spec(options), None
    if options.peer:
        from peer_specforge import SpecForge

        peer = SpecForge(options, numbers(options.peer_tokens))
        found["peer"] = alone(options, peer)
    held = torch.cuda.memory_allocated()
    unroll = make_unroll(spec)
    for float8 in (False, True) if options.float8 else (False,):
        unroll.float8 = float8
        for tokens in numbers(options.tokens):
            found["rows"].append(row(options, unroll, tokens, found["ceiling"], held, recompute=False))
        for tokens in numbers("" if float8 else options.recompute_tokens):
            found["rows"].append(row(options, unroll, tokens, found["ceiling"], held, recompute=True))
        if options.profile:
            profile(unroll, numbers(options.tokens)[0], options.unroll_steps)
    if peer is not None:
        found["side_by_side"] = [side_by_side(options, unroll, peer, n) for n in numbers(options.peer_tokens)]
    del peer
    free()
    if options.mix:
        found["mix"] = [
            mix(options, unroll, f8, found.get("peer")) for f8 in ([False, True] if options.float8 else [False])
        ]
    found["compiled_programs"] = dict(torch._dynamo.utils.counters["stats"])
    found["seconds"] = time.perf_counter() - began
    say(f"{found['compiled_programs']}, {found['seconds']:.0f} s in all")
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def say(text: str) -> None:
    print(text, flush=True)


def free() -> None:
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def timed(function: Callable[[], Any], iterations: int, warmup: int = 2) -> float:
    """Median seconds of one call."""
    seconds = []
    for number in range(warmup + iterations):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        if number >= warmup:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def ceiling() -> float:
    """FLOP/s of one large bf16 product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / timed(lambda: a @ b, 10, 3)


def make_spec(options: argparse.Namespace) -> DrafterSpec:
    return DrafterSpec(
        hidden_size=options.hidden, intermediate_size=options.intermediate, num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads, head_dim=options.head_dim, vocab_size=options.vocab,
        draft_vocab_size=options.draft_vocab, target_hidden_size=options.hidden, target_num_layers=61, taps=(2, 30, 58),
        rms_norm_eps=1e-5, rope=RopeSpec(theta=50000.0), max_position_embeddings=262144,
    )  # fmt: skip


def make_unroll(spec: DrafterSpec) -> Unroll:
    """A random drafter and teacher on the GPU, in bfloat16; the embedding stays on the host, as the loader has it."""
    with torch.device("meta"):
        drafter = Drafter(spec, torch.empty(1, spec.hidden_size))
    drafter.to_empty(device="cuda")
    drafter.to(torch.bfloat16)
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device="cuda") / spec.head_dim
    drafter.frequencies = 1.0 / (spec.rope.theta**exponent)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0, 0.02)
    targets = torch.randperm(spec.vocab_size, device="cuda")[: spec.draft_vocab_size].sort().values
    teacher = torch.randn(spec.draft_vocab_size, spec.target_hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02
    return Unroll(drafter, teacher, targets, keep_outside=True)


def make_batch(spec: DrafterSpec, lengths: list[int], generated: float, steps: int, seed: int = 0) -> Batch:
    """Conversations of these lengths whose last `generated` share the target wrote; on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(lengths)
    features = torch.randn(rows, len(spec.taps), spec.target_hidden_size, generator=generator).bfloat16()
    final = torch.randn(rows, spec.target_hidden_size, generator=generator).bfloat16()
    ids = torch.randint(0, spec.vocab_size, (rows,), generator=generator)
    windows, first = [], 0
    for length in lengths:
        mask = torch.arange(length) >= round(length * (1 - generated))
        part = slice(first, first + length)
        windows.append(
            Window(ids[part], mask, mask.long(), features[part], final[part], ids[part], 0, length, greedy=True)
        )
        first += length
    found = pack(windows, steps)
    unique, places = found.fed.unique(return_inverse=True)
    table = torch.randn(len(unique), spec.hidden_size, generator=generator).bfloat16()
    return replace(found, table=table, fed=places).to(torch.device("cuda"))


def flops(spec: DrafterSpec, queries: int, keys: int, pairs: int, steps: int) -> float:
    """Of one forward and backward pass: `queries` chains over `keys` rows with `pairs` (query, key) at step 0."""
    hidden, query, key = (
        spec.hidden_size, spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim,
    )  # fmt: skip
    per_query = (
        2 * hidden * query + query * hidden + 3 * hidden * spec.intermediate_size + hidden * spec.draft_vocab_size
    )
    per_key = 2 * hidden * 2 * key
    products = 3 * 2 * (steps * queries * per_query + (keys + (steps - 1) * queries) * per_key)
    fc = 2 * 2 * keys * len(spec.taps) * spec.target_hidden_size * hidden
    attention = 3 * 4 * query * sum(pairs + step * queries for step in range(steps))
    teacher = 2 * keys * spec.target_hidden_size * spec.draft_vocab_size
    return float(products + fc + attention + teacher)


def step_of(unroll: Unroll, batch: Batch, optimizer: MasterAdamW | None = None) -> Callable[[], Tensor]:
    coefficients = loss_coefficients([len(rows.active) for rows in batch.steps], DECAY)

    def step() -> Tensor:
        loss, _ = unroll(batch, coefficients)
        loss.backward()
        if optimizer is None:
            for parameter in unroll.parameters():
                parameter.grad = None
        else:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def alone(options: argparse.Namespace, peer: Any) -> dict[str, Any]:
    """The peer's own figures: forward and backward, and whole optimiser steps, one conversation each."""
    found: dict[str, Any] = {"name": peer.name, "rows": []}
    for tokens in numbers(options.peer_tokens):
        item: dict[str, Any] = {"tokens": tokens}
        found["rows"].append(item)
        for label in ("forward_backward", "optimizer_step"):
            step = peer.step(tokens, optimizer=label == "optimizer_step")
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            item.setdefault("first_step_seconds", time.perf_counter() - start)
            free()
            seconds = timed(step, options.iterations)
            item[label] = {
                "milliseconds": seconds * 1e3, "tokens_per_second": tokens / seconds,
                "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            }  # fmt: skip
            say(
                f"{peer.name} {tokens} tokens, {label}: {seconds * 1e3:.1f} ms, {tokens / seconds:,.0f} tokens/s, "
                f"{item[label]['peak_gib']:.1f} GiB (first step {item['first_step_seconds']:.1f} s)"
            )
            del step
            free()
    found["optimizer_seconds"] = min(
        (item["optimizer_step"]["milliseconds"] - item["forward_backward"]["milliseconds"]) / 1e3
        for item in found["rows"]
    )
    return found


def side_by_side(options: argparse.Namespace, unroll: Unroll, peer: Any, tokens: int) -> dict[str, Any]:
    """Forward and backward of both at one size, in turns, so that both see the same clock and temperature."""
    batch = make_batch(unroll.drafter.spec, [tokens], 1.0, options.unroll_steps)
    ours, theirs = step_of(unroll, batch), peer.step(tokens)
    unroll.recompute = False
    names = [peer.name, "bfloat16"] + (["float8"] if options.float8 else [])
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(4):
        for name in names:
            unroll.float8 = name == "float8"
            seconds[name].append(timed(theirs if name == peer.name else ours, options.iterations, 1))
    found: dict[str, Any] = {
        "tokens": tokens,
        "milliseconds": {k: statistics.median(v) * 1e3 for k, v in seconds.items()},
    }
    found["times"] = {name: found["milliseconds"][peer.name] / value for name, value in found["milliseconds"].items()}
    say(
        f"{tokens} tokens in turns: "
        + ", ".join(f"{k} {v:.1f} ms ({found['times'][k]:.2f}x)" for k, v in found["milliseconds"].items())
    )
    return found


def row(
    options: argparse.Namespace, unroll: Unroll, tokens: int, top: float, held: int, *, recompute: bool
) -> dict[str, Any]:
    """One conversation of `tokens` tokens, every position supervised; `held` bytes of memory belong to others."""
    spec, steps = unroll.drafter.spec, options.unroll_steps
    unroll.recompute = recompute
    batch = make_batch(spec, [tokens], 1.0, steps)
    found: dict[str, Any] = {"tokens": tokens, "float8": unroll.float8, "recompute": recompute}
    counted = flops(spec, tokens, tokens, tokens * (tokens + 1) // 2, steps)
    try:
        for label in ["forward_backward"] + (["optimizer_step"] if options.optimizer else []):
            optimizer = (
                MasterAdamW(unroll.parameters(), torch.bfloat16, lr=1e-6, fused=True)
                if label == "optimizer_step"
                else None
            )
            step = step_of(unroll, batch, optimizer)
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            found.setdefault("first_step_seconds", time.perf_counter() - start)
            free()
            seconds = timed(step, options.iterations)
            found[label] = {
                "milliseconds": seconds * 1e3, "tokens_per_second": tokens / seconds, "flops": counted,
                "share_of_ceiling": counted / seconds / top, "peak_gib": (torch.cuda.max_memory_allocated() - held) / GIB,
            }  # fmt: skip
            say(
                f"{tokens:6d} tokens{' float8' if unroll.float8 else ''}{' recompute' if recompute else ''}, {label}: "
                f"{seconds * 1e3:.1f} ms, {tokens / seconds:,.0f} tokens/s, {counted / seconds / top:.2f} of the ceiling, "
                f"{found[label]['peak_gib']:.1f} GiB (first step {found['first_step_seconds']:.1f} s)"
            )
            del step, optimizer
            free()
    except torch.OutOfMemoryError as error:
        found["error"] = str(error)[:200]
        say(f"{tokens:6d} tokens: {found['error']}")
    del batch
    free()
    return found


def mix(options: argparse.Namespace, unroll: Unroll, float8: bool, peer: dict[str, Any] | None) -> dict[str, Any]:
    """Whole optimiser steps over conversations of log-normal lengths: mean 700 tokens, 45 % generated."""
    spec, steps, sigma = unroll.drafter.spec, options.unroll_steps, 0.8
    unroll.float8, unroll.recompute = float8, False
    chance = np.random.default_rng(0)
    draws = chance.lognormal(math.log(700) - sigma**2 / 2, sigma, 4000)
    lengths = np.clip(draws, 32, 8192).astype(int).tolist()
    optimizer = MasterAdamW(unroll.parameters(), torch.bfloat16, lr=1e-6, fused=True)
    batches, shares = [], []
    for number in range(4):
        chosen: list[int] = []
        while sum(chosen) + lengths[-1] <= options.mix_batch:
            chosen.append(lengths.pop())
        lengths.pop()
        shares.append(chosen)
        batches.append(make_batch(spec, chosen, 0.45, steps, number))
    steps_of = [step_of(unroll, batch, optimizer) for batch in batches]
    steps_of[0]()
    free()
    before = sum(torch._dynamo.utils.counters["stats"].values())
    seconds = [timed(step, 2, 1) for step in steps_of]
    rate = sum(map(sum, shares)) / sum(seconds)
    found: dict[str, Any] = {
        "float8": unroll.float8, "tokens_per_second": rate, "mean_length": float(np.mean([n for s in shares for n in s])),
        "conversations": [len(share) for share in shares], "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "recompiled": sum(torch._dynamo.utils.counters["stats"].values()) - before,
    }  # fmt: skip
    text = f"mix{' float8' if unroll.float8 else ''}: {rate:,.0f} tokens/s, {found['peak_gib']:.1f} GiB, {found['recompiled']} recompiled"
    if peer:
        lone = sum(peer_seconds(peer, "optimizer_step", length) for share in shares for length in share)
        few = sum(
            sum(peer_seconds(peer, "forward_backward", length) for length in share) + peer["optimizer_seconds"]
            for share in shares
        )
        total = sum(map(sum, shares))
        found |= {"peer_tokens_per_second": total / lone, "peer_accumulating_tokens_per_second": total / few}
        text += (
            f"; {peer['name']} {total / lone:,.0f} with an optimiser step a conversation ({rate * lone / total:.2f}x), "
            f"{total / few:,.0f} accumulating as many tokens ({rate * few / total:.2f}x)"
        )
    say(text)
    del optimizer, batches, steps_of
    free()
    return found


def peer_seconds(peer: dict[str, Any], label: str, length: int) -> float:
    """Seconds of the peer's step at `length` tokens, between the lengths that were measured."""
    known = sorted((item["tokens"], item[label]["milliseconds"] / 1e3) for item in peer["rows"] if label in item)
    return float(np.interp(length, [tokens for tokens, _ in known], [seconds for _, seconds in known]))


def profile(unroll: Unroll, tokens: int, steps: int) -> None:
    """Where one forward and backward pass spends the GPU's time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step = step_of(unroll, make_batch(unroll.drafter.spec, [tokens], 1.0, steps))
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        step()
        torch.cuda.synchronize()
    events = [
        event for event in recorded.key_averages() if event.self_device_time_total and event.device_type.name == "CUDA"
    ]
    total = sum(event.self_device_time_total for event in events)
    say(f"kernels of one pass at {tokens} tokens: {total / 1e3:.1f} ms")
    for event in sorted(events, key=lambda e: -e.self_device_time_total)[:32]:
        say(f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:5d}x {event.key[:110]}")


def check() -> None:
    """Loss and gradients of the GPU's bfloat16 and float8 paths beside float64 on the CPU, on fresh random numbers."""
    spec = DrafterSpec(
        hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=900,
        draft_vocab_size=512, target_hidden_size=256, target_num_layers=61, taps=(2, 30, 58), rms_norm_eps=1e-5,
        rope=RopeSpec(theta=50000.0), max_position_embeddings=262144,
    )  # fmt: skip
    unroll = make_unroll(spec)
    worst = {}
    for lengths, share in (([700], 1.0), ([301, 5, 64, 190, 33], 0.6)):
        batch = make_batch(spec, lengths, share, 7, seed=int(time.time()))
        coefficients = loss_coefficients([len(rows.active) for rows in batch.steps], DECAY)
        exact = Unroll(
            Drafter(spec, torch.empty(1, 256)),
            unroll.teacher_weight.cpu().double(),
            unroll.targets.cpu(),
            keep_outside=True,
        )
        exact.double()
        exact.drafter.load_state_dict({k: v.cpu().double() for k, v in unroll.drafter.state_dict().items()})
        exact.drafter.frequencies = unroll.drafter.frequencies.cpu()
        plain = batch.to(torch.device("cpu"))
        plain = replace(plain, taps=plain.taps.double(), final=plain.final.double(), table=plain.table.double())
        want, _ = exact(plain, coefficients)
        want.backward()
        truth = {name: p.grad for name, p in exact.drafter.named_parameters()}
        for label, float8, recompute in (
            ("bfloat16", False, False),
            ("recompute", False, True),
            ("float8", True, False),
        ):
            unroll.float8, unroll.recompute = float8, recompute
            for parameter in unroll.parameters():
                parameter.grad = None
            loss, _ = unroll(batch, coefficients)
            loss.backward()
            angle = {
                name: torch.cosine_similarity(p.grad.cpu().double().flatten(), truth[name].flatten(), 0).item()
                for name, p in unroll.drafter.named_parameters()
            }
            length = {
                name: (p.grad.cpu().double().norm() / truth[name].norm()).item()
                for name, p in unroll.drafter.named_parameters()
            }
            low = min(angle, key=angle.get)  # type: ignore[arg-type]
            off = max(length, key=lambda name: abs(length[name] - 1))
            worst[label] = min(worst.get(label, 1.0), angle[low])
            say(
                f"{label} {lengths}: loss {loss.item():.5f} against {want.item():.5f}; least cosine {angle[low]:.6f} ({low}), "
                f"furthest length {length[off]:.4f} ({off})"
            )
    assert worst["bfloat16"] > 0.999 and worst["recompute"] > 0.999 and worst["float8"] > 0.98, worst
    say("checked")


if __name__ == "__main__":
    main()
