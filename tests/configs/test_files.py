"""Files and folders appear whole or not at all."""

from __future__ import annotations

import os

import pytest

from draftsmith.configs import files
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import STALE_SECONDS, TEMPORARY_MARK, atomic_file, atomic_folder, sweep_unfinished


def leftovers(folder):
    return [entry.name for entry in folder.iterdir() if TEMPORARY_MARK in entry.name]


def test_a_folder_is_replaced_whole_and_the_old_one_goes(tmp_path):
    path = tmp_path / "a"
    for content in ("old", "new"):
        with atomic_folder(path, replace=True) as folder:
            (folder / content).write_text(content)
    assert [entry.name for entry in path.iterdir()] == ["new"] and not leftovers(tmp_path)


def test_a_folder_that_appears_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(DraftsmithError, match="exists already"), atomic_folder(path) as folder:
        (folder / "ours").write_text("ours")
        path.mkdir()
        (path / "theirs").write_text("theirs")
    assert [entry.name for entry in path.iterdir()] == ["theirs"] and not leftovers(tmp_path)


def test_an_error_inside_leaves_the_old_folder(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    (path / "old").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(path, replace=True) as folder:
        (folder / "new").write_text("new")
        raise RuntimeError
    assert [entry.name for entry in path.iterdir()] == ["old"] and not leftovers(tmp_path)


def test_unwritable_places_give_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DraftsmithError, match="could not write"), atomic_folder(tmp_path / "file" / "a"):
        pass
    with pytest.raises(DraftsmithError, match="could not write"), atomic_file(tmp_path / "file" / "a"):
        pass


def test_only_old_leftovers_of_the_same_name_are_swept(tmp_path):
    mine, fresh, other = (
        tmp_path / name for name in (f".a{TEMPORARY_MARK}1", f".a{TEMPORARY_MARK}2", f".b{TEMPORARY_MARK}1")
    )
    for folder in (mine, fresh, other):
        folder.mkdir()
        (folder / "x").write_text("x")
        if folder is not fresh:
            for entry in (folder / "x", folder):
                os.utime(entry, (0, entry.stat().st_mtime - STALE_SECONDS - 1))
    sweep_unfinished(tmp_path / "a")
    assert not mine.exists() and fresh.exists() and other.exists()


def test_a_folder_moved_aside_and_never_replaced_goes_back(tmp_path):
    aside = tmp_path / f".a{TEMPORARY_MARK}old-1"
    aside.mkdir()
    (aside / "x").write_text("x")
    sweep_unfinished(tmp_path / "a")
    assert (tmp_path / "a" / "x").read_text() == "x"


def test_a_folder_loses_its_name_before_its_files(tmp_path, monkeypatch):
    """A process killed while it deletes must not leave a folder that looks whole to the next reader."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "weights").write_text("w")
    monkeypatch.setattr(files.shutil, "rmtree", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        files.remove_folder(folder)
    assert not folder.exists()
    (left,) = tmp_path.iterdir()
    assert files.TEMPORARY_MARK in left.name and (left / "weights").read_text() == "w"
    monkeypatch.undo()
    files.remove_folder(left)
    files.remove_folder(folder)
    assert not list(tmp_path.iterdir())
