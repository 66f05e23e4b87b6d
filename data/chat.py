"""Chat template -> token ids, as the engine will see them.

The prompt of a turn is the template rendered with its own generation prompt, tokenised without further special tokens.
What the model then produced is kept as it was produced: a later turn continues the ids really seen, because rendering
a finished conversation again may blank reasoning or split the text into other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.configs.errors import DraftsmithError

MARKERS = ("<answer/>", "⟦answer⟧", "@@answer@@")
"""Stand-ins for an assistant's text; the first that no message contains is used."""

END_NAMES = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|return|>")
"""End-of-turn tokens of common templates."""


class ChatFormat:
    """A tokenizer's chat template and the tokens that end an assistant's turn.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        configured: eos ids of the generation config.

    Raises:
        DraftsmithError: no template, no generation prompt, a doubled BOS, or no token ends a turn.
    """

    def __init__(self, tokenizer: Any, configured: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise DraftsmithError(
                "the target's tokenizer has no chat template",
                where=getattr(tokenizer, "name_or_path", None),
                mend="put chat_template.jinja beside tokenizer.json",
            )
        greeting = [{"role": "user", "content": "Hello"}]
        if self._render(greeting, prompt=True) == self._render(greeting, prompt=False):
            raise DraftsmithError(
                "the chat template ignores add_generation_prompt, so the place where an answer begins is unknown",
                where=getattr(tokenizer, "name_or_path", None),
                expected="{% if add_generation_prompt %}...{% endif %} at the template's end",
            )
        self.prompt_ids(greeting)
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

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of `messages` with the generation prompt, as an engine's chat endpoint builds them.

        Raises:
            DraftsmithError: the ids begin with two BOS tokens.
        """
        ids = self._tokenise(self._render(messages, prompt=True))
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise DraftsmithError(
                "the rendered prompt begins with two BOS tokens, which would shift every position",
                where=getattr(self._tokenizer, "name_or_path", None),
                found=f"{self._tokenizer.convert_ids_to_tokens(ids[:4])}",
                mend="remove bos_token from the chat template, or set add_bos_token to false in tokenizer_config.json",
            )
        return ids

    def next_prompt_ids(self, seen: Sequence[int], messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of the following turn, continuing what the model really saw and wrote.

        Args:
            seen: prompt and generated ids so far, the last turn's end token included if the model wrote it.
            messages: the history with the last answer's text, and the new user message at the end.

        Returns:
            The template's own rendering where that extends `seen`; otherwise `seen`, the end of the turn if the model
            did not write it, and the rendered text that follows the last answer.
        """
        rendered = self.prompt_ids(messages)
        if len(rendered) > len(seen) and rendered[: len(seen)] == list(seen):
            return rendered
        suffix = self._after_last_answer(messages)
        if seen[-1] in self.stop_ids and tuple(suffix[: len(self.turn_end)]) == self.turn_end:
            suffix = suffix[len(self.turn_end) :]
        return [*seen, *suffix]

    def answer_text(self, generated: Sequence[int]) -> str:
        """The text of generated ids, end-of-turn and other special tokens left out."""
        text = self._tokenizer.decode(list(generated), skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)

    def _render(self, messages: Sequence[dict[str, str]], *, prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        return str(text)

    def _tokenise(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _after_last_answer(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of everything that the template writes after the last assistant message's text."""
        marker = next((mark for mark in MARKERS if not any(mark in message["content"] for message in messages)), None)
        if marker is None:
            raise DraftsmithError("a message contains every one of draftsmith's own markers", expected=str(MARKERS))
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        marked = [
            {**message, "content": marker} if index == last else message for index, message in enumerate(messages)
        ]
        before, found, after = self._render(marked, prompt=last < len(messages) - 1).rpartition(marker)
        if not found:
            raise DraftsmithError(
                "the chat template leaves out the text of an assistant's turn",
                where=getattr(self._tokenizer, "name_or_path", None),
                found=before[-200:],
            )
        return self._tokenise(after)

    def _find_turn_end(self) -> tuple[int, ...]:
        """Leading ids of what follows an answer, up to the first special or known end token; empty if there is none."""
        history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
        tail = self._after_last_answer(history)
        ends = set(self._tokenizer.all_special_ids) | set(self._tokenizer.get_added_vocab().values())
        ends |= {self._tokenizer.convert_tokens_to_ids(name) for name in END_NAMES}
        for index, token in enumerate(tail):
            if token in ends:
                return tuple(tail[: index + 1])
        return ()
