"""Promises of the harvest over quantised targets: the states are those of the numbers that the packed weights stand for."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig, TargetSection
from draftsmith.data.harvest import harvest
from draftsmith.data.store import HarvestReader
from draftsmith.data.target_model import load_target

SIDE = 32
"""Side of a block, or length of a group, that shares a scale."""

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]


def in_fp8_blocks(name: str, weight: torch.Tensor) -> Packed:
    """e4m3 under one scale a block of 32 x 32, as DeepSeek's checkpoints have it, and the numbers that it stands for."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows // SIDE, SIDE, columns // SIDE, SIDE)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    numbers = (values.float() * scale[:, None, :, None]).reshape(rows, columns)
    return {f"{name}.weight": values.reshape(rows, columns), f"{name}.weight_scale_inv": scale}, numbers


def in_packed_int4(name: str, weight: torch.Tensor) -> Packed:
    """Eight 4-bit numbers, 8 more than they mean, in an int32, one scale a group of 32: as Kimi's checkpoints have it."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, SIDE)
    scale = groups.abs().amax(dim=-1) / 7.5
    steps = (groups / scale[..., None]).round().clamp(-8, 7)
    nibbles = (steps.reshape(rows, -1, 8) + 8).long() << torch.arange(0, 32, 4)
    words = nibbles.sum(dim=-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).int()
    parts = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
    numbers = (steps * scale[..., None]).reshape(rows, columns)
    return {f"{name}.{part}": value for part, value in parts.items()}, numbers


FP8 = {"quant_method": "fp8", "weight_block_size": [SIDE, SIDE], "activation_scheme": "dynamic"}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": SIDE,
    }}},
}  # fmt: skip


def quantise(
    tiny: Path, folder: Path, pack: Callable[[str, torch.Tensor], Packed], settings: dict[str, Any]
) -> tuple[Path, Path]:
    """The tiny target with the products of its layers packed, and one with the numbers that they stand for."""
    packed, plain = (Path(shutil.copytree(tiny, folder / name)) for name in ("packed", "plain"))
    small, numbers = {}, {}
    for name, weight in load_file(tiny / "model.safetensors").items():
        if weight.dim() == 2 and ".layers." in name:
            parts, numbers[name] = pack(name.removesuffix(".weight"), weight)
            small |= parts
        else:
            small[name] = numbers[name] = weight
    save_file(
        {name: value.contiguous() for name, value in small.items()}, packed / "model.safetensors", {"format": "pt"}
    )
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((tiny / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return packed, plain


@pytest.mark.parametrize(("pack", "settings"), [(in_fp8_blocks, FP8), (in_packed_int4, INT4)], ids=["fp8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_target_gives_the_states_of_the_numbers_it_stands_for(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., list], tiny: Path, tmp_path: Path,
    pack: Callable[[str, torch.Tensor], Packed], settings: dict[str, Any], dtype: str,
) -> None:  # fmt: skip
    if settings is INT4:
        pytest.importorskip("compressed_tensors")
    stores = []
    for folder in quantise(tiny, tmp_path, pack, settings):
        config = make_config(name=folder.name, target__path=str(folder), target__dtype=dtype)
        put_conversations(config, [([9, 8, 4, 77, 210], [(1, 5)]), ([5, 300, 4], [(1, 3)])], target=folder)
        stores.append(HarvestReader(harvest(config, "train")))
    assert stores[0].manifest.target != stores[1].manifest.target
    for one, other in zip(*stores, strict=True):
        if dtype == "float32":
            assert torch.equal(one.taps, other.taps) and torch.equal(one.final, other.final)
        else:  # a scale or a product is rounded once more
            for a, b in ((one.taps, other.taps), (one.final, other.final)):
                errors = (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)
                assert float(errors.max()) < 0.05


def test_the_case_would_notice_unquantised_weights(tiny: Path, tmp_path: Path) -> None:
    _, plain = quantise(tiny, tmp_path, in_fp8_blocks, FP8)
    name = "model.layers.3.mlp.up_proj.weight"
    assert not torch.equal(load_file(plain / "model.safetensors")[name], load_file(tiny / "model.safetensors")[name])


@pytest.mark.parametrize(
    ("settings", "module", "words"),
    [
        (INT4, "compressed_tensors", r"quantised \(compressed-tensors\)(?s:.*)lacks a package(?s:.*)pip install compressed-tensors;"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}, "torchao",
         r"quantised \(torchao\)(?s:.*)lacks a package(?s:.*)pip install torchao;"),
    ],
    ids=["compressed-tensors", "torchao"],
)  # fmt: skip
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], module: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("transformers.utils.quantization_config.is_compressed_tensors_available", lambda: False)
    packed, _ = quantise(tiny, tmp_path, in_packed_int4, settings)
    with pytest.raises(DraftsmithError, match=words):
        load_target(TargetSection(path=packed), "float32")


def test_a_quantisation_that_nobody_knows_is_named(tiny: Path, tmp_path: Path) -> None:
    packed, _ = quantise(tiny, tmp_path, in_packed_int4, {"quant_method": "homemade"})
    with pytest.raises(DraftsmithError, match=r"do not have the weight(?s:.*)quantisation \(homemade\)"):
        load_target(TargetSection(path=packed), "float32")
