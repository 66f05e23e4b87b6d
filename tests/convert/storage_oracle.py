"""What the storage tests share: tensors read through the product as torch tensors, and runs of the writers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from draftsmith.convert.tensors import Tensor, read_array

WRITERS = Path(__file__).with_name("storage_writers.py")
SOURCES = Path(__file__).parents[2] / "src"
LAUNCHES = SOURCES / "draftsmith" / "configs" / "accelerate"


class Evil:
    """A pickle of this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def as_torch(tensor: Tensor) -> torch.Tensor:
    array = read_array(tensor)
    value = torch.from_numpy(array)
    return value.view(torch.bfloat16) if tensor.dtype == "BF16" else value


def assert_same(named: Iterable[tuple[str, Tensor]], held: dict[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and every bit."""
    ours = {name: as_torch(tensor) for name, tensor in named}
    assert ours.keys() == held.keys()
    for name, value in held.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), name


def write(what: str, out: Path, *launcher: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, *launcher, str(WRITERS), what, str(out)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
