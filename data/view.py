"""What a person sees of rendered text and of tokens: special tokens dim, generated tokens green, what is missing red."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.text import Text

from draftsmith.configs.console import console

GENERATED, PROMPT, MARK, MISSING = "green", "", "dim cyan", "bold red"


def show_rendering(rendered: str, special: Sequence[str], missing: str | None = None) -> None:
    """Print a rendered example on standard error, and the turn that should be in it."""
    text = Text("an example, as the template renders it:\n")
    pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    for piece in re.split(f"({pattern})", rendered) if pattern else [rendered]:
        text.append(piece, style=MARK if piece in special else PROMPT)
    if missing is not None:
        text.append(f"\nmissing: {missing}", style=MISSING)
    console.print(text)


def coloured(pieces: Sequence[str], generated: Sequence[bool], special: Sequence[bool]) -> Text:
    """Text of tokens: generated ones green, special ones dim, prompt plain."""
    text = Text()
    for piece, wrote, mark in zip(pieces, generated, special, strict=True):
        text.append(
            piece, style=(f"underline {GENERATED}" if mark else GENERATED) if wrote else MARK if mark else PROMPT
        )
    return text
