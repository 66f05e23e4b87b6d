"""AdamW over masters: float32 AdamW on the same gradients, with 16-bit weights that follow."""

from __future__ import annotations

import torch

from draftsmith.train.masters import MasterAdamW

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}


def make():
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(5, 4)), torch.nn.Parameter(torch.randn(4))]


def test_steps_equal_float32_adamw_on_the_same_clipped_gradients():
    ours, theirs = make(), make()
    optimizer, reference = MasterAdamW(ours, torch.bfloat16, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    assert [weight.dtype for weight in ours] == [torch.bfloat16, torch.float32]
    for step in range(20):
        grads = [torch.randn_like(weight) * 10 ** (step % 3 - 1) for weight in ours]
        for weight, other, grad in zip(ours, theirs, grads, strict=True):
            weight.grad, other.grad = grad, grad.float().clone()
        norm = optimizer.clip(1.0)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        for weight, master, other in zip(ours, optimizer.masters, theirs, strict=True):
            torch.testing.assert_close(master.data, other.data)
            assert torch.equal(weight, master.to(weight.dtype)) and weight.grad is None


def test_small_steps_are_not_lost_in_sixteen_bits():
    weight = torch.nn.Parameter(torch.full((1, 1), 256.0))
    optimizer = MasterAdamW([weight], torch.bfloat16, lr=0.01)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.item() < 255
