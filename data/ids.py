"""Ids of conversations: which prompt they answer, how often it was asked, and which part of the conversation they are.

ID       the first answer to prompt ID         ID~2     the second answer to the same prompt
ID#2     the second token sequence of ID       ID~2#3   the third one of ID~2
"""

from __future__ import annotations

import re
from collections.abc import Collection

_ENDING = re.compile(r"(?P<base>.+?)(?P<copy>~[1-9][0-9]{0,8})?(?P<part>#[1-9][0-9]{0,8})?", re.DOTALL)


def answer_id(prompt: str, number: int) -> str:
    """Id of the `number`th answer to a prompt, counted from 1."""
    return prompt if number == 1 else f"{prompt}~{number}"


def part_id(conversation: str, number: int) -> str:
    """Id of the `number`th token sequence of a conversation, counted from 1."""
    return conversation if number == 1 else f"{conversation}#{number}"


def bases(name: str) -> set[str]:
    """Ids of prompts of which a further answer or part might be called `name`."""
    found = _ENDING.fullmatch(name)
    if found is None:
        return set()
    copy = found["base"] + (found["copy"] or "")
    return {base for base in (found["base"], copy) if base != name}


def is_given(name: str, prompt: str, *, answers: int, parts: int) -> bool:
    """Whether `name`, of which `prompt` is one of the `bases`, is that of one of its answers or their parts."""
    found = _ENDING.fullmatch("x" + name.removeprefix(prompt))
    return (
        found is not None
        and (found["copy"] is None or 2 <= int(found["copy"][1:]) <= answers)
        and (found["part"] is None or 2 <= int(found["part"][1:]) <= parts)
    )


def prompt_of(name: str, known: Collection[str]) -> str:
    """The id that every sequence of every answer to one prompt shares.

    A part's first sequence is always among the `known` ids; without it `ID#2` is a prompt that somebody called so. Of
    answers the first may be missing (it was cut, or refused), so `ID~2` always belongs to ID.
    """
    while True:
        part = re.fullmatch(r"(.+)#\d+", name, re.DOTALL)
        answer = re.fullmatch(r"(.+)~\d+", name, re.DOTALL)
        if part is not None and part[1] in known:
            name = part[1]
        elif answer is not None:
            name = answer[1]
        else:
            return name
