"""Promises of the chat format, checked against ids worked out from the template's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftsmith.configs.errors import DraftsmithError
from draftsmith.data.chat import ChatFormat

THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)
"""Blanks earlier reasoning and opens the next in the generation prompt, as reasoning models' templates do."""


@pytest.fixture
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_prompt_ids_are_the_rendered_template_with_its_generation_prompt(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer)
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert chat.prompt_ids(messages) == ids(tokenizer, expected)


def test_end_of_turn_is_what_the_template_writes_after_an_answer(tokenizer: Any) -> None:
    assert ChatFormat(tokenizer).turn_end == (2,)
    assert ChatFormat(tokenizer, configured=[0]).stop_ids == (0, 2)
    tokenizer.eos_token = "<|endoftext|>"
    assert ChatFormat(tokenizer).stop_ids == (0, 2)


def test_a_later_turn_continues_the_ids_that_were_seen(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer)
    history = [{"role": "user", "content": "hi"}]
    # "th" and "e" apart: ids that the tokenizer would never choose itself for "the"
    odd = [*ids(tokenizer, "th"), *ids(tokenizer, "e"), 2]
    seen = chat.prompt_ids(history) + odd
    assert odd[:-1] != ids(tokenizer, "the")
    messages = [*history, {"role": "assistant", "content": chat.answer_text(odd)}, {"role": "user", "content": "more"}]
    tail = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert chat.next_prompt_ids(seen, messages) == seen + ids(tokenizer, tail)


def test_a_cut_turn_is_closed_before_the_next_one(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer)
    history = [{"role": "user", "content": "hi"}]
    seen = [*chat.prompt_ids(history), *ids(tokenizer, "th"), *ids(tokenizer, "e")]
    messages = [*history, {"role": "assistant", "content": "the"}, {"role": "user", "content": "more"}]
    tail = "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert chat.next_prompt_ids(seen, messages) == seen + ids(tokenizer, tail)


def test_reasoning_that_the_template_blanks_stays_in_the_context(tokenizer: Any) -> None:
    tokenizer.chat_template = THINKING
    chat = ChatFormat(tokenizer)
    history = [{"role": "user", "content": "hi"}]
    answer = [*ids(tokenizer, "hm</think>yes"), 2]
    seen = chat.prompt_ids(history) + answer
    messages = [*history, {"role": "assistant", "content": "hm</think>yes"}, {"role": "user", "content": "more"}]
    tail = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n<think>"
    assert chat.next_prompt_ids(seen, messages) == seen + ids(tokenizer, tail)


def test_answer_text_leaves_out_the_end_of_turn(tokenizer: Any) -> None:
    assert ChatFormat(tokenizer).answer_text([*ids(tokenizer, "yes, sir"), 2]) == "yes, sir"


def test_a_template_without_generation_prompt_stops_by_name(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    with pytest.raises(DraftsmithError, match="add_generation_prompt"):
        ChatFormat(tokenizer)


def test_a_doubled_bos_stops_by_name(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    with pytest.raises(DraftsmithError, match="two BOS"):
        ChatFormat(tokenizer)


def test_a_tokenizer_that_adds_bos_and_eos_by_itself_adds_neither_to_a_rendered_text(tokenizer: Any) -> None:
    """Its post-processor frames every text as `<|endoftext|> text <|im_end|>`; a rendered chat has its own BOS and ends."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", 0), ("<|im_end|>", 2)]
    )
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    framed = tokenizer("hi")["input_ids"]
    assert (framed[0], framed[-1]) == (0, 2), "the case needs a tokenizer that adds both"
    chat = ChatFormat(tokenizer)
    prompt = chat.render([{"role": "user", "content": "hi"}])
    assert prompt.ids.count(0) == 1 and prompt.ids[0] == 0
    assert prompt.ids.count(2) == prompt.text.count("<|im_end|>") == 1 and prompt.ids[-1] != 2
    assert chat.tokens_of(prompt, "yes", ended=False) == ids(tokenizer, "yes")
    assert chat.tokens_of(prompt, "yes", ended=True) == [*ids(tokenizer, "yes"), 2]
    answered = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    later = chat.next_prompt_ids(
        [*prompt.ids, *chat.tokens_of(prompt, "yes", ended=True)], [*answered, {"role": "user", "content": "more"}]
    )
    assert later.count(0) == 1 and later.count(2) == 3


def test_a_missing_template_stops_by_name(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(DraftsmithError, match="no chat template"):
        ChatFormat(tokenizer)


def test_a_template_that_nothing_ends_stops_by_name(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    tokenizer.eos_token = None
    with pytest.raises(DraftsmithError, match="no token ends"):
        ChatFormat(tokenizer)


def test_what_the_template_drops_is_told_once_a_kind(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The tests' template writes roles and contents alone."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "q"},
        call,
        {"role": "tool", "content": 'say "r"'},
    ]
    chat = ChatFormat(tokenizer)
    for _ in range(2):
        chat.render(messages, [{"type": "function", "function": {"name": "look", "parameters": {}}}])
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("leaves out the tools of prompts, for example 'look'") == 1
    assert said.count("leaves out the tool calls of prompts") == 1
    assert "system text" not in said and "tool results" not in said
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "message['content'] | tojson")
    ChatFormat(tokenizer).render(messages)
    assert "tool results" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "kwargs", "words"),
    [
        ("{{ raise_exception('system first') }}", {}, "fails on a plain conversation: system first"),
        ("{{ 1 // 0 }}", {}, "fails on a plain conversation: .*zero"),
        ("{% for %}", {}, "fails on a plain conversation"),
        (None, {"tools": []}, "fills these variables"),
        (None, {"tokenize": True, "messages": 1}, "fills these variables"),
    ],
)
def test_a_template_that_fails_stops_by_name(tokenizer: Any, template: str | None, kwargs: Any, words: str) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    with pytest.raises(DraftsmithError, match=words):
        ChatFormat(tokenizer, kwargs=kwargs)
