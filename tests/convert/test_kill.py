"""kill -9 at any moment leaves the destination absent, old or whole, and a second run completes with the same bytes.

One helper process imports the tool, then forks a child for every attempt and kills it after a random time; children
that finish first do not count. What lies there after the kill, and after the second run, comes back as hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from draftsmith.convert.export import export
from draftsmith.convert.write import convert
from tests.convert.conftest import SHAPES, listing, make_checkpoint, random_tensors
from tests.convert.remote import s3_server

KILLS = 50

HELPER = """
import hashlib, json, os, random, shutil, signal, sys, time
from pathlib import Path
from draftsmith.convert.delivery import driver
from draftsmith.convert.export import export
from draftsmith.convert.write import convert

verb, source, target, work, kills = sys.argv[1], *map(Path, sys.argv[2:5]), int(sys.argv[5])
driver.PART = 5 << 20  # the least that S3 takes, so that a file of some megabytes travels in parts
remote = verb == "s3"

def run(place):
    if verb == "export":
        export(source, place, target, version="v1")
    elif remote:
        export(source, f"s3://shared/{place.name}", target, version="v1")
    else:
        convert(source, target, place, dtype="float32", overwrite=verb == "overwrite")

def child(place):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(os.open(work.parent / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        code = 1
        try:
            run(place)
            code = 0
        except BaseException as error:
            os.write(2, repr(error).encode())
        os._exit(code)
    return pid

def digest(data):
    return hashlib.sha256(data).hexdigest()

if remote:
    import aiobotocore.client, boto3, botocore.auth, botocore.httpchecksum, s3fs  # the children need not wait for these
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])

def look(place):
    if remote:
        found = client.list_objects_v2(Bucket="shared", Prefix=place.name + "/").get("Contents", [])
        keys = [entry["Key"] for entry in found]
        return {key.partition("/")[2]: digest(client.get_object(Bucket="shared", Key=key)["Body"].read()) for key in keys}
    if not place.exists():
        return None
    return {str(file.relative_to(place)): digest(file.read_bytes()) for file in place.rglob("*") if file.is_file()}

def clear(place):
    if remote:
        for name in look(place):
            client.delete_object(Bucket="shared", Key=f"{place.name}/{name}")
    else:
        shutil.rmtree(place, ignore_errors=True)

def begin(place):
    clear(place)
    if verb == "overwrite":
        shutil.copytree(work / "old", place)

place = work / "timing"
begin(place)
start = time.monotonic()
assert os.waitpid(child(place), 0)[1] == 0
whole = time.monotonic() - start
clear(place)
draw = random.Random(0)
reports, attempts = [], 0
while len(reports) < kills and attempts < 10 * kills:
    attempts += 1
    place = work / f"place-{attempts}"
    begin(place)
    moment = whole * (len(reports) + draw.random()) / kills
    pid, start, done = child(place), time.monotonic(), 0
    while not done and time.monotonic() - start < moment:
        time.sleep(0.0005)
        done, _ = os.waitpid(pid, os.WNOHANG)
    if done:
        whole *= 0.98
        clear(place)
        continue
    os.kill(pid, signal.SIGKILL)
    if os.WIFEXITED(os.waitpid(pid, 0)[1]):
        clear(place)
        continue
    after = look(place)
    start = time.monotonic()
    if (verb != "convert" or after is None) and os.waitpid(child(place), 0)[1]:
        raise SystemExit(f"the second run of attempt {attempts} failed: " + (work.parent / "errors").read_text()[-2000:])
    whole = max(whole, time.monotonic() - start)  # other work may slow this machine down meanwhile, or end
    uploads = len(client.list_multipart_uploads(Bucket="shared").get("Uploads", [])) if remote else 0
    linked = os.readlink(place / "latest") if (place / "latest").is_symlink() else None
    reports.append({"after": after, "final": look(place), "uploads": uploads, "linked": linked})
    clear(place)
print(json.dumps(reports))
"""


def make_large(tmp_path, target, width):
    """A checkpoint of some megabytes, so that writing it takes a while."""
    shapes = SHAPES | {
        "midlayer.mlp.gate_proj.weight": (width, 64),
        "midlayer.mlp.up_proj.weight": (width, 64),
        "midlayer.mlp.down_proj.weight": (64, width),
    }
    return make_checkpoint(tmp_path / "large", target, random_tensors(shapes), intermediate_size=width)


def attack(verb, source, target, work, **environment):
    done = subprocess.run(
        [sys.executable, "-c", HELPER, verb, str(source), str(target), str(work), str(KILLS)],
        capture_output=True, text=True, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(done.stdout)
    assert len(reports) == KILLS
    return reports


def hashes(folder):
    return {name: hashlib.sha256(data).hexdigest() for name, data in listing(folder).items()}


def below(found, version="v1/"):
    """Files of a version among `found`."""
    return {name[len(version) :]: value for name, value in (found or {}).items() if name.startswith(version)}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["convert", "overwrite"])
def test_a_killed_conversion_leaves_the_old_state_or_the_new_one(tmp_path, target, verb):
    large = make_large(tmp_path, target, 8192)
    work = tmp_path / "work"
    work.mkdir()
    old = hashes(convert(large, target, work / "old", dtype="float16"))
    new = hashes(convert(large, target, tmp_path / "new", dtype="float32"))
    for report in attack(verb, large, target, work):
        assert report["after"] in ([None, new] if verb == "convert" else [old, new])
        assert report["final"] == new


@pytest.mark.slow
def test_a_killed_export_leaves_no_version_or_a_whole_one(tmp_path, target):
    drafter = convert(make_large(tmp_path, target, 8192), target, tmp_path / "drafter")
    whole = hashes(tmp_path / export(drafter, tmp_path / "whole", target, version="v1"))
    work = tmp_path / "work"
    work.mkdir()
    states = set()
    for report in attack("export", drafter, target, work):
        after = report["after"] or {}
        states.add((bool(after), bool(below(after))))
        assert below(after) in ({}, whole)
        assert not any(name.startswith("latest") for name in after) or below(after) == whole
        assert below(report["final"]) == whole and report["linked"] == "v1"
        assert not [name for name in report["final"] if name.startswith(".v1.partial-")], "cleared by the next run"
    assert len(states) > 1, "kills must fall before and during the delivery"


@pytest.mark.slow
def test_a_killed_export_to_s3_leaves_no_version_or_a_whole_one(tmp_path, target):
    """A version is there when its manifest is; the weights travel in several parts."""
    drafter = convert(make_large(tmp_path, target, 16384), target, tmp_path / "drafter", dtype="float32")
    whole = hashes(tmp_path / export(drafter, tmp_path / "whole", target, version="v1"))
    work = tmp_path / "work"
    work.mkdir()
    with s3_server() as environment:
        reports = attack("s3", drafter, target, work, **environment)
    states = set()
    for report in reports:
        after = report["after"]
        there = "v1/manifest.json" in after
        states.add((bool(below(after)), there))
        assert not there or below(after) == whole
        assert "latest.json" not in after or there
        assert all(whole[name] == value for name, value in below(after).items()), "no object is ever half"
        assert below(report["final"]) == whole and report["final"].keys() - {f"v1/{name}" for name in whole} == {
            "latest.json"
        }
        assert report["uploads"] == 0, "no unfinished upload is left behind"
    assert (True, False) in states, "kills must fall between the first file and the manifest"
