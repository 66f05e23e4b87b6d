"""Which precision a launch trains in."""

from __future__ import annotations

import pytest
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import TrainSection
from draftsmith.train.launch import precision_of


@pytest.mark.parametrize(
    ("asked", "launched", "cuda", "expected"),
    [
        (None, None, False, torch.float32),
        (None, "no", False, torch.float32),
        (None, "bf16", False, torch.bfloat16),
        (None, None, True, torch.bfloat16),
        (None, "no", True, torch.bfloat16),  # a launcher whose file says nothing sets `no`
        ("float32", "bf16", True, torch.float32),
        ("bfloat16", "no", False, torch.bfloat16),
    ],
)
def test_the_configuration_comes_first_and_a_silent_launcher_asks_for_nothing(
    monkeypatch, asked, launched, cuda, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if launched is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    assert precision_of(TrainSection(precision=asked)) is expected


def test_a_precision_that_is_not_offered_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(DraftsmithError, match="precision"):
        precision_of(TrainSection())
