"""Ids of conversations: which prompt they answer, how often it was asked, and which part of the conversation they are.

ID       the first answer to prompt ID         ID~2     the second answer to the same prompt
ID#2     the second token sequence of ID       ID~2#3   the third one of ID~2
"""

from __future__ import annotations

import re
from collections.abc import Collection


def answer_id(prompt: str, number: int) -> str:
    """Id of the `number`th answer to a prompt, counted from 1."""
    return prompt if number == 1 else f"{prompt}~{number}"


def part_id(conversation: str, number: int) -> str:
    """Id of the `number`th token sequence of a conversation, counted from 1."""
    return conversation if number == 1 else f"{conversation}#{number}"


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
