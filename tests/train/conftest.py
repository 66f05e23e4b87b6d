"""A tiny target whose conversations are synthesised, counted and harvested once; every test trains on its own copy."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

import pytest

from draftsmith.configs.schema import load_config
from tests.preparing import make_ready
from tests.train import warm

_spec = importlib.util.spec_from_file_location("tiny_target", Path(__file__).parents[1] / "tiny_target.py")
tiny_target = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_target)

SUBJECTS = [
    "the quick brown fox",
    "a river",
    "numbers and words",
    "gardens",
    "music",
    "physics",
    "colours",
    "a lazy dog",
]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """The configuration file of a run that is ready to train."""
    folder = tmp_path_factory.mktemp("prepared")
    for split, ask in (("train", "tell me about"), ("heldout", "what is")):
        rows = [
            {"id": f"{split}-{n}", "category": "chat", "turns": [f"{ask} {what}"]} for n, what in enumerate(SUBJECTS)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "name": "run",
        "runs": str(folder / "runs"),
        "target": {"path": str(tiny_target.make_tiny_target(folder / "target"))},
        "prompts": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl"), "heldout_limit": 4},
        "synthesize": {"batch_size": 8, "max_new_tokens": 40},
        "harvest": {"batch_tokens": 512},
        "vocab": {"size": 400},
        "train": {
            "unroll_steps": 3, "epochs": 3, "batch_tokens": 128, "max_length": 48, "learning_rate": 1e-3,
            "save_every": 2, "evaluate_every": 6, "log_every": 1,
        },
        "evaluate": {"draft_steps": 3},
    }  # fmt: skip
    file = folder / "run.yaml"
    file.write_text(json.dumps(values))
    make_ready(load_config(file))
    return file


@pytest.fixture(scope="session")
def warm_python():
    """An executable in the place of python, which starts the trainer without waiting for imports."""
    with tempfile.TemporaryDirectory() as folder, warm.warm_python(Path(folder)) as python:
        yield python


@pytest.fixture
def copy(prepared, tmp_path):
    """A function that gives a configuration file whose run is a private copy."""
    return lambda name="copy": private_copy(prepared, tmp_path, name)


@pytest.fixture(scope="module")
def module_copy(prepared, tmp_path_factory):
    """As `copy`, for fixtures that a module's tests share."""
    return lambda name="copy": private_copy(prepared, tmp_path_factory.mktemp("module"), name)


def private_copy(prepared, folder, name):
    """A configuration file whose run is a copy of the prepared one in `folder`."""
    values = json.loads(prepared.read_text())
    runs = folder / name
    shutil.copytree(values["runs"], runs)
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(values | {"runs": str(runs)}))
    return file
