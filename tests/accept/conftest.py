"""The tiny run of the trainer's tests, and a drafter trained on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftsmith.configs.schema import RunConfig, load_config
from tests.train.conftest import copy, prepared  # noqa: F401  (fixtures)


@pytest.fixture(scope="session")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:  # noqa: F811
    """A run whose drafter has learnt something."""
    import json
    import shutil

    from draftsmith.train.trainer import train

    values = json.loads(prepared.read_text())
    runs = tmp_path_factory.mktemp("trained") / "runs"
    shutil.copytree(values["runs"], runs)
    file = runs.parent / "run.yaml"
    file.write_text(json.dumps(values | {"runs": str(runs)}))
    config = load_config(file, ["train.epochs=20", "train.learning_rate=0.003", "train.evaluate_every=1000"])
    train(config)
    return config
