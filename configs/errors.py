"""The one error type that reaches a person: what is wrong, where, what was expected, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class DraftsmithError(Exception):
    """A fault in the user's files, configuration or data.

    The command line prints it as one block and exits with status 2; nothing has been written when it is raised.

    Args:
        problem: one sentence that says what is wrong.
        where: the file, tensor or field.
        found: the value found there.
        expected: the value expected there.
        mend: the command or edit that mends it.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: object = None,
        found: object = None,
        expected: object = None,
        mend: str | None = None,
    ) -> None:
        self.problem, self.where, self.found, self.expected, self.mend = problem, where, found, expected, mend
        lines = [problem]
        for label, value in (("where", where), ("found", found), ("expected", expected), ("mend", mend)):
            if value is not None:
                lines.append(f"  {label}: {value}")
        super().__init__("\n".join(lines))


NONSENSE = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
"""What Python raises when a foreign file holds a value of a kind that nobody expected there."""


@contextmanager
def sensible(what: str, where: object, mend: str | None = None) -> Iterator[None]:
    """Turn the exceptions of nonsensical input into one DraftsmithError that names the file it came from."""
    try:
        yield
    except NONSENSE as error:
        raise DraftsmithError(
            f"{what} holds a value that makes no sense: {type(error).__name__}: {error}", where=where, mend=mend
        ) from error
