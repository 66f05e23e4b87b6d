"""Several servers behind one door: they take turns, one that fails is set aside for a while, errors are sorted.

An error of the connection, a time-out, an overload (429, 5xx) or a broken answer may pass: the request is worth asking
again. A refusal (400, 422) concerns one request. A wrong key or an unknown model concerns all of them and stops the run.
"""

from __future__ import annotations

import asyncio
import importlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from draftsmith.configs.console import warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.data.replies import BadReplyError

LONGEST_ASIDE = 30.0
FIRST_ASIDE = 0.25
POLL = 0.05


@cache
def _broken_connections() -> tuple[type[Exception], ...]:
    """What openai, the system and the HTTP library beneath (httpx, or httpx2 since openai 3) raise for a lost connection."""
    from openai import APIConnectionError

    found: list[type[Exception]] = [APIConnectionError, OSError]
    for name in ("httpx", "httpx2"):
        with suppress(ImportError):
            found.append(importlib.import_module(name).HTTPError)
    return tuple(found)


class ServerRefusalError(Exception):
    """A server says that this request can never be answered."""


class NoModelError(ValueError):
    """A server's list of models holds none."""


class Server:
    """One base URL and how it has been doing."""

    def __init__(self, url: str, client: Any) -> None:
        self.url, self.client = url.rstrip("/"), client
        self.in_flight = 0
        self.failures = 0
        self.aside_until = 0.0
        self.failed_at = -1.0
        """When the last failure was counted."""


class Pool:
    """Servers that take turns.

    Args:
        urls: base URLs, `/v1` included.
        key: the API key.
        timeout: seconds a request may take.
        patience: seconds without any server, after which the run stops.
    """

    def __init__(self, urls: Sequence[str], key: str, timeout: float, patience: float) -> None:
        from openai import AsyncOpenAI

        self._servers = [
            Server(url, AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=timeout)) for url in urls
        ]
        self._patience = patience
        self._heard = time.monotonic()
        self._turn = 0
        self._last = "none was asked"
        self._jitter = random.Random()

    async def close(self) -> None:
        """Close every connection."""
        for server in self._servers:
            await server.client.close()

    async def first_model(self) -> str:
        """The name of the first model that a server lists; a server that lists none has failed.

        Raises:
            DraftsmithError: as `take`, or a server refuses to list its models.
        """
        while True:
            server = await self.take()

            async def ask(server: Server = server) -> str:
                try:
                    models = await server.client.models.list()
                    return str(models.data[0].id)
                except (AttributeError, LookupError, TypeError):
                    raise NoModelError from None

            try:
                return str(await self.call(server, ask))
            except BadReplyError:
                continue
            except ServerRefusalError as reason:
                raise DraftsmithError(
                    "the server does not list its models", where=server.url, found=reason,
                    mend="set synthesize.model to the name that it has for the target",
                ) from None  # fmt: skip

    async def take(self) -> Server:
        """The next server that is not set aside, the least busy first; waits while there is none.

        Raises:
            DraftsmithError: none for `patience` seconds.
        """
        while True:
            now = time.monotonic()
            ready = [server for server in self._servers if server.aside_until <= now]
            if ready:
                self._turn += 1
                least = min(server.in_flight for server in ready)
                idle = [server for server in ready if server.in_flight == least]
                return idle[self._turn % len(idle)]
            if now - self._heard > self._patience:
                raise DraftsmithError(
                    "no server can be reached; what was finished is kept",
                    where=", ".join(server.url for server in self._servers),
                    found=f"nothing for {now - self._heard:,.0f} s (synthesize.patience); {self._last}",
                    mend="start the servers, then run the same command again",
                )
            await asyncio.sleep(POLL)

    async def call(self, server: Server, request: Callable[[], Awaitable[Any]]) -> Any:
        """The server's answer.

        Raises:
            BadReplyError: something that may pass.
            ServerRefusalError: this request can never be answered.
            DraftsmithError: no request can.
        """
        import openai

        server.in_flight += 1
        begun = time.monotonic()
        try:
            answer = await request()
        except openai.APIStatusError as error:
            raise self._sort(server, error, begun) from None
        except _broken_connections() as error:
            timed_out = isinstance(error, openai.APITimeoutError)
            self._set_aside(server, "timed out" if timed_out else "cannot be reached", begun)
            raise BadReplyError(f"without a connection ({type(error).__name__})") from None
        except (openai.APIError, ValueError) as error:
            self._set_aside(
                server,
                "lists no model (synthesize.model names one)"
                if isinstance(error, NoModelError)
                else "sent a broken answer",
                begun,
            )
            raise BadReplyError(f"with a broken answer ({type(error).__name__})") from None
        finally:
            server.in_flight -= 1
        server.failures, self._heard = 0, time.monotonic()
        return answer

    def _sort(self, server: Server, error: Any, begun: float) -> Exception:
        code = error.status_code
        if code in (401, 403):
            return DraftsmithError(
                "the server refuses the key", where=server.url, found=f"HTTP {code}",
                mend="put the key into the environment variable that synthesize.api_key_env names",
            )  # fmt: skip
        if code == 404:
            return DraftsmithError(
                f"the server does not know the model or the path: {error.message}", where=server.url,
                mend="set synthesize.model to a name that the server lists, and the base URL up to /v1",
            )  # fmt: skip
        if code < 500 and code not in (408, 409, 425, 429):
            self._heard = time.monotonic()
            return ServerRefusalError(f"refused by the server (HTTP {code}): {str(error.message)[:200]}")
        try:
            wait = min(LONGEST_ASIDE, float(error.response.headers.get("retry-after", 0)))
        except ValueError:
            wait = 0.0
        self._set_aside(server, f"answers HTTP {code}", begun, wait)
        return BadReplyError(f"with HTTP {code}")

    def _set_aside(self, server: Server, reason: str, begun: float, wait: float = 0.0) -> None:
        """One moment's failures count once: a request that was under way when the last was counted tells nothing new."""
        now = time.monotonic()
        self._last = f"the last, {server.url}, {reason}"
        server.aside_until = max(server.aside_until, now + wait)
        if begun <= server.failed_at:
            return
        server.failures, server.failed_at = server.failures + 1, now
        if server.failures == 3:
            warn(f"{server.url} {reason} again and again: set aside, tried again later")
        pause = min(LONGEST_ASIDE, self._patience / 4, FIRST_ASIDE * 2 ** min(server.failures - 1, 10))
        server.aside_until = max(server.aside_until, now + pause * (0.5 + self._jitter.random() / 2))
