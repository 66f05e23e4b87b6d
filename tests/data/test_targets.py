"""Promises of the harvest over targets of many kinds: deep ones, long texts in pieces, pictures, quantised weights."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.configs.drafter import default_taps
from draftsmith.configs.schema import TargetSection
from draftsmith.configs.target import read_target
from draftsmith.convert.write import convert
from draftsmith.data.harvest import harvest, whole_pass_only
from draftsmith.data.store import HarvestReader
from draftsmith.data.target_model import _placement, load_target
from draftsmith.data.trunk import Trunk


def trunk_states(path: Path, rows: list[np.ndarray], taps: tuple[int, ...], dtype: str = "float32", **named: Any):
    with torch.no_grad():
        return Trunk(load_target(TargetSection(path=path), dtype), taps, "bfloat16", **named).states(rows)


def make_marker_target(path: Path, layers: int = 61) -> Path:
    """A real Llama whose layer k adds exactly 1 to channel k+1 and nothing else: R[k] says which layers have run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, mlp_bias=True, max_position_embeddings=256, tie_word_embeddings=False,
        )
    ).float()  # fmt: skip
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = torch.arange(512) + 1.0
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.mlp.down_proj.bias.zero_()
            layer.mlp.down_proj.bias[number + 1] = 1.0
    model.save_pretrained(path)
    return path


def layers_run(rows: torch.Tensor) -> list[int]:
    """How many layers have added their mark, for each row; -1 where the marks are not those of the first so many."""
    marks = rows[:, 1:62].float()
    counts = marks.sum(dim=1).long()
    first = torch.arange(61)[None] < counts[:, None]
    return [
        int(count) if torch.equal(mark, want.float()) else -1
        for count, mark, want in zip(counts, marks, first, strict=True)
    ]


def test_the_marks_of_61_layers_are_harvested_at_2_30_58_and_not_beside_them(
    make_config: Callable[..., Any], put_conversations: Callable[..., list], tmp_path: Path, tiny: Path
) -> None:
    marker = make_marker_target(tmp_path / "marker")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (marker / name).write_bytes((tiny / name).read_bytes())
    assert default_taps(61) == (2, 30, 58)
    config = make_config(target__path=str(marker))
    put_conversations(config, [([3, 4, 5, 6, 7], [(2, 5)]), ([8, 9], [(1, 2)])], target=marker)
    reader = HarvestReader(harvest(config, "train"))
    assert reader.manifest.taps == (2, 30, 58)
    for item in reader:
        for place, tap in enumerate((2, 30, 58)):
            # R[k] enters layer k: layers 0 .. k-1 have run
            assert layers_run(item.taps[:, place]) == [tap] * len(item.input_ids)
            assert item.taps[:, place, 0].tolist() == [float(token) + 1 for token in item.input_ids]


