"""An export appears whole or not at all, and what was there before stays."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import pytest

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK
from draftsmith.configs.target import read_target
from draftsmith.convert import export as room
from draftsmith.convert.identity import weight_digests
from draftsmith.convert.read import read_drafter
from draftsmith.convert.write import convert
from tests.convert.conftest import edit_config, listing, make_checkpoint, random_tensors


def export(*arguments, **options):
    """The version's folder."""
    return Path(room.export(*arguments, **options))


def leftovers(folder):
    return [entry.name for entry in folder.iterdir() if TEMPORARY_MARK in entry.name]


def test_a_version_holds_every_file_and_its_hash(tmp_path, drafter, target):
    place = export(drafter, tmp_path / "shared", target)
    manifest = json.loads((place / "manifest.json").read_text())
    assert manifest["files"].keys() == {"config.json", "draftsmith.json", "model.safetensors", "README.md"}
    for name, entry in manifest["files"].items():
        data = (place / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"] and len(data) == entry["bytes"]
    for name in ("config.json", "draftsmith.json", "model.safetensors"):
        assert (place / name).read_bytes() == (drafter / name).read_bytes()
    assert (tmp_path / "shared" / "latest").resolve() == place.resolve()
    assert json.loads((tmp_path / "shared" / "latest.json").read_text())["version"] == place.name == manifest["version"]
    assert not leftovers(tmp_path / "shared")


def test_the_card_names_base_model_taps_and_measured_numbers(tmp_path, drafter, target):
    result = {"drafter": str(drafter), "accept_length": {"3": 2.5125}, "positions": 1200}
    (tmp_path / "evaluate.json").write_text(json.dumps(result))
    card = (export(drafter, tmp_path / "shared", target) / "README.md").read_text()
    assert card.startswith('---\nbase_model: "target"\n')
    for words in (
        "| taps (inputs of layers) | 2, 4, 5 |",
        "| accept_length.3 | 2.513 |",
        "| positions | 1,200 |",
        "| step | 123 |",
    ):
        assert words in card
    assert str(tmp_path) not in card


def test_the_card_shows_no_number_of_another_drafter(tmp_path, drafter, target, checkpoint, capsys):
    """Every `evaluate --drafter X/drafter` writes evaluate-drafter.json: neither its name nor its folder is proof."""
    other = make_checkpoint(tmp_path / "other", target, random_tensors(seed=9))
    whole = read_target(target)
    ours, theirs = (weight_digests(read_drafter(folder, whole)) for folder in (checkpoint, other))
    assert ours.keys() == theirs.keys() == {"bfloat16", "float16", "float32"} and not set(ours.values()) & set(
        theirs.values()
    )
    results = {
        "evaluate.json": {"drafter": str(checkpoint / "drafter"), "weights": ours, "of_the_checkpoint": 11},
        "evaluate-drafter.json": {"drafter": str(drafter), "weights": theirs, "before_it_was_replaced": 22},
        "serve-check-vllm.json": {"drafter": str(tmp_path / "elsewhere" / "drafter"), "elsewhere": 33},
        "serve-check-sglang.json": {"drafter": str(drafter), "served": 44},
        "serve.json": {"nameless": 55},
    }
    for name, content in results.items():
        (tmp_path / name).write_text(json.dumps(content))
    capsys.readouterr()
    card = (export(drafter, tmp_path / "shared", target) / "README.md").read_text()
    assert "| of_the_checkpoint | 11 |" in card and "| served | 44 |" in card
    assert not any(key in card for key in ("before_it_was_replaced", "elsewhere", "nameless"))
    assert "left out" in card and "evaluate-drafter.json, serve-check-vllm.json, serve.json." in card
    said = capsys.readouterr().err
    assert all(name in said for name in ("evaluate-drafter.json", "serve-check-vllm.json", "serve.json"))

    os.utime(drafter / "draftsmith.json")  # converted anew after it was served
    card = (export(drafter, tmp_path / "again", target) / "README.md").read_text()
    assert "| of_the_checkpoint | 11 |" in card and "| served | 44 |" not in card


@pytest.mark.parametrize(
    ("name", "shown"),
    [("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"), ("/home/me/secret/llama", "target"), ("../x/y", "target")],
)
def test_the_card_names_the_base_model_as_the_hub_does(tmp_path, drafter, target, name, shown):
    edit_config(target, _name_or_path=name)
    card = (export(drafter, tmp_path / "shared", target) / "README.md").read_text()
    assert card.startswith(f'---\nbase_model: "{shown}"\n') and (name == shown or name not in card)
    assert "must not be read" in card.rsplit("manifest.json", 1)[1]


def test_a_drafter_in_the_speculators_form_is_served_by_vllm_only(tmp_path, checkpoint, target, capsys):
    drafter = convert(checkpoint, target, tmp_path / "speculators", to="vllm")
    capsys.readouterr()
    card = (export(drafter, tmp_path / "shared", target) / "README.md").read_text()
    said = capsys.readouterr().err
    assert "library_name: vllm" in card and "sglang" not in card.lower().split("## serve")[1]
    assert "vllm serve" in said and "sglang.launch_server" not in said


def test_a_second_export_changes_nothing_and_a_damaged_file_is_mended(tmp_path, drafter, target, capsys):
    place = export(drafter, tmp_path / "shared", target)
    before = listing(place)
    times = {file: file.stat().st_mtime_ns for file in place.iterdir()}
    assert export(drafter, tmp_path / "shared", target) == place
    assert {file: file.stat().st_mtime_ns for file in place.iterdir()} == times
    (place / "model.safetensors").write_bytes(before["model.safetensors"][:-1])
    export(drafter, tmp_path / "shared", target)
    assert "is damaged (model.safetensors)" in capsys.readouterr().err.replace("\n", "") and listing(place) == before


def test_versions_stand_side_by_side_and_never_change(tmp_path, drafter, target):
    first = export(drafter, tmp_path / "shared", target, version="v1")
    edit_config(drafter, transformers_version="5.19.0")
    second = export(drafter, tmp_path / "shared", target, version="v2")
    assert first.is_dir() and (tmp_path / "shared" / "latest").resolve() == second.resolve()
    with pytest.raises(DraftsmithError, match="other files go by this version's name"):
        export(drafter, tmp_path / "shared", target, version="v1")


def test_a_drafter_that_fails_verification_is_not_exported(tmp_path, drafter, target):
    edit_config(drafter, tie_word_embeddings=True)
    with pytest.raises(DraftsmithError, match=r"config\.tie_word_embeddings"):
        export(drafter, tmp_path / "shared", target)
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize(
    "version", ["latest", "../x", "a/b", ".hidden", "a..b", "v1.partial-x", "main", "v1\n", "latest.json"]
)
def test_a_version_s_name_stays_inside_the_destination(tmp_path, drafter, target, version):
    with pytest.raises(DraftsmithError, match="cannot be the name of a version"):
        export(drafter, tmp_path / "shared", target, version=version)


def test_storage_that_is_not_mounted_is_no_place_to_create(tmp_path, drafter, target):
    with pytest.raises(DraftsmithError, match="parent folder does not exist"):
        export(drafter, tmp_path / "mnt" / "gone" / "drafters", target)
    assert not (tmp_path / "mnt").exists()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
def test_a_read_only_destination_gives_one_error(drafter, target):
    """/proc takes no new folder, from root neither."""
    with pytest.raises(DraftsmithError, match="could not write"):
        export(drafter, "/proc/self", target)


def test_a_destination_that_cannot_be_written_gives_one_error(tmp_path, drafter, target):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DraftsmithError, match="could not write"):
        export(drafter, tmp_path / "file", target)
    assert (tmp_path / "file").read_text() == "not a folder"


