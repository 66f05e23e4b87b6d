"""Promises about Kimi-K2.5, kept on a miniature of it: read, rendered, harvested, trained, converted, verified, planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from draftsmith.configs.costs import target_cost
from draftsmith.configs.plan import describe, make_plan
from draftsmith.configs.schema import RunConfig, SynthesizeSection, load_config
from draftsmith.configs.target import read_target
from draftsmith.convert.verify import verify
from draftsmith.convert.write import convert
from draftsmith.data.chat import ChatFormat
from draftsmith.data.conversations import Conversation, read_conversations
from draftsmith.data.prompt_rows import Prompt, read_row
from draftsmith.data.store import HarvestReader
from draftsmith.data.target_model import configured_stop_ids
from draftsmith.data.threads import Thread
from draftsmith.train.trainer import train
from tests.kimi_mini import MARKUP, SPECIAL, make_kimi_mini
from tests.preparing import make_ready

END = SPECIAL["<|im_end|>"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ROWS: list[dict[str, Any]] = [
    {"id": "twice", "category": "chat", "turns": ["the quick brown fox", "and questions?"]},
    {"id": "once", "category": "chat", "turns": ["what is a river?"]},
    {"id": "other", "category": "chat", "turns": ["gardens and words"]},
    {
        "id": "tool", "category": "tools", "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "sum?"},
            {"role": "assistant", "content": None, "reasoning_content": "add them", "tool_calls": [CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "functions.add:0"},
            {"role": "assistant", "content": "to be answered anew"},
        ],
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kimi_mini(tmp_path_factory.mktemp("kimi") / "Kimi-K2.5")


@pytest.fixture(scope="module")
def run(kimi: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run whose conversations, vocabulary, stores and drafter are there."""
    folder = tmp_path_factory.mktemp("run")
    for split, tail in (("train", ""), ("heldout", " again")):
        rows = [dict(row, turns=[turn + tail for turn in row["turns"]]) if "turns" in row else row for row in ROWS]
        rows = rows if split == "train" else rows[:2]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "name": "kimi", "runs": str(folder / "runs"), "target": {"path": str(kimi)},
        "prompts": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")},
        "synthesize": {"batch_size": 4, "max_new_tokens": 12}, "harvest": {"batch_tokens": 512},
        "vocab": {"size": 600},
        "train": {"unroll_steps": 3, "epochs": 3, "batch_tokens": 64, "max_length": 256, "evaluate_every": 100},
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(values))
    return make_ready(load_config(folder / "run.yaml"))


@pytest.fixture
def tokenizer(kimi: Path) -> Any:
    return AutoTokenizer.from_pretrained(kimi)


@pytest.fixture
def chat(kimi: Path, tokenizer: Any) -> Callable[..., ChatFormat]:
    return lambda **kwargs: ChatFormat(tokenizer, configured_stop_ids(kimi), kwargs)


def play(chat: ChatFormat, prompt: Prompt, answers: list[list[int]]) -> list[Conversation]:
    """The conversation that results when the target answers with these ids."""
    thread = Thread(prompt, chat.render(prompt.opening(), prompt.tools))
    for turn, answer in enumerate(answers):
        assert thread.ask(turn, chat, SynthesizeSection(), 4096)
        thread.take(answer, -1.0, "stop", chat)
    return thread.close(temperature=0.0, mark="m")


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def user(text: str) -> str:
    return f"<|im_user|>user<|im_middle|>{text}<|im_end|>"


ASKED = "<|im_assistant|>assistant<|im_middle|>"


def test_the_miniature_has_the_published_nesting_names_and_ids(kimi: Path, tokenizer: Any) -> None:
    target = read_target(kimi)
    assert target.architecture == "KimiK25ForConditionalGeneration" and target.model_type == "kimi_k25"
    assert (target.num_layers, target.vocab_size, target.context_length) == (61, 163_840, 262_144)
    assert target.require("embedding").name == "language_model.model.embed_tokens.weight"
    assert target.require("final_norm").name == "language_model.model.norm.weight"
    assert target.require("head").name == "language_model.lm_head.weight"
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL | MARKUP} == SPECIAL | MARKUP
    names = load_file(kimi / "model.safetensors").keys()
    assert "language_model.model.layers.0.mlp.gate_proj.weight" in names
    assert "language_model.model.layers.60.mlp.experts.3.down_proj.weight" in names
    model, report = AutoModelForImageTextToText.from_pretrained(kimi, output_loading_info=True)
    assert type(model).__name__ == "Kimi_K25ForConditionalGeneration"
    assert not any(report.values()), report


