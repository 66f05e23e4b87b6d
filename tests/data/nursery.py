"""Runs synthesis and harvest in forked processes, one a rank, and kills them.

Python, torch and transformers are imported once; a fork is ready in milliseconds, so that kills fall into the work and
not into the start. The ranks find each other as under `accelerate launch`, by environment variables. Each line of the
standard input is a JSON list [CONFIG.json, ORDER, ANSWER.json, file for standard error]; when its answer is written, its
exit code is printed. An order is one of

    {"verbs": ["harvest"], "ranks": [2]}                        run once; [1, 2, 3]: each time into an empty store
    {"verbs": ["synthesize", "harvest"], "ranks": 2, "kills": 25, "seed": 0}      see `killed_runs`
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import accelerate  # noqa: F401
import torch
import transformers  # noqa: F401

from draftsmith.configs.schema import RunConfig, load_config
from draftsmith.data import decode, harvest, synthesize  # noqa: F401


def start(config: RunConfig, verbs: list[str], ranks: int) -> list[int]:
    """Fork the ranks; their process ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        status = 3
        try:
            if ranks > 1:
                os.environ |= {
                    "WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                    "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port),
                }  # fmt: skip
            torch.set_num_threads(1)
            for verb in verbs:
                getattr({"synthesize": synthesize, "harvest": harvest}[verb], verb)(config, "train")
            status = 0
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException as error:
            print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return pids


def wait(pids: list[int], until: float) -> list[int | None]:
    """Exit codes when all have ended or `until` has come; None of those that still run."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids) and time.monotonic() < until:
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):  # as a launcher does: one has failed, the others end
            until = min(until, time.monotonic() + 2.0)
        time.sleep(0.002)
    return [codes.get(pid) for pid in pids]


def kill(pids: list[int], codes: list[int | None]) -> None:
    for pid, code in zip(pids, codes, strict=True):
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def content(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below the run's folder."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def killed_runs(config: RunConfig, order: dict) -> dict:
    """Kill -9 at random moments until `kills` have fallen; when a run ends by itself, compare it and begin anew."""
    verbs, ranks = order["verbs"], order["ranks"]
    keep = [] if "synthesize" in verbs else ["conversations"]
    began = time.monotonic()
    codes = wait(start(config, verbs, ranks), began + 300)
    length = time.monotonic() - began
    assert not any(codes), codes
    expected = content(config.folder)
    dice = random.Random(order["seed"])
    kills, rounds, leftovers, failures = 0, 0, 0, []
    fresh = True
    while kills < order["kills"] or not fresh:
        if fresh:
            for entry in config.folder.iterdir():
                if entry.name not in keep:
                    shutil.rmtree(entry)
        last = kills >= order["kills"]
        pids = start(config, verbs, ranks)
        codes = wait(pids, time.monotonic() + (300 if last else dice.uniform(0.0, length)))
        if None in codes:
            if ranks > 1 and dice.random() < 0.5:  # one rank dies; the launcher ends the others a moment later
                victim = dice.choice([number for number, code in enumerate(codes) if code is None])
                os.kill(pids[victim], signal.SIGKILL)
                codes = wait(pids, time.monotonic() + 1.0)
            kill(pids, codes)
            kills, fresh = kills + 1, False
            leftovers += any(".partial-" in name for name in content(config.folder))
            continue
        rounds, fresh = rounds + 1, True
        found = content(config.folder)
        if any(codes) or found != expected:
            names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            failures.append({"codes": codes, "files": names})
    return {
        "kills": kills, "completed": rounds, "unbroken_seconds": round(length, 2), "files": len(expected),
        "half_written_after_a_kill": leftovers, "failures": failures,
    }  # fmt: skip


def follow(file: str, order: dict, answer: str) -> None:
    config = load_config(file)
    if "kills" in order:
        result = killed_runs(config, order)
    else:
        result = {"codes": [], "stores": []}
        for ranks in order["ranks"]:
            if len(order["ranks"]) > 1:
                shutil.rmtree(config.store("train"), ignore_errors=True)
            result["codes"].append(wait(start(config, order["verbs"], ranks), time.monotonic() + 300))
            result["stores"].append(content(config.store("train")))
    Path(answer).write_text(json.dumps(result))


def main() -> None:
    """Each order in a fork of its own, so that it finds nothing but imports."""
    for line in sys.stdin:
        file, order, answer, said = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            try:
                follow(file, order, answer)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            sys.stderr.flush()
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