def test_latest_that_is_a_real_folder_is_not_flipped(tmp_path, drafter, target):
    (tmp_path / "shared" / "latest").mkdir(parents=True)
    with pytest.raises(DraftsmithError, match="`latest` is no link"):
        export(drafter, tmp_path / "shared", target)


def test_a_full_disk_gives_one_error_and_loses_nothing(tmp_path, drafter, target):
    """A limit on the size of files stands in for the full disk."""
    old = export(drafter, tmp_path / "shared", target, version="v1")
    before = listing(tmp_path / "shared")
    edit_config(drafter, transformers_version="5.19.0")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(DraftsmithError, match="could not write"):
            export(drafter, tmp_path / "shared", target, version="v2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert listing(tmp_path / "shared") == before and not leftovers(tmp_path / "shared")
    assert (tmp_path / "shared" / "latest").resolve() == old.resolve()


def test_storage_without_links_still_tells_the_latest(tmp_path, drafter, target, monkeypatch):
    def no_links(*_args, **_kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", no_links)
    place = export(drafter, tmp_path / "shared", target)
    assert json.loads((tmp_path / "shared" / "latest.json").read_text())["version"] == place.name


def test_exporters_at_the_same_time_end_with_one_whole_version(tmp_path, drafter, target):
    start, errors = threading.Barrier(4), []

    def run():
        start.wait()
        try:
            export(drafter, tmp_path / "shared", target)
        except DraftsmithError as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not leftovers(tmp_path / "shared")
    (version,) = [entry for entry in (tmp_path / "shared").iterdir() if entry.is_dir() and not entry.is_symlink()]
    assert listing(version) == listing(export(drafter, tmp_path / "alone", target))


def test_a_file_url_is_that_folder(tmp_path, drafter, target):
    place = export(drafter, f"file://{tmp_path}/shared", target)
    assert place.parent == tmp_path / "shared" and (tmp_path / "shared" / "latest").resolve() == place.resolve()


def test_the_target_that_training_recorded_is_the_default(tmp_path, drafter, target):
    assert listing(export(drafter, tmp_path / "shared")) == listing(export(drafter, tmp_path / "other", target))
    target.rename(tmp_path / "moved")
    with pytest.raises(DraftsmithError, match="not on this machine") as caught:
        export(drafter, tmp_path / "third")
    assert "--target TARGET" in str(caught.value) and str(target) in str(caught.value)
    assert not (tmp_path / "third").exists()


def test_what_a_killed_exporter_left_is_cleared_by_the_next_that_completes(tmp_path, drafter, target):
    stray = tmp_path / "shared" / f".v1{TEMPORARY_MARK}0123abcd"
    stray.mkdir(parents=True)
    (stray / "model.safetensors").write_bytes(b"half")
    other = tmp_path / "shared" / f".v2{TEMPORARY_MARK}0123abcd"
    other.mkdir()
    export(drafter, tmp_path / "shared", target, version="v1")
    assert leftovers(tmp_path / "shared") == [other.name]


def test_a_weight_file_with_an_unsafe_name_is_refused(tmp_path, drafter, target):
    (drafter / "model.safetensors").rename(drafter / "a?b.safetensors")
    with pytest.raises(DraftsmithError, match="name is not safe"):
        export(drafter, tmp_path / "shared", target)
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("gopher://host/x", "no such protocol is known"),
        ("https://example.com/x", "nothing can be delivered over this protocol"),
        ("simplecache::s3://bucket/x", "this is no destination"),
        ("s3://", "names no bucket"),
        ("s3://bucket/../other", "must be plain"),
        ("s3://key:secret@bucket/x", "credentials do not belong"),
        ("memory://a/b?c", "must be plain"),
        ("file://relative", "absolute path"),
        ("hf://name", "no model repository"),
        ("hf://datasets/a/b", "no model repository"),
        ("hf://a/b@../c", "no model repository"),
        ("gs://bucket/x", "pip install 'gcsfs'"),
        ("sftp://host/x", "pip install 'paramiko'"),
        ("", "this is no destination"),
    ],
)
def test_an_address_that_cannot_be_delivered_to_is_one_clear_error(drafter, target, address, words, monkeypatch):
    for driver in ("gcsfs", "paramiko"):
        monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(DraftsmithError) as caught:
        export(drafter, address, target)
    assert words in str(caught.value) and "secret" not in str(caught.value)
