"""Delivery to the Hugging Face Hub: the real client, in a process of its own, against a small hub over HTTP.

The client reads its environment when it is imported, and other tests run with HF_HUB_OFFLINE: hence the processes.
Uploads go the LFS way; the Xet way needs a server that only the Hub has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest

from draftsmith.convert.export import export
from tests.convert.conftest import edit_config, listing
from tests.convert.hub_server import READER, TOKEN, hub_server
from tests.convert.remote import closed_port

FILES = {"config.json", "draftsmith.json", "model.safetensors", "README.md", "manifest.json"}


@pytest.fixture
def hub():
    with hub_server() as server:
        yield server


@pytest.fixture
def start(hub, tmp_path):
    """Start `draftsmith export`; gives the process."""

    def call(drafter, destination, *options, **changes):
        environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE" and not k.startswith("AWS_")}
        environment |= {
            "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
        } | changes  # fmt: skip
        command = [sys.executable, "-m", "draftsmith", "export", str(drafter), destination, *options]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return call


def finish(process) -> tuple[int, str]:
    out, err = process.communicate(timeout=120)
    assert TOKEN not in out + err and READER not in out + err and "Traceback" not in err, err
    return process.returncode, err


@pytest.fixture
def run(start):
    def call(*arguments, **changes):
        code, said = finish(start(*arguments, **changes))
        assert code == 0, said
        return said

    return call


@pytest.fixture
def refused(start):
    def call(*arguments, **changes):
        code, said = finish(start(*arguments, **changes))
        assert code == 2 and said.count("error ") >= 1, said
        return said

    return call


def test_one_commit_holds_every_file_and_a_tag_names_it(hub, run, drafter, target, tmp_path):
    said = run(drafter, "hf://me/mine", "--version", "v1")
    repository = hub.repositories["me/mine"]
    assert repository["private"] and repository["tags"] == {"v1": repository["branches"]["main"]}
    assert len([call for call in hub.calls if "/commit/" in call]) == 1
    found = {name: data for name, data in hub.files("me/mine", "v1").items() if name != ".gitattributes"}
    assert found == listing(tmp_path / export(drafter, tmp_path / "alone", target, version="v1"))
    for name, entry in json.loads(found["manifest.json"])["files"].items():
        assert hashlib.sha256(found[name]).hexdigest() == entry["sha256"]
    words = "--speculative-draft-model-path me/mine"
    assert words in said and "--speculative-draft-model-revision v1" in said and "hf://me/mine@v1" in said
    assert not any(TOKEN.encode() in data for data in found.values())


@pytest.mark.slow
def test_versions_stand_side_by_side_main_is_the_latest_and_a_second_export_sends_nothing(hub, run, refused, drafter):
    hub.add("me/mine")
    run(drafter, "hf://me/mine", "--version", "v1")
    first = hub.files("me/mine", "v1")
    run(drafter, "hf://me/mine", "--version", "v1")
    assert len([call for call in hub.calls if "/commit/" in call]) == 1
    edit_config(drafter, transformers_version="5.19.0")
    assert "other files go by this version's name" in refused(drafter, "hf://me/mine", "--version", "v1")
    run(drafter, "hf://me/mine", "--version", "v2")
    assert hub.files("me/mine", "v1") == first
    assert hub.files("me/mine") == hub.files("me/mine", "v2") != first
    assert len([call for call in hub.calls if "/upload/" in call]) == 1, "the same weights are not sent twice"


@pytest.mark.slow
def test_an_older_version_exported_again_becomes_the_latest(hub, run, drafter, tmp_path):
    shutil.copytree(drafter, tmp_path / "old")
    run(tmp_path / "old", "hf://me/mine", "--version", "v1")
    tag = dict(hub.repositories["me/mine"]["tags"])
    edit_config(drafter, transformers_version="5.19.0")
    run(drafter, "hf://me/mine", "--version", "v2")
    run(tmp_path / "old", "hf://me/mine", "--version", "v1")
    assert hub.files("me/mine") == hub.files("me/mine", "v1")
    assert hub.repositories["me/mine"]["tags"]["v1"] == tag["v1"]


@pytest.mark.slow
def test_leftovers_of_another_version_go_and_a_person_s_files_stay(hub, run, drafter):
    repository = hub.add("me/mine")
    before = {
        ".gitattributes": b"", "notes.txt": b"mine", "old-00001-of-00002.safetensors": b"old", "gone.json": b"{}",
        "manifest.json": json.dumps({"version": "v0", "files": {"gone.json": {}}}).encode(),
    }  # fmt: skip
    repository["branches"]["main"] = hub.commit(before, "before")
    run(drafter, "hf://me/mine")
    assert hub.files("me/mine").keys() == FILES | {".gitattributes", "notes.txt"}
    assert hub.files("me/mine")["notes.txt"] == b"mine"


@pytest.mark.slow
def test_a_branch_of_its_own(hub, run, drafter):
    hub.add("me/mine")
    untouched = hub.files("me/mine")
    run(drafter, "hf://me/mine@candidates", "--version", "v1")
    assert hub.files("me/mine") == untouched and hub.files("me/mine", "candidates") == hub.files("me/mine", "v1")


@pytest.mark.slow
def test_an_export_that_died_before_its_tag_is_completed(hub, run, refused, drafter):
    hub.refused[("POST", "/tag/")] = 503
    assert "could not tag the version" in refused(drafter, "hf://me/mine", "--version", "v1")
    hub.refused.clear()
    run(drafter, "hf://me/mine", "--version", "v1")
    assert hub.repositories["me/mine"]["tags"]["v1"] == hub.repositories["me/mine"]["branches"]["main"]
    assert len([call for call in hub.calls if "/commit/" in call]) == 1


@pytest.mark.slow
def test_an_export_that_died_before_its_commit_leaves_nothing_to_read(hub, run, refused, drafter):
    hub.refused[("POST", "/commit/")] = 500
    assert "could not send the files" in refused(drafter, "hf://me/mine", "--version", "v1")
    assert hub.files("me/mine").keys() == {".gitattributes"} and not hub.repositories["me/mine"]["tags"]
    hub.refused.clear()
    run(drafter, "hf://me/mine", "--version", "v1")
    assert hub.files("me/mine", "v1").keys() == FILES | {".gitattributes"}
    assert len([call for call in hub.calls if "/upload/" in call]) == 1


@pytest.mark.slow
def test_a_tag_that_was_moved_is_mended(hub, run, drafter):
    run(drafter, "hf://me/mine", "--version", "v1")
    good = hub.files("me/mine", "v1")
    broken = good | {"config.json": b"{}"}
    repository = hub.repositories["me/mine"]
    repository["tags"]["v1"] = repository["branches"]["main"] = hub.commit(broken, "by hand")
    assert "is damaged (config.json)" in run(drafter, "hf://me/mine", "--version", "v1").replace("\n", "")
    assert hub.files("me/mine", "v1") == good == hub.files("me/mine")


def test_exporters_at_the_same_time_end_with_one_whole_version(hub, start, drafter, tmp_path):
    hub.add("me/mine")
    shutil.copytree(drafter, tmp_path / "other")
    edit_config(tmp_path / "other", transformers_version="5.19.0")
    places = [drafter, drafter, tmp_path / "other"]
    results = [finish(process) for process in [start(place, "hf://me/mine", "--version", "v1") for place in places]]
    found = hub.files("me/mine", "v1")
    for name, entry in json.loads(found["manifest.json"])["files"].items():
        assert hashlib.sha256(found[name]).hexdigest() == entry["sha256"]
    winners = [found["config.json"] == (place / "config.json").read_bytes() for place in places]
    assert [code == 0 for code, _ in results] == winners and hub.files("me/mine") == found
    for code, said in results:
        assert code == 0 or "other files go by this version's name" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"HF_TOKEN": "hf_" + "x" * 30}, "hf auth login"),
        ({"HF_TOKEN": READER}, "refuses these credentials or this action"),
        ({"HF_HUB_OFFLINE": "1"}, "unset HF_HUB_OFFLINE"),
        ({"HF_ENDPOINT": f"http://127.0.0.1:{closed_port()}"}, "cannot be reached"),
    ],
    ids=["a wrong token", "a token that only reads", "offline", "no network"],
)
def test_a_refusal_is_one_clear_error(hub, refused, drafter, changes, words):
    hub.add("me/mine")
    before = dict(hub.commits)
    said = refused(drafter, "hf://me/mine", **changes)
    assert words in said and hub.commits == before and not hub.repositories["me/mine"]["tags"]


def test_without_a_token_nothing_is_tried(hub, refused, drafter):
    assert "there are no valid credentials" in refused(drafter, "hf://me/mine", HF_TOKEN="")
    assert not hub.repositories
