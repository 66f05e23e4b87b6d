"""Promises of the store's codecs: sizes, errors, and values worked out from the format's own definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.plan import state_bytes
from draftsmith.configs.schema import RunConfig
from draftsmith.data.codec import decode, encode, layout, token_bytes
from draftsmith.data.harvest import CODECS, harvest
from draftsmith.data.store import HarvestedConversation, HarvestReader, Provenance
from draftsmith.data.store_writer import StoreWriter
from draftsmith.data.synthesize import synthesize


def e4m3_values() -> list[float]:
    """Every finite value of e4m3fn, from sign, 4 exponent bits (bias 7) and 3 mantissa bits; 0x7f and 0xff are NaN."""
    values = []
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        if code & 127 != 127:
            values.append(-size if code >> 7 else size)
    return sorted(set(values))


def states(tokens: int = 50, hidden: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps with two channels a thousand times larger than the others, as real targets have them, and an even final."""
    generator = torch.Generator().manual_seed(5)
    taps = torch.randn(tokens, 3, hidden, generator=generator)
    taps[..., 7] *= 1000
    taps[..., 20] *= -300
    return taps.bfloat16(), torch.randn(tokens, hidden, generator=generator).bfloat16()


def test_bf16_keeps_every_bit() -> None:
    taps, final = states()
    again = decode("bfloat16", encode("bfloat16", taps, final))
    assert torch.equal(again[0], taps) and torch.equal(again[1], final)


def test_a_tap_becomes_the_nearest_e4m3_value_of_its_largest() -> None:
    taps, final = states(tokens=4)
    stored = encode("fp8", taps, final)
    values = torch.tensor(e4m3_values(), dtype=torch.float64)
    assert len(values) == 253 and values[-1] == 448
    for token in range(4):
        for tap in range(3):
            row = taps[token, tap].double()
            scale = stored["taps_scale"][token, tap].double()
            assert scale == pytest.approx(float(row.abs().max()) / 448, rel=1e-6)
            found = stored["taps"][token, tap].double()
            wanted = row / scale
            best = (wanted[:, None] - values).abs().min(dim=1).values
            # nothing is nearer than the value that was chosen, up to the rounding of the float32 division
            assert bool(((wanted - found).abs() <= best + 1e-4 * wanted.abs() + 1e-9).all())


def test_a_group_of_the_final_state_errs_by_half_a_step_at_most() -> None:
    taps, final = states()
    stored = encode("fp8", taps, final)
    assert stored["final"].dtype == torch.int8 and stored["final_scale"].shape == (50, 2)
    step = stored["final_scale"].float().repeat_interleave(32, dim=1)
    found = stored["final"].float() * step
    # bf16 rounds a scale by up to 1/256, so that the largest value may lie 127/256 of a step beyond the grid's end
    assert bool(((found - final.float()).abs() <= 0.51 * step).all())


def test_errors_are_what_the_docs_say() -> None:
    taps, final = states(tokens=400)
    again_taps, again_final = decode("fp8", encode("fp8", taps, final))
    small = [channel for channel in range(64) if channel not in (7, 20)]
    relative = (again_taps - taps).float()[..., small].norm() / taps.float()[..., small].norm()
    assert 0.01 < relative < 0.04  # channels a thousand times smaller than the largest keep their three bits
    assert (again_final - final).float().norm() / final.float().norm() < 0.01


def test_rows_of_zeros_stay_zero_and_rows_do_not_mix() -> None:
    taps, final = states()
    taps[3, 1], final[4] = 0, 0
    again_taps, again_final = decode("fp8", encode("fp8", taps, final))
    assert not again_taps[3, 1].any() and not again_final[4].any()
    alone = decode("fp8", encode("fp8", taps[10:11], final[10:11]))
    assert torch.equal(alone[0][0], again_taps[10]) and torch.equal(alone[1][0], again_final[10])


