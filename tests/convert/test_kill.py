"""kill -9 at any moment leaves the destination absent, old or whole, and a second run completes with the same bytes.

One helper process imports the tool, then forks a child for every attempt and kills it after a random time.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from draftsmith.convert.export import export
from draftsmith.convert.write import convert
from tests.convert.conftest import SHAPES, listing, make_checkpoint, random_tensors

ATTEMPTS = 8

HELPER = """
import os, random, shutil, signal, sys, time
from pathlib import Path
from draftsmith.convert.export import export
from draftsmith.convert.write import convert

verb, source, target, work, attempts = sys.argv[1], *map(Path, sys.argv[2:5]), int(sys.argv[5])

def run(place):
    if verb == "export":
        export(source, place, target, version="v1")
    else:
        convert(source, target, place, dtype="float32", overwrite=verb == "overwrite")

def child(place):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        run(place)
        os._exit(0)
    return pid

def wait(pid):
    return os.waitpid(pid, 0)[1]

begin = time.monotonic()
wait(child(work / "timing"))
whole = time.monotonic() - begin
draw = random.Random(0)
killed = 0
for attempt in range(attempts):
    place = work / f"place-{attempt}"
    if verb == "overwrite":
        shutil.copytree(work / "old", place)
    moment = whole * (attempt + draw.random()) / attempts
    pid, begin, status = child(place), time.monotonic(), None
    while status is None and time.monotonic() - begin < moment:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            status, whole = code, min(whole, time.monotonic() - begin)
        time.sleep(0.0005)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        status = wait(pid)
    killed += status == signal.SIGKILL
    if place.exists():
        shutil.copytree(place, work / f"after-{attempt}", symlinks=True)
    if verb == "convert" and place.exists():
        continue
    if wait(child(place)):
        raise SystemExit(f"the second run of attempt {attempt} failed")
print(killed)
"""


@pytest.fixture
def large(tmp_path, target):
    """A checkpoint of some megabytes, so that writing it takes a while."""
    shapes = SHAPES | {
        "midlayer.mlp.gate_proj.weight": (8192, 64),
        "midlayer.mlp.up_proj.weight": (8192, 64),
        "midlayer.mlp.down_proj.weight": (64, 8192),
    }
    return make_checkpoint(tmp_path / "large", target, random_tensors(shapes), intermediate_size=8192)


def attack(verb, source, target, work):
    done = subprocess.run(
        [sys.executable, "-c", HELPER, verb, str(source), str(target), str(work), str(ATTEMPTS)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) >= ATTEMPTS // 4, "attempts must be killed before they finish"


@pytest.mark.parametrize("verb", ["convert", "overwrite"])
def test_a_killed_conversion_leaves_the_old_state_or_the_new_one(tmp_path, large, target, verb):
    work = tmp_path / "work"
    work.mkdir()
    old = listing(convert(large, target, work / "old", dtype="float16"))
    new = listing(convert(large, target, tmp_path / "new", dtype="float32"))
    attack(verb, large, target, work)
    for attempt in range(ATTEMPTS):
        after = work / f"after-{attempt}"
        if after.exists():
            assert listing(after) in ([new] if verb == "convert" else [old, new])
        else:
            assert verb == "convert"
        assert listing(work / f"place-{attempt}") == new


def test_a_killed_export_leaves_no_version_or_a_whole_one(tmp_path, large, target):
    drafter = convert(large, target, tmp_path / "drafter")
    whole = listing(export(drafter, tmp_path / "whole", target, version="v1"))
    work = tmp_path / "work"
    work.mkdir()
    attack("export", drafter, target, work)
    for attempt in range(ATTEMPTS):
        after, place = work / f"after-{attempt}", work / f"place-{attempt}"
        if (after / "v1").exists():
            assert listing(after / "v1") == whole
        assert not (after / "latest").is_symlink() or (after / "latest" / "manifest.json").is_file()
        assert listing(place / "v1") == whole and (place / "latest").resolve() == (place / "v1").resolve()