def test_the_harvest_taps_2_30_and_58_of_its_language_model(run: RunConfig, kimi: Path) -> None:
    reader = HarvestReader(run.store("train"))
    assert reader.manifest.taps == (2, 30, 58)
    model = AutoModelForImageTextToText.from_pretrained(kimi)
    for item in reader:
        with torch.no_grad():
            output = model(input_ids=item.input_ids[None].long(), output_hidden_states=True)
        assert len(output.hidden_states) == 62
        wanted = [output.hidden_states[tap][0] for tap in (2, 30, 58)] + [output.hidden_states[61][0]]
        for found, states in zip([*item.taps.unbind(1), item.final], wanted, strict=True):
            torch.testing.assert_close(found, states.bfloat16(), rtol=0.02, atol=0.02 * float(states.abs().max()))
        # neighbours are told apart: the tap's own layer is far nearer than the ones beside it
        for place, tap in enumerate((2, 30, 58)):
            errors = [
                float((item.taps[:, place].float() - output.hidden_states[k][0]).norm())
                for k in (tap - 1, tap, tap + 1)
            ]
            assert 5 * errors[1] < min(errors[0], errors[2])
        logits = model.lm_head(item.final.float())
        assert (logits.argmax(-1) == output.logits[0].argmax(-1)).float().mean() > 0.9


def test_every_synthesised_turn_stands_behind_its_prompt_and_is_all_that_is_generated(
    run: RunConfig, tokenizer: Any
) -> None:
    found = {one.id: one for one in read_conversations(run.conversations("train"))}
    assert set(found) == {"twice", "twice#2", "once", "other", "tool"}  # reasoning is blanked: a sequence of its own
    for one in found.values():
        ((start, end),) = one.spans
        assert tokenizer.decode(one.input_ids[:start]).endswith(ASKED + "<think>")
        assert one.finish == (("stop",) if one.input_ids[end - 1] == END else ("length",))
        assert one.generated_mask().nonzero().flatten().tolist() == list(range(start, end))


def test_a_later_turn_sees_answers_without_their_reasoning(tokenizer: Any, chat: Callable[..., ChatFormat]) -> None:
    answers = [[*ids(tokenizer, "hm</think>yes"), END], [*ids(tokenizer, "so</think>no"), END]]
    first, second = play(chat(), Prompt(id="p", turns=("hi", "more")), answers)
    opening = user("hi") + ASKED + "<think>"
    assert list(first.input_ids) == ids(tokenizer, opening) + answers[0]
    served = user("hi") + ASKED + "<think></think>yes<|im_end|>" + user("more") + ASKED + "<think>"
    assert list(second.input_ids) == ids(tokenizer, served) + answers[1]
    assert first.spans == ((len(ids(tokenizer, opening)), len(first.input_ids)),)
    assert second.spans == ((len(ids(tokenizer, served)), len(second.input_ids)),)
    assert (second.messages[1].content, second.messages[1].reasoning_content) == ("yes", "hm")
    assert first.input_ids[-1] == END != SPECIAL["[EOS]"]


def test_a_turn_that_was_cut_while_thinking_leaves_no_answer(tokenizer: Any, chat: Callable[..., ChatFormat]) -> None:
    answers = [ids(tokenizer, "hm hm"), [*ids(tokenizer, "so</think>no"), END]]
    _, second = play(chat(), Prompt(id="p", turns=("hi", "more")), answers)
    served = user("hi") + ASKED + "<think></think><|im_end|>" + user("more") + ASKED + "<think>"
    assert list(second.input_ids) == ids(tokenizer, served) + answers[1]
    assert (second.messages[1].content, second.messages[1].reasoning_content) == ("", "hm hm")


def test_without_thinking_the_turns_are_one_sequence(tokenizer: Any, chat: Callable[..., ChatFormat]) -> None:
    answers = [[*ids(tokenizer, "yes"), END], [*ids(tokenizer, "no"), END]]
    (only,) = play(chat(thinking=False), Prompt(id="p", turns=("hi", "more")), answers)
    text = user("hi") + ASKED + "<think></think>yes<|im_end|>" + user("more") + ASKED + "<think></think>no<|im_end|>"
    assert list(only.input_ids) == ids(tokenizer, text)
    assert [list(only.input_ids[start:end]) for start, end in only.spans] == answers