@pytest.mark.parametrize(("hidden", "taps"), [(576, 3), (7168, 3), (4096, 3), (64, 4)])
def test_fp8_takes_at_most_052_of_bf16(hidden: int, taps: int) -> None:
    share = (token_bytes("fp8", taps, hidden) + 9) / (token_bytes("bfloat16", taps, hidden) + 9)
    assert 0.5 < share <= (0.52 if hidden > 64 else 0.54)
    assert token_bytes("bfloat16", taps, hidden) == 2 * (taps + 1) * hidden
    assert token_bytes("fp8", taps, hidden) == taps * hidden + 4 * taps + hidden + hidden // 32 * 2
    for name, codec in CODECS.items():  # what `plan` announces
        assert state_bytes(name, taps, hidden) == token_bytes(codec, taps, hidden) + 9


def test_a_width_without_a_factor_of_32_is_stored_too() -> None:
    taps, final = states(hidden=24)
    stored = encode("fp8", taps, final)
    assert stored["final_scale"].shape == (50, 3)
    assert {name: (one.dtype, one.shape) for name, one in layout("fp8", 3, 24).items()} == {
        name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in stored.items()
    }


def test_an_fp8_store_is_read_like_any_other_and_windows_cost_their_rows(
    make_config: Callable[..., RunConfig],
) -> None:
    config, half = make_config(), make_config(name="half", harvest__codec="fp8")
    for one in (config, half):
        synthesize(one, "train")
    whole, fp8 = HarvestReader(harvest(config, "train")), HarvestReader(harvest(half, "train"))
    assert fp8.manifest.stored_in == "fp8" and fp8.ids == whole.ids
    for number in range(len(whole)):
        one, other = whole[number], fp8[number]
        assert other.taps.dtype == other.final.dtype == torch.bfloat16
        expected = decode("fp8", encode("fp8", one.taps, one.final))
        assert torch.equal(other.taps, expected[0]) and torch.equal(other.final, expected[1])
        for name in ("input_ids", "generated", "argmax"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        window = fp8.window(number, 3, 9)
        assert torch.equal(window.taps, other.taps[3:9]) and torch.equal(window.input_ids, other.input_ids[3:9])
    sizes = [sum(shard.bytes for shard in reader.manifest.shards) for reader in (whole, fp8)]
    assert sizes[1] < 0.62 * sizes[0]  # hidden 64 and tiny shards: ids and headers weigh more than in earnest
    shard = load_file(fp8.path / fp8.manifest.shards[0].file)
    assert shard["taps"].dtype == torch.float8_e4m3fn and shard["taps_scale"].dtype == torch.float32


def test_a_store_is_not_continued_in_another_codec(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    synthesize(config, "train")
    harvest(config, "train")
    with pytest.raises(DraftsmithError, match=r"another stored_in(.|\n)*bfloat16(.|\n)*fp8"):
        harvest(make_config(harvest__codec="fp8"), "train")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_do_not_hide_in_fp8(tmp_path: Path, value: float) -> None:
    taps, final = states(tokens=5)
    item = HarvestedConversation(
        id="c0", input_ids=torch.arange(5), generated=torch.ones(5, dtype=torch.bool), taps=taps, final=final,
        argmax=torch.arange(5), greedy=True, mean_logprob=None,
    )  # fmt: skip
    provenance = Provenance(
        target={}, target_mark="", taps=(2, 4, 5), hidden_size=64, vocab_size=9, computed_in="float32", stored_in="fp8",
        source="", planned=1, max_length=9, shard_tokens=9,
    )  # fmt: skip
    sick = final.clone()
    sick[3, 60] = value
    with StoreWriter(tmp_path, provenance) as writer, pytest.raises(DraftsmithError, match=r"final of(.|\n)*token 3"):
        writer.append(replace(item, final=sick))
    from draftsmith.data.codec import not_finite

    assert not_finite("fp8", encode("fp8", taps, sick))["final"].tolist() == [False, False, False, True, False]
