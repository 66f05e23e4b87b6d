"""One optimiser step's gradient does not depend on how its data is cut, ordered or packed, in each precision."""

from __future__ import annotations

import itertools

import pytest
import torch

from draftsmith.configs.schema import load_config
from draftsmith.train.batch import pack
from draftsmith.train.initial import build_drafter
from draftsmith.train.inputs import read_inputs
from draftsmith.train.plan import deal, load_window, plan_windows, step_counts
from draftsmith.train.unroll import Unroll, loss_coefficients

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Allowed relative error of a whole gradient: a few units of the dtype's last place."""

LOSS_SCALE = {torch.float16: 1024.0}
"""float16's smallest number is 6e-8; a gradient over hundreds of positions needs lifting."""


@pytest.fixture(scope="module")
def material(prepared):
    config = load_config(prepared)
    inputs = read_inputs(config)
    embedding = inputs.target.require("embedding").load().float()
    head = inputs.target.require("head").load()[inputs.targets].float()
    unroll = Unroll(
        build_drafter(inputs.spec, inputs.target, embedding, inputs.targets, config.train), head, inputs.targets
    )
    windows = plan_windows(inputs.train, 48, config.train.unroll_steps, "aligned")
    return unroll, inputs.train, windows, config.train.unroll_steps


def gradient(material, micro_batches, dtype):
    """The flat gradient of one step over `micro_batches` (lists of windows), accumulated as the trainer does."""
    unroll, reader, _, steps = material
    counts = step_counts(list(itertools.chain(*micro_batches)), steps)
    scale = LOSS_SCALE.get(dtype, 1.0)
    coefficients = [scale * value for value in loss_coefficients(counts, 0.8)]
    unroll.zero_grad()
    for windows in micro_batches:
        batch = pack([load_window(reader, window, steps) for window in windows], steps)
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss, _ = unroll(batch, coefficients)
        loss.backward()
    return torch.cat([p.grad.double().flatten() / scale for p in unroll.parameters()])


def distance(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("dtype", ROUNDING)
def test_cutting_a_step_or_permuting_it_leaves_its_gradient(material, dtype):
    windows = material[2][:12]
    whole = gradient(material, [windows], dtype)
    four = [hand for hand in deal(windows, 4) if hand]
    orders = {
        "four micro-batches": four,
        "in another order": four[::-1],
        "windows in another order": [windows[::-1]],
        "cut elsewhere": [windows[:1], windows[1:3], windows[3:]],
        "one a window": [[window] for window in windows],
    }
    for name, order in orders.items():
        assert distance(gradient(material, order, dtype), whole) < ROUNDING[dtype], name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_gives_the_float32_gradient_to_its_rounding(material, dtype):
    windows = material[2][:12]
    assert (
        distance(gradient(material, [windows], dtype), gradient(material, [windows], torch.float32))
        < 3 * ROUNDING[dtype]
    )


def test_the_measure_sees_a_mean_of_means(material):
    """Normalising each micro-batch by itself, the common mistake, is far outside the allowed rounding."""
    windows = sorted(material[2][:12], key=lambda w: w.counts[0])
    parts = [windows[:2], windows[2:]]
    wrong = sum(gradient(material, [part], torch.float32) for part in parts) / 2
    assert distance(wrong, gradient(material, parts, torch.float32)) > 0.02