def test_a_tool_call_keeps_its_reasoning_until_it_is_answered(tokenizer: Any, chat: Callable[..., ChatFormat]) -> None:
    row = {**ROWS[3], "messages": [*ROWS[3]["messages"], {"role": "user", "content": "sure?"}]}
    answers = [[*ids(tokenizer, "so</think>three"), END], [*ids(tokenizer, "well</think>yes"), END]]
    first, second = play(chat(), read_row(row, "t"), answers)
    call = '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}'
    call += "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    result = "<|im_system|>tool<|im_middle|>## Return of functions.add:0\n3<|im_end|>"
    declared = "<|im_system|>tool_declare<|im_middle|>" + json.dumps(TOOLS) + "<|im_end|>"
    asked = declared + user("sum?") + ASKED
    waiting = f"{asked}<think>add them</think>{call}{result}{ASKED}<think>"
    answered = f"{asked}<think></think>{call}{result}{ASKED}<think></think>three<|im_end|>{user('sure?')}{ASKED}<think>"
    assert list(first.input_ids) == ids(tokenizer, waiting) + answers[0]
    assert list(second.input_ids) == ids(tokenizer, answered) + answers[1]
    for one, prompt in ((first, waiting), (second, answered)):
        assert one.spans == ((len(ids(tokenizer, prompt)), len(one.input_ids)),)


def test_a_drafter_is_trained_converted_and_verified(run: RunConfig, kimi: Path, tmp_path: Path) -> None:
    vocab = load_file(run.vocab_file)
    assert bool(vocab["t2d"][list((SPECIAL | MARKUP).values())].all())
    train(run)
    rows = [json.loads(line) for line in (run.training / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses and all(0 < loss < 100 for loss in losses)
    out = convert(run.training, kimi, tmp_path / "drafter")
    config = json.loads((out / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 29, 57]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert (config["max_position_embeddings"], config["rope_theta"]) == (262_144, 50_000.0)
    assert (config["vocab_size"], config["draft_vocab_size"]) == (163_840, 600)
    checks = verify(out, kimi, store=run.store("train"), deep=True)
    assert [check for check in checks if check.status == "fail"] == []


def test_the_plan_follows_from_the_published_dimensions_worked_out_by_hand() -> None:
    config = load_config("kimi-k2.5")
    plan = make_plan(config, conversations=100_000, turns=100_000, tokens=200_000_000)
    # latent attention: down and up for queries, down and up for keys and values, out
    attention = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168
    expert = 3 * 7168 * 2048
    always = 61 * attention + 3 * 7168 * 18432 + 60 * (expert + 7168 * 384)
    assert plan.cost.parameters == always + 60 * 384 * expert + 2 * 163_840 * 7168
    assert 1.02e12 < plan.cost.parameters < 1.03e12  # published: 1 T, of which 32 B are active
    assert plan.cost.products == always + 60 * 8 * expert
    assert 31e9 < plan.cost.products + 163_840 * 7168 < 32e9
    # experts of 4 bits, a scale of two bytes for 32 of them; the rest in bf16: the files of 595 GB
    assert plan.cost.weight_bytes == 60 * 384 * expert * 9 // 16 + 2 * (always + 2 * 163_840 * 7168)
    assert 593e9 < plan.cost.weight_bytes < 596e9
    # disk: three taps and the final state of 7168 bf16, id, mask and argmax
    assert plan.store_bytes == 200_000_000 * (4 * 7168 * 2 + 9)
    layer = 3 * 8192 * 14336 + 7168 * 8192 + 3 * 18432 * 7168
    weights = 7168 * 21504 + layer + 4 * 7168 + 32_000 * 7168
    assert plan.training_bytes == 16 * weights + 4 * 7168 * (163_840 + 32_000)
    assert plan.optimiser_steps == 2 * 3052  # 200,000,000 / 65,536 = 3051.8
    # 400 TFLOP/s: 2 x 30.5 B a token through the target; 6 a weight and step, 7 steps, and fc 4, two epochs
    assert plan.harvest_hours == pytest.approx(2 * plan.cost.products * 2e8 / 4e14 / 3600)
    assert plan.harvest_hours == pytest.approx(8.5, abs=0.1)
    matrices = layer + 32_000 * 7168
    assert plan.training_hours == pytest.approx(2 * 2e8 * (42 * matrices + 4 * 7168 * 21504) / 4e14 / 3600)
    shown = " | ".join(text for _, text in describe(plan, config))
    assert "1,026.4 B parameters" in shown and "594.2 GB of weights" in shown and "11.5 TB of hidden states" in shown


def test_a_dense_target_is_counted_too() -> None:
    plan = make_plan(load_config("llama-3.1-8b"), conversations=1, turns=1, tokens=1)
    layer = 4096 * 128 * (32 + 8) * 2 + 3 * 4096 * 14336
    assert plan.cost.parameters == 32 * layer + 2 * 128_256 * 4096
    assert target_cost(plan.target).weight_bytes == 2 * plan.cost.parameters
