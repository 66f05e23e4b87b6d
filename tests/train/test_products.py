"""Held weights: the gradient that many uses sum up is autograd's; float8 operands and products against float64."""

from __future__ import annotations

import pytest
import torch

from draftsmith.train import float8
from draftsmith.train.layer import Fed, first_products
from draftsmith.train.products import Bank, Held, HeldFloat8


def test_many_uses_of_a_weight_give_the_gradients_of_autograd():
    module = torch.nn.Linear(6, 6, bias=False).double()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)

    def chain(linear):
        first = linear(x)
        return (linear(first + x).tanh() * linear(first)).sum()

    bank = Bank()
    want = torch.autograd.grad(chain(module), [x, module.weight])
    got = torch.autograd.grad(chain(lambda states: bank.linear(module, states)), [x, module.weight])
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_addend_and_a_bias_receive_theirs():
    module = torch.nn.Linear(4, 3).double()
    x, add = torch.randn(2, 4).double().requires_grad_(), torch.randn(2, 3).double().requires_grad_()
    inputs = [x, add, module.weight, module.bias]
    want = torch.autograd.grad(((module(x) + add) ** 2).sum(), inputs)
    got = torch.autograd.grad((Bank().linear(module, x, add) ** 2).sum(), inputs)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_embeddings_multiplied_once_give_what_the_concatenation_gives():
    """Three steps that feed the same tokens one index further on, the first module at some rows only."""
    hidden, eps = 4, 1e-5
    modules = [torch.nn.Linear(2 * hidden, size, bias=False).double() for size in (3, 2)]
    table, ids = torch.randn(9, hidden).double(), torch.tensor([3, 3, 8, 0, 5, 1, 3])
    norms = [torch.randn(hidden, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    states = [torch.randn(5, hidden, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    queries = torch.tensor([0, 2, 3])

    def normed(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def plain():
        for step, state in enumerate(states):
            joined = torch.cat([normed(table[ids[step : step + 5]], norms[0]), normed(state, norms[1])], -1)
            yield modules[0](joined[queries]), modules[1](joined)

    def ours():
        fed = Fed(Bank(), modules, norms[0], eps, table, ids, torch.float64)
        for step, state in enumerate(states):
            yield first_products(fed, state, norms[1], torch.arange(5) + step, queries, eps)

    inputs = [*states, *norms, *(module.weight for module in modules)]
    found = []
    for way in (plain, ours):
        outputs = [part for step in way() for part in step]
        loss = sum((part * torch.arange(part.numel()).view_as(part)).tanh().sum() for part in outputs)
        found.append([*outputs, *torch.autograd.grad(loss, inputs)])
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_float8_operands_by_hand():
    """Row 0 peaks at 448, so its scale is 1 and values round to e4m3's steps of 16, 2 and 1, ties to even; row 1 is scaled by 2 / 448."""
    x = torch.tensor([[448.0, 200.0, 17.0, 15.5], [2.0, -1.0, 0.0, 0.5]])
    scaled = float8.rows(x)
    assert scaled.scale.flatten().tolist() == pytest.approx([1.0, 2.0 / 448.0])
    assert scaled.values.float()[0].tolist() == [448.0, 192.0, 16.0, 16.0]
    assert scaled.values.float()[1].tolist() == [448.0, -224.0, 0.0, 112.0]
    turned = float8.columns(x.t())
    assert turned.values.shape == (2, 16) and not turned.values.float()[:, 4:].any()
    assert torch.equal(turned.values.float()[:, :4], scaled.values.float())


@pytest.mark.parametrize("rows", [7, 32])
def test_float8_products_are_close_to_float64_in_value_and_gradients(rows):
    weight = torch.randn(48, 64)
    held = HeldFloat8(weight, torch.float32)
    exact = Held(weight, torch.float32)
    x, grad = torch.randn(rows, 64) * torch.logspace(-2, 2, rows)[:, None], torch.randn(rows, 48)
    pairs = [
        (held.forward(held.left(x)), exact.forward(x)),
        (held.back(held.left(grad)), exact.back(grad)),
    ]
    for each, right, left in ((held, held.right(grad), held.right(x)), (exact, grad, x)):
        each.learn(right, left)
        each.learn(right, left)
    pairs.append((held.take(), exact.take()))
    for ours, theirs in pairs:
        off = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert 0 < off.max() < 0.08, off


def test_weights_whose_sides_the_tensor_cores_do_not_take_stay_as_they_are():
    bank = Bank(float8=True)
    assert type(bank[torch.nn.Linear(64, 32, bias=False)]) is HeldFloat8
    assert type(bank[torch.nn.Linear(64, 33, bias=False)]) is Held
