"""Every back end of accelerate trains as one process does: losses, gradient norms and final weights, to rounding."""

from __future__ import annotations

import pytest
import torch

from tests.train.launching import final_tensors, losses, run

pytestmark = pytest.mark.slow

STEPS = ("train.epochs=2", "train.batch_tokens=192", "train.log_every=1")


@pytest.fixture(scope="module")
def alone(prepared, tmp_path_factory, module_copy):
    """The run of one process without accumulation."""
    return run(module_copy("alone"), *STEPS, tmp_path=tmp_path_factory.mktemp("alone"))


def same_run(one, other):
    curves = losses(one), losses(other)
    assert len(curves[0]) == len(curves[1]) > 5
    for (step, loss, norm), (also, their_loss, their_norm) in zip(*curves, strict=True):
        assert also == step
        assert their_loss == pytest.approx(loss, rel=1e-5)
        assert their_norm == pytest.approx(norm, rel=1e-4)
    tensors = final_tensors(one), final_tensors(other)
    assert tensors[0].keys() == tensors[1].keys()
    for name, value in tensors[0].items():
        torch.testing.assert_close(tensors[1][name], value, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("back_end", "accumulation"),
    [("ddp", 1), ("ddp", 4), ("zero1", 1), ("zero1", 4), ("zero2", 1), ("zero2", 4), ("zero3", 1), ("zero3", 4)],
)
def test_two_processes_train_as_one(copy, alone, tmp_path, back_end, accumulation):
    config = run(copy(), *STEPS, f"train.accumulation={accumulation}", back_end=back_end, tmp_path=tmp_path)
    same_run(alone, config)


def test_accumulation_in_one_process_changes_nothing(copy, alone, tmp_path):
    same_run(alone, run(copy(), *STEPS, "train.accumulation=4", back_end="single", tmp_path=tmp_path))
