"""Promises of multi-turn sequences: each turn stands behind the history that it was generated from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig, SynthesizeSection
from draftsmith.data.chat import ChatFormat, Rendered
from draftsmith.data.conversations import ConversationLog, read_conversations
from draftsmith.data.prompt_rows import Prompt, read_row
from draftsmith.data.synthesize import synthesize
from draftsmith.data.threads import Thread

# As Qwen3's: earlier reasoning is stripped; without thinking the generation prompt holds an empty think block.
REASONING = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + (call.function.arguments | tojson) }}{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
SECTION = SynthesizeSection()


@pytest.fixture
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def play(chat: ChatFormat, prompt: Prompt, answers: list[list[int]], section: SynthesizeSection = SECTION) -> list[Any]:
    """The conversation that results when the target answers with these ids."""
    thread = Thread(prompt, chat.render(prompt.opening(), prompt.tools))
    for turn, answer in enumerate(answers):
        assert thread.ask(turn, chat, section, 4096)
        thread.take(answer, -1.0, "stop" if answer[-1] == 2 else "length", chat)
    return thread.close(temperature=0.0, mark="m")


def test_where_reasoning_is_stripped_a_later_turn_is_its_own_sequence_as_served(tokenizer: Any) -> None:
    tokenizer.chat_template = REASONING
    chat = ChatFormat(tokenizer)
    think, plain = [*ids(tokenizer, "<think>hm</think>yes"), 2], [*ids(tokenizer, "no"), 2]
    first, second = play(chat, Prompt(id="p", turns=("hi", "more")), [think, plain])
    opening = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(first.input_ids) == ids(tokenizer, opening) + think
    assert first.spans == ((len(ids(tokenizer, opening)), len(first.input_ids)),)
    served = opening + "yes<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert list(second.input_ids) == ids(tokenizer, served) + plain
    # the stripped "yes" of the second sequence is history: the target did not write it there
    assert second.spans == ((len(ids(tokenizer, served)), len(second.input_ids)),)
    assert (first.id, second.id, first.prompt_id, second.prompt_id) == ("p", "p#2", "p", "p")
    assert [message.content for message in first.messages] == ["hi", "<think>hm</think>yes"]
    assert second.answer_places == (3,)


def test_history_seen_keeps_one_sequence_with_the_reasoning_in_it(tokenizer: Any) -> None:
    tokenizer.chat_template = REASONING
    chat = ChatFormat(tokenizer)
    think, plain = [*ids(tokenizer, "<think>hm</think>yes"), 2], [*ids(tokenizer, "no"), 2]
    section = SynthesizeSection(history="seen")
    (only,) = play(chat, Prompt(id="p", turns=("hi", "more")), [think, plain], section)
    tail = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    opening = ids(tokenizer, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert list(only.input_ids) == opening + think + ids(tokenizer, tail) + plain
    assert len(only.spans) == 2


def test_reasoning_in_the_third_turn_only_leaves_the_earlier_turns_in_one_sequence(tokenizer: Any) -> None:
    tokenizer.chat_template = REASONING
    chat = ChatFormat(tokenizer)
    a, b, c = ([*ids(tokenizer, text), 2] for text in ("one", "two", "<think>x</think>three"))
    (only,) = play(chat, Prompt(id="p", turns=("1", "2", "3")), [a, b, c])
    assert [list(only.input_ids[start:end]) for start, end in only.spans] == [a, b, c]


def test_an_empty_think_block_of_the_generation_prompt_is_not_supervised(tokenizer: Any) -> None:
    tokenizer.chat_template = REASONING
    answer = [*ids(tokenizer, "yes"), 2]
    texts = {}
    for thinking in (True, False):
        chat = ChatFormat(tokenizer, kwargs={"enable_thinking": thinking})
        (one,) = play(chat, Prompt(id="p", turns=("hi",)), [answer])
        (span,) = one.spans
        assert list(one.input_ids[span[0] : span[1]]) == answer
        texts[thinking] = tokenizer.decode(one.input_ids[: span[0]])
    assert texts[False] == texts[True] + "<think>\n\n</think>\n\n"


def test_a_tokenisation_that_differs_is_no_rewriting(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer)
    odd = [*ids(tokenizer, "th"), *ids(tokenizer, "e"), 2]
    (only,) = play(chat, Prompt(id="p", turns=("hi", "more")), [odd, [*ids(tokenizer, "ok"), 2]])
    assert list(only.input_ids[only.spans[0][0] : only.spans[0][1]]) == odd


def test_a_tool_call_with_its_result_stays_as_prompt_and_is_answered_after(tokenizer: Any) -> None:
    tokenizer.chat_template = REASONING
    chat = ChatFormat(tokenizer)
    row = {
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "messages": [
            {"role": "user", "content": "sum?"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "given: dropped"},
            {"role": "user", "content": "sure?"},
        ],
    }  # fmt: skip
    prompt = read_row(row, "t")
    answers = [[*ids(tokenizer, "three"), 2], [*ids(tokenizer, "yes"), 2]]
    (one,) = play(chat, prompt, answers)
    assert [message.role for message in one.messages] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert one.answer_places == (3, 5)
    assert [list(one.input_ids[start:end]) for start, end in one.spans] == answers
    before = tokenizer.decode(one.input_ids[: one.spans[0][0]])
    assert '<call>{"a": 1}<|im_end|>\n<|im_start|>tool\n3<|im_end|>' in before and '"name": "add"' in before
    assert "dropped" not in tokenizer.decode(one.input_ids)


@pytest.mark.parametrize("answer", ["yes, sir", "\nyes", "the quick"])
def test_ids_of_a_text_begin_exactly_where_the_answer_does(tokenizer: Any, answer: str) -> None:
    chat = ChatFormat(tokenizer)
    prompt = chat.render([{"role": "user", "content": "hi"}])
    assert chat.tokens_of(prompt, answer, ended=True) == [*ids(tokenizer, answer), 2]
    assert chat.tokens_of(prompt, answer, ended=False) == ids(tokenizer, answer)


def test_a_token_that_would_reach_from_the_prompt_into_the_answer_is_never_used(tokenizer: Any) -> None:
    merged = ids(tokenizer, "the")
    assert len(merged) < len(ids(tokenizer, "t")) + len(ids(tokenizer, "he")), "the case needs a merge"
    chat = ChatFormat(tokenizer)
    prompt = Rendered("t", ids(tokenizer, "t"))
    assert chat.tokens_of(prompt, "he", ended=False) == ids(tokenizer, "he")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[-1].content }}{% if add_generation_prompt %}A:{% endif %}", "turn of the user"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
            "turn of the assistant",
        ),
    ],
    ids=["only the last message", "no assistant"],
)
def test_a_template_in_which_turns_vanish_stops_with_an_example(
    tokenizer: Any, capsys: pytest.CaptureFixture[str], template: str, words: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(DraftsmithError, match=f"leaves out the text of a {words}"):
        ChatFormat(tokenizer)
    assert "missing: first" in capsys.readouterr().err


def test_the_local_target_answers_each_turn_behind_the_history_as_served(
    make_config: Callable[..., RunConfig], tiny: Path, tmp_path: Path
) -> None:
    """A template that puts a mark before the last answer only: every second turn is a sequence of its own."""
    target = tmp_path / "marked"
    target.mkdir()
    for file in tiny.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    (target / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\nnow: ' }}{% endif %}"
    )
    config = make_config(target__path=str(target))
    path = synthesize(config, "train")
    before = path.read_bytes()
    by_prompt: dict[str, list[Any]] = {}
    for one in read_conversations(path):
        by_prompt.setdefault(one.prompt_id, []).append(one)
    assert {name: len(parts) for name, parts in by_prompt.items() if len(parts) > 1} == {"p1": 2, "p3": 3}
    tokenizer = AutoTokenizer.from_pretrained(target)
    for parts in by_prompt.values():
        for number, part in enumerate(parts):
            (span,) = part.spans
            history = [message.model_dump(exclude_none=True) for message in part.messages[:-1]]
            text = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
            assert list(part.input_ids[: span[0]]) == ids(tokenizer, text), (part.id, number)
    # a kill between two parts of one conversation takes the whole conversation back
    lines = before.splitlines(keepends=True)
    place = next(index for index, line in enumerate(lines) if b'"id": "p3#2"' in line)
    path.write_bytes(b"".join(lines[:place]))
    with ConversationLog(path) as log:
        assert list(log.recorded) == ["p0", "p1", "p2"]


def test_a_changed_template_or_switch_is_refused_not_mixed(make_config: Callable[..., RunConfig], tiny: Path) -> None:
    synthesize(make_config(), "train")
    with pytest.raises(DraftsmithError, match="another template_kwargs"):
        synthesize(make_config(synthesize__template_kwargs={"enable_thinking": False}), "train")
    file = tiny / "chat_template.jinja"
    text = file.read_text()
    try:
        file.write_text(text.replace("assistant\n", "assistant:\n"))
        with pytest.raises(DraftsmithError, match=r"another (target|template)"):
            synthesize(make_config(), "train")
    finally:
        file.write_text(text)