def test_the_written_config_makes_engines_read_the_harvested_layers(tmp_path: Path) -> None:
    """SGLang copies what leaves the layers it finds in eagle_config, vLLM what enters those at the top level."""
    spec = importlib.util.spec_from_file_location("convert_conftest", Path(__file__).parents[1] / "convert/conftest.py")
    assert spec is not None and spec.loader is not None
    helpers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helpers)
    marker = make_marker_target(tmp_path / "marker")
    checkpoint = helpers.make_checkpoint(tmp_path / "checkpoint", marker, taps=(2, 30, 58))
    convert(checkpoint, marker, tmp_path / "drafter", to="sglang")
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    target, entering, leaving = load_target(TargetSection(path=marker), "float32"), {}, {}
    for number, layer in enumerate(target.layers):
        layer.register_forward_pre_hook(
            lambda _, arguments, number=number: entering.__setitem__(number, arguments[0][0])
        )
        layer.register_forward_hook(lambda _, __, output, number=number: leaving.__setitem__(number, output[0]))
    with torch.no_grad():
        target.trunk(input_ids=torch.arange(5)[None])
    sglang = [leaving[number] for number in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    vllm = [entering[number] for number in config["eagle_aux_hidden_state_layer_ids"]]
    harvested, _ = trunk_states(marker, [np.arange(5, dtype=np.int32)], (2, 30, 58))
    for place in range(3):
        assert layers_run(harvested[:, place]) == [(2, 30, 58)[place]] * 5
        assert torch.equal(sglang[place], harvested[:, place]) and torch.equal(vllm[place], harvested[:, place])


@pytest.mark.parametrize(("dtype", "worst"), [("float32", 2e-5), ("bfloat16", 0.06)])
def test_a_long_text_in_pieces_equals_one_pass_up_to_rounding(tiny: Path, dtype: str, worst: float) -> None:
    row = torch.randint(0, 512, (700,), generator=torch.Generator().manual_seed(3)).numpy().astype(np.int32)
    whole = trunk_states(tiny, [row], (2, 4, 5), dtype)
    for chunk in (256, 699):
        pieces = trunk_states(tiny, [row], (2, 4, 5), dtype, chunk=chunk)
        for one, other in zip(pieces, whole, strict=True):
            assert one.shape == other.shape
            difference = (one.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1)
            assert float(difference.max()) < worst
    # a text that fits is not cut, and then not one bit differs
    same = trunk_states(tiny, [row], (2, 4, 5), dtype, chunk=700)
    assert torch.equal(same[0], whole[0]) and torch.equal(same[1], whole[1])
    # the same pieces give the same bits
    again = trunk_states(tiny, [row], (2, 4, 5), dtype, chunk=256)
    once_more = trunk_states(tiny, [row], (2, 4, 5), dtype, chunk=256)
    assert torch.equal(again[0], once_more[0]) and torch.equal(again[1], once_more[1])


def test_a_text_is_not_cut_where_rope_depends_on_its_length(tiny: Path, tmp_path: Path) -> None:
    assert not whole_pass_only(read_target(tiny))
    other = tmp_path / "long"
    other.mkdir()
    for file in tiny.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((tiny / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    (other / "config.json").write_text(json.dumps(config))
    assert whole_pass_only(read_target(other))


def small_text() -> dict[str, Any]:
    return {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip


def make_llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**small_text()), image_token_index=511)
    )


def make_qwen_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = small_text() | {"rope_scaling": {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=511, video_token_id=510)
    )


@pytest.mark.parametrize("make", [make_llava, make_qwen_vl])
def test_a_target_that_sees_pictures_runs_through_its_language_model(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().float().eval()
    model.save_pretrained(tmp_path)
    rows = [np.arange(1, 30, dtype=np.int32), np.arange(40, 52, dtype=np.int32)]
    taps, final = trunk_states(tmp_path, rows, (2, 3, 4))
    start = 0
    for row in rows:
        with torch.no_grad():
            output = model(input_ids=torch.from_numpy(row.astype(np.int64))[None], output_hidden_states=True)
        for place, tap in enumerate((2, 3, 4)):
            torch.testing.assert_close(
                taps[start : start + len(row), place], output.hidden_states[tap][0], rtol=1e-4, atol=1e-4
            )
        torch.testing.assert_close(
            model.get_output_embeddings()(final[start : start + len(row)]), output.logits[0], rtol=1e-4, atol=1e-4
        )
        start += len(row)


def test_processes_of_a_machine_share_its_accelerators_out() -> None:
    section = TargetSection(path=Path())
    assert _placement(section, 0, 1, 2) == {}
    assert [_placement(section, 2, number, 2)["device_map"] for number in range(2)] == [{"": 0}, {"": 1}]
    assert [_placement(section, 1, number, 2)["device_map"] for number in range(2)] == [{"": 0}, {"": 0}]
    mapped = TargetSection(path=Path(), device_map={"model": "cpu", "lm_head": "cpu"})
    assert _placement(mapped, 8, 3, 4) == {"device_map": {"model": "cpu", "lm_head": "cpu"}}


def test_a_device_map_of_transformers_gives_the_same_states(tiny: Path) -> None:
    rows = [np.arange(20, dtype=np.int32)]
    plain = trunk_states(tiny, rows, (2, 4, 5))
    section = TargetSection(path=tiny, device_map="cpu")
    with torch.no_grad():
        mapped = Trunk(load_target(section, "float32"), (2, 4, 5), "bfloat16").states(rows)
    assert torch.equal(plain[0], mapped[0]) and torch.equal(plain[1], mapped[1])
