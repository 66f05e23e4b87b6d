"""What storage refuses, as one DraftsmithError that says why and how to mend it; credentials never show."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from draftsmith.configs.errors import DraftsmithError

SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|CONNECTION_STRING|SAS")
"""Environment variables whose values must not show."""

AGAIN = "run the export again; it goes on from what is there"


@contextmanager
def storage_faults(doing: str, where: str, *, secrets: tuple[str, ...] = (), login: str = "") -> Iterator[None]:
    """Turn whatever a storage driver raises into a DraftsmithError.

    Args:
        doing: what could not be done, after "could not".
        where: the address, without credentials.
        secrets: strings to black out besides the environment's.
        login: how to give credentials for this storage.
    """
    try:
        yield
    except DraftsmithError:
        raise
    except Exception as error:  # drivers raise what they like; each becomes one message, with the original as cause
        cause, mend = _explain(error, login)
        said = scrub(_text(error), secrets)
        raise DraftsmithError(f"could not {doing}: {cause}", where=where, found=said, mend=mend) from error


def scrub(text: str, secrets: tuple[str, ...] = ()) -> str:
    """`text` without credentials: those of the environment, of URLs, and `secrets`."""
    values = {value for name, value in os.environ.items() if SECRET.search(name.upper()) and len(value) >= 6}
    for value in sorted(values | {secret for secret in secrets if secret}, key=len, reverse=True):
        text = text.replace(value, "***")
    text = re.sub(r"(://)[^/@\s]+@", r"\1***@", text)
    text = re.sub(r"(?i)((?:signature|credential|token|x-amz-[a-z-]+|sig)=)[^&\s]+", r"\1***", text)
    return re.sub(r"\bhf_[A-Za-z0-9]{8,}", "***", text)


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _text(error: BaseException) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {said[:400]}"


def _explain(error: BaseException, login: str) -> tuple[str, str]:
    """Cause and mending step, by the class of the error or of what caused it (drivers need not be importable here)."""
    chain = _chain(error)
    names = {base.__name__ for link in chain for base in type(link).__mro__}
    codes = {link.errno for link in chain if isinstance(link, OSError)}
    statuses = {getattr(getattr(link, "response", None), "status_code", None) for link in chain}
    give = login or "give the driver its credentials through its standard environment variables"
    if names & {"NoCredentialsError", "PartialCredentialsError", "LocalTokenNotFoundError", "DefaultCredentialsError",
                "CredentialRetrievalError", "AuthenticationException", "ProfileNotFound"} or 401 in statuses:  # fmt: skip
        return "there are no valid credentials", give
    if "PermissionError" in names or "ClientAuthenticationError" in names or statuses & {403}:
        return (
            "the storage refuses these credentials or this action",
            f"ask for the right to read, write and delete there, or {give}",
        )
    if codes & {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} or 507 in statuses:
        return "the storage is full", "free some space, then " + AGAIN
    if errno.EROFS in codes:
        return "the storage is read-only", "name another destination"
    if "OfflineModeIsEnabled" in names:
        return "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
    if names & {"ConnectionError", "TimeoutError", "HTTPClientError", "EndpointConnectionError", "TransportError", "gaierror",
                "ClientConnectionError", "ClientOSError", "SSHException", "EOFError"} or codes & {errno.EHOSTUNREACH, errno.ENETUNREACH}:  # fmt: skip
        return "the storage cannot be reached", "check network and endpoint, then " + AGAIN
    if "FileNotFoundError" in names or "RepositoryNotFoundError" in names or 404 in statuses:
        return "there is no such bucket, folder or repository", "create it first, or correct the address"
    if statuses & {500, 502, 503, 504, 429} or errno.EBUSY in codes:
        return "the storage is overloaded", AGAIN
    return "the storage's driver gave up", AGAIN
