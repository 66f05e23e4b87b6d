"""Chat template -> token ids, as the engine will see them.

The prompt of a turn is the template rendered with its own generation prompt, tokenised without further special tokens:
an empty think block or any other text that the template puts before an answer is prompt, not answer. What the model
then produced is kept as it was produced. A later turn continues those ids where the template leaves earlier text as it
was, because tokenising it again may split it otherwise; where the template rewrites it (strips reasoning), the turn is a
new sequence, rendered as a server renders it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from draftsmith.configs.console import warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import sha256_json
from draftsmith.data.view import show_rendering

MARKERS = ("<answer/>", "⟦answer⟧", "@@answer@@")
"""Stand-ins for an assistant's text; the first that no message contains is used."""

THINK, THINK_END = "<think>", "</think>"

END_NAMES = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|return|>")
"""End-of-turn tokens of common templates."""


RESERVED = frozenset(
    {"messages", "conversation", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt"}
)
"""What `apply_chat_template` is given here."""


@dataclass(frozen=True)
class Rendered:
    """A prompt as text and as token ids; with an answer behind it once there is one."""

    text: str
    ids: list[int]


class TemplateRefusalError(Exception):
    """The chat template raises an error for these messages; its text is the template's own."""


class ChatFormat:
    """A tokenizer's chat template and the tokens that end an assistant's turn.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        configured: eos ids of the generation config.
        kwargs: further variables of the template, such as enable_thinking.

    Raises:
        DraftsmithError: no template, no generation prompt, a turn that the template leaves out, a doubled BOS, or no
            token ends a turn.
    """

    def __init__(self, tokenizer: Any, configured: Sequence[int] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        if not getattr(tokenizer, "chat_template", None):
            raise DraftsmithError(
                "the target's tokenizer has no chat template",
                where=getattr(tokenizer, "name_or_path", None),
                mend="put chat_template.jinja beside tokenizer.json",
            )
        reserved = sorted(self._kwargs.keys() & RESERVED)
        if reserved:
            raise DraftsmithError(
                "draftsmith fills these variables of the chat template itself", where="synthesize.template_kwargs",
                found=", ".join(reserved), mend="leave them out; tools and messages come from the prompts",
            )  # fmt: skip
        self._told: set[str] = set()
        self._reads_reasoning = "reasoning_content" in str(tokenizer.chat_template)
        try:
            self._examine()
        except TemplateRefusalError as error:
            raise DraftsmithError(
                f"the chat template fails on a plain conversation: {error}",
                where=getattr(tokenizer, "name_or_path", None), expected="a template that renders user and assistant turns",
                mend="mend chat_template.jinja, or give it what it needs: synthesize.template_kwargs",
            ) from None  # fmt: skip
        self.turn_end: tuple[int, ...] = self._find_turn_end()
        """Ids that the template writes right after an assistant's text, up to and with the end-of-turn token."""
        stops = {*configured, *self.turn_end[-1:]}
        if tokenizer.eos_token_id is not None:
            stops.add(tokenizer.eos_token_id)
        if not stops:
            raise DraftsmithError(
                "no token ends an assistant's turn",
                where=getattr(tokenizer, "name_or_path", None),
                expected="eos_token_id in generation_config.json, or a template that closes the turn with a special token",
            )
        self.stop_ids: tuple[int, ...] = tuple(sorted(stops))
        """Generation stops at any of these: the template's end of turn and every configured eos."""

    @property
    def template_hash(self) -> str:
        """SHA-256 of the template's text, wherever the tokenizer keeps it."""
        return sha256_json(self._tokenizer.chat_template)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Rendered:
        """`messages` with the generation prompt, as an engine's chat endpoint builds it.

        Raises:
            DraftsmithError: the ids begin with two BOS tokens.
            TemplateRefusalError: the template raises an error for these messages.
        """
        text = self._render(messages, tools, prompt=True)
        self._tell_what_is_left_out(messages, tools or (), text)
        ids = self._tokenise(text)
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            self._refuse(
                "the rendered prompt begins with two BOS tokens, which would shift every position",
                text,
                found=f"{self._tokenizer.convert_ids_to_tokens(ids[:4])}",
                mend="remove bos_token from the chat template, or set add_bos_token to false in tokenizer_config.json",
            )
        return Rendered(text, ids)

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The token ids of `render`."""
        return self.render(messages, tools).ids

    def following(
        self,
        seen: Rendered,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        rewrite: bool = True,
    ) -> tuple[Rendered, bool]:
        """The prompt of the turn after the last answer, and whether it continues `seen`.

        Args:
            seen: the sequence so far: its ids with the last turn's end token if the model wrote it, its text without.
            messages: the history with the last answer's text, and the new turn's messages at the end.
            rewrite: whether a history that the template renders otherwise than it was written starts a new sequence.

        Returns:
            The template's own rendering where its ids extend `seen`. Otherwise `seen`, the end of the turn if the model
            did not write it, and what the template writes after the last answer; but with `rewrite`, and if earlier
            text is not what it was, the template's rendering as a sequence of its own, and False.
        """
        rendered = self.render(messages, tools)
        if len(rendered.ids) > len(seen.ids) and rendered.ids[: len(seen.ids)] == list(seen.ids):
            return rendered, True
        after = self._after_last_answer(messages, tools)
        if rewrite and rendered.text != seen.text + after:
            return rendered, False
        suffix = self._tokenise(after)
        if seen.ids[-1] in self.stop_ids and tuple(suffix[: len(self.turn_end)]) == self.turn_end:
            suffix = suffix[len(self.turn_end) :]
        return Rendered(seen.text + after, [*seen.ids, *suffix]), True

    def next_prompt_ids(self, seen: Sequence[int], messages: Sequence[dict[str, Any]]) -> list[int]:
        """The ids of `following` without `rewrite`: what the model saw and wrote stays as it is."""
        return self.following(Rendered("", list(seen)), messages, rewrite=False)[0].ids

    def written(self, generated: Sequence[int]) -> str:
        """The text of generated ids, special tokens included but for the one that ended the turn."""
        ids = list(generated)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def tokens_of(self, prompt: Rendered, text: str, *, ended: bool) -> list[int]:
        """Ids of an answer of which only the text is known; the end of the turn is added where the model wrote it.

        The whole text is tokenised at once and the answer begins at the first token whose characters do. Where a token
        would reach from the prompt into the answer, which no generated token can, the answer is tokenised by itself.
        """
        whole = self._tokenizer(prompt.text + text, add_special_tokens=False, return_offsets_mapping=True)
        begins = [start for start, _ in whole["offset_mapping"]]
        border = len(prompt.text)
        first = next((index for index, start in enumerate(begins) if start >= border), len(begins))
        clean = first == 0 or whole["offset_mapping"][first - 1][1] <= border
        ids = list(whole["input_ids"][first:]) if clean else self._tokenise(text)
        return [*ids, *self.end_ids] if ended else ids

    def without_end(self, text: str) -> str:
        """An answer's text without the end-of-turn token that some servers leave in it."""
        for token in self._tokenizer.convert_ids_to_tokens(list(self.stop_ids)):
            text = text.removesuffix(token)
        return text

    @property
    def end_ids(self) -> tuple[int, ...]:
        """What ends an answer: the template's end of turn, or the tokenizer's eos where the template writes none."""
        return self.turn_end or self.stop_ids[:1]

    def answer_text(self, generated: Sequence[int]) -> str:
        """The text of generated ids, end-of-turn and other special tokens left out."""
        text = self._tokenizer.decode(list(generated), skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)

    def answer(self, prompt: Rendered, generated: Sequence[int]) -> dict[str, Any]:
        """The answer to `prompt` as a message, as servers hand it back for the next turn.

        A template that reads `reasoning_content` expects an engine to have parted reasoning from answer: what stands
        before `</think>`, or everything where the prompt opened `<think>` and the turn was cut inside, goes there.
        Other templates get the text whole and part it themselves.
        """
        text = self.answer_text(generated)
        message = {"role": "assistant", "content": text}
        if not self._reads_reasoning:
            return message
        thought, closed, said = text.partition(THINK_END)
        opened = prompt.text.rstrip().endswith(THINK)
        if closed or opened:
            message |= {
                "reasoning_content": thought.removeprefix(THINK).strip("\n"),
                "content": said.lstrip("\n"),
            }
        return message

    def _tell_what_is_left_out(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], text: str
    ) -> None:
        """Warn, once a kind, of what a template drops without an error. A user's turn that it drops stops at the start."""
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        given = {
            "system text": [str(m["content"]).strip() for m in messages if m["role"] == "system"],
            "tools": [str((tool.get("function") or tool).get("name", "")) for tool in tools],
            "tool calls": [str(call["function"]["name"]) for call in calls],
            "tool results": [str(m["content"]).strip() for m in messages if m["role"] == "tool"],
        }
        for kind, parts in given.items():
            lost = [
                part for part in parts if part not in text and json.dumps(part, ensure_ascii=False)[1:-1] not in text
            ]
            if lost and kind not in self._told:
                self._told.add(kind)
                warn(
                    f"the chat template leaves out the {kind} of prompts, for example {lost[0][:60]!r}: "
                    "the target does not see them, here or served"
                )

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, *, prompt: bool
    ) -> str:
        from jinja2 import TemplateError

        faults = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._kwargs,
            )
        except faults as error:  # a template is a program of strangers
            raise TemplateRefusalError(str(error) or type(error).__name__) from None
        return str(text)

    def _tokenise(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _after_last_answer(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Everything that the template writes after the text of the last assistant message that is no tool call."""
        marker = next((mark for mark in MARKERS if not any(mark in message["content"] for message in messages)), None)
        if marker is None:
            raise DraftsmithError("a message contains every one of draftsmith's own markers", expected=str(MARKERS))
        last = max(
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and not message.get("tool_calls")
        )
        marked = [
            {**message, "content": marker} if index == last else message for index, message in enumerate(messages)
        ]
        rendered = self._render(marked, tools, prompt=last < len(messages) - 1)
        _, found, after = rendered.rpartition(marker)
        if not found:
            self._refuse("the chat template leaves out the text of an assistant's turn", rendered, missing=marker)
        return after

    def _examine(self) -> None:
        """Stop at a template that does not say where an answer begins, leaves turns out, or doubles the BOS token."""
        greeting = [{"role": "user", "content": "Hello"}]
        with_prompt, without = self._render(greeting, prompt=True), self._render(greeting, prompt=False)
        if with_prompt == without:
            self._refuse(
                "the chat template ignores add_generation_prompt, so the place where an answer begins is unknown",
                with_prompt,
                expected="{% if add_generation_prompt %}...{% endif %} at the template's end",
            )
        self._check_turns_appear()
        self.prompt_ids(greeting)

    def _check_turns_appear(self) -> None:
        """Every user turn of a longer conversation must be in the prompt of its last one."""
        words = ("first question", "first answer", "second question")
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
        text = self._render(messages, prompt=True)
        for role, word in zip(roles, words, strict=True):
            if word not in text:
                self._refuse(f"the chat template leaves out the text of a turn of the {role}", text, missing=word)

    def _refuse(self, problem: str, rendered: str, *, missing: str | None = None, **parts: Any) -> NoReturn:
        """Show the example that proves the fault, then stop."""
        show_rendering(rendered, self._tokenizer.all_special_tokens, missing)
        parts.setdefault("found", repr(rendered[-200:]))
        raise DraftsmithError(problem, where=getattr(self._tokenizer, "name_or_path", None), **parts)

    def _find_turn_end(self) -> tuple[int, ...]:
        """Leading ids of what follows an answer, up to the first special or known end token; empty if there is none."""
        history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
        tail = self._tokenise(self._after_last_answer(history))
        ends = set(self._tokenizer.all_special_ids) | set(self._tokenizer.get_added_vocab().values())
        ends |= {self._tokenizer.convert_tokens_to_ids(name) for name in END_NAMES}
        for index, token in enumerate(tail):
            if token in ends:
                return tuple(tail[: index + 1])
        return ()
