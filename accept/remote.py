"""Ask engines that already run: the same requests over HTTP, the same result as a local run leaves.

SGLang answers `/generate` with the counters of each request in `meta_info`. vLLM's `/v1/completions` has none, so its
totals are the difference of `/metrics` before and after: nobody else may use that server meanwhile.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from draftsmith.accept.local import check_counters
from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.engine_loader import TITLES, Engine
from draftsmith.engines.counting import Output, Served, first_divergences, summarise_counters, summarise_run

VLLM_COUNTERS = {
    "verify_steps": "vllm:spec_decode_num_drafts",
    "accepted_drafts": "vllm:spec_decode_num_accepted_tokens",
    "position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}

UNANSWERED = (OSError, http.client.HTTPException, ValueError)
"""What a lost connection, another protocol than HTTP and content that cannot be read raise. HTTPException is no OSError."""


class Server:
    """One running engine.

    Args:
        url: its root, with or without /v1.
        limit: seconds from now for everything. patience: seconds that one request may take.
    """

    def __init__(self, engine: Engine, url: str, limit: float, patience: float = math.inf) -> None:
        self.engine, self.limit, self._patience = engine, limit, patience
        self._deadline = time.monotonic() + limit
        self.url = url.rstrip("/").removesuffix("/v1")
        self.title = f"{TITLES[engine]} at {self.url}"

    def wait(self, start_limit: float, *, mend: str) -> None:
        """Return once it is healthy; `mend` is what helps if it is not.

        Raises:
            DraftsmithError: it is not within `start_limit` seconds.
        """
        began, said = time.monotonic(), "no answer"
        while True:
            try:
                self._get("/health", max(0.2, start_limit))
                return
            except UNANSWERED as error:
                said = str(error) or type(error).__name__
            if time.monotonic() - began > start_limit:
                raise DraftsmithError(
                    f"{self.title} was not healthy within {start_limit:g} seconds", where=f"{self.url}/health",
                    found=said, expected="status 200", mend=mend,
                )  # fmt: skip
            time.sleep(0.2)

    def serve(self, prompts: Mapping[str, Any], concurrency: int, *, drafted: bool) -> Served:
        """Answer every prompt greedily, `concurrency` at once; with counters if `drafted`.

        Raises:
            DraftsmithError: the server is lost, or answers something else than expected.
        """
        before = self._totals() if drafted else {}
        model = self._model() if self.engine == "vllm" else ""
        began = time.monotonic()
        pool = ThreadPoolExecutor(concurrency)
        try:
            outputs = list(pool.map(lambda prompt: self._answer(prompt, prompts, model, drafted), prompts["prompts"]))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        seconds = time.monotonic() - began
        counters = {name: value - before.get(name, 0) for name, value in self._totals().items()} if drafted else {}
        return Served(outputs, 0.0, seconds, counters)

    def depth(self) -> int | None:
        """Drafted tokens a chain, where the server says so.

        Raises:
            DraftsmithError: what it says is no such number.
        """
        if self.engine == "vllm":
            positions = [name for name in self._totals() if name.startswith("position")]
            return len(positions) or None
        try:
            said = json.loads(self._get("/server_info"))
        except UNANSWERED:
            return None
        where = f"{self.url}/server_info"
        if not isinstance(said, dict):
            raise DraftsmithError(
                f"{self.title} describes itself by no JSON object", where=where, found=type(said).__name__,
                expected="an object with speculative_num_steps", mend="name SGLang's own address with --url",
            )  # fmt: skip
        steps = said.get("speculative_num_steps")
        if steps is not None and (type(steps) is not int or steps < 1):
            raise DraftsmithError(
                f"{self.title} names no depth of its chains", where=f"{where}, speculative_num_steps",
                found=repr(steps), expected="a number of drafts, for instance 3",
                mend="serve with the drafter: draftsmith verify prints the launch line",
            )  # fmt: skip
        return steps

    def version(self) -> str:
        """The engine's version, or `unknown`."""
        path, key = ("/version", "version") if self.engine == "vllm" else ("/server_info", "version")
        try:
            said = json.loads(self._get(path))
        except UNANSWERED:
            return "unknown"
        return str(said.get(key, "unknown")) if isinstance(said, dict) else "unknown"

    def _answer(self, prompt: Mapping[str, Any], document: Mapping[str, Any], model: str, drafted: bool) -> Output:
        ids, new, stop = prompt["input_ids"], prompt["max_new_tokens"], document["stop_token_ids"]
        ignore = bool(document.get("ignore_eos"))
        try:
            if self.engine == "vllm":
                said = self._post("/v1/completions", {
                    "model": model, "prompt": ids, "max_tokens": new, "temperature": 0, "stop_token_ids": stop,
                    "return_token_ids": True, "ignore_eos": ignore,
                })  # fmt: skip
                return Output(prompt["id"], _whole(said["choices"][0]["token_ids"], "token_ids"))
            sampling = {"temperature": 0, "max_new_tokens": new, "stop_token_ids": stop, "ignore_eos": ignore}
            said = self._post("/generate", {"input_ids": ids, "sampling_params": sampling})
            output, meta = Output(prompt["id"], _whole(said["output_ids"], "output_ids")), said["meta_info"]
            if drafted and "spec_verify_ct" in meta:
                name = "spec_correct_drafts_histogram"
                output.histogram = _whole(meta.get(name, []), name)
                (output.verify_steps,) = _whole([meta["spec_verify_ct"]], "spec_verify_ct")
            return output
        except (*UNANSWERED, LookupError, TypeError) as error:
            if self._left() <= 0:
                raise DraftsmithError(
                    f"{self.title} did not finish within {self.limit:g} seconds", where=f"request {prompt['id']}",
                    mend="serve fewer conversations with --limit N, or allow more with --timeout SECONDS",
                ) from None  # fmt: skip
            raise DraftsmithError(
                f"{self.title} was lost, or answers otherwise than expected", where=f"request {prompt['id']}",
                found=f"{type(error).__name__}: {error}", expected="token ids of an answer",
                mend="read the server's log",
            ) from None  # fmt: skip

    def _model(self) -> str:
        try:
            return str(json.loads(self._get("/v1/models"))["data"][0]["id"])
        except (*UNANSWERED, LookupError, TypeError) as error:
            raise DraftsmithError(f"{self.title} lists no model: {error}", where=f"{self.url}/v1/models") from None

    def _totals(self) -> dict[str, float]:
        """vLLM's counters so far; `position 0` ... beside the totals. Nothing for SGLang, whose requests carry theirs."""
        if self.engine != "vllm":
            return {}
        try:
            return _read_totals(self._get("/metrics").decode())
        except UNANSWERED as error:
            raise DraftsmithError(f"{self.title} has no metrics: {error}", where=f"{self.url}/metrics") from None

    def _left(self) -> float:
        """Seconds that are left."""
        return self._deadline - time.monotonic()

    def _timeout(self) -> float:
        return max(0.01, min(self._left(), self._patience))

    def _get(self, path: str, limit: float | None = None) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=min(self._timeout(), limit or math.inf)) as answer:
            return bytes(answer.read())

    def _post(self, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout()) as answer:
                said = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise ValueError(f"status {error.code}: {error.read()[:300].decode(errors='replace')}") from None
        if not isinstance(said, dict):
            raise ValueError(f"a {type(said).__name__} instead of an object")
        return said


def serve_remotely(
    engine: Engine,
    url: str,
    plain_url: str | None,
    prompts: Mapping[str, Any],
    *,
    steps: int,
    start_limit: float,
    limit: float,
    concurrency: int,
) -> dict[str, Any]:
    """Serve `prompts` at a server with the drafter and, if there is one, at a server without.

    Returns:
        A result as the serve scripts write it; `base` is None without `plain_url`.

    Raises:
        DraftsmithError: a server is not healthy in time, is lost, or reports no counters.
    """
    drafting = Server(engine, url, limit)
    longer = "start it, or allow more with --start-timeout SECONDS"
    drafting.wait(start_limit, mend=longer)
    plain = Server(engine, plain_url, limit) if plain_url else None
    if plain is not None:
        plain.wait(start_limit, mend=longer)
    served = drafting.serve(prompts, concurrency, drafted=True)
    base = plain.serve(prompts, concurrency, drafted=False) if plain is not None else None
    depth = drafting.depth() or max((len(o.histogram) - 1 for o in served.outputs if o.histogram), default=steps)
    divergences = first_divergences(base.outputs, served.outputs) if base is not None else None
    result = {
        "engine": engine, "version": drafting.version(), "url": drafting.url, "dtype": None, "steps": depth,
        "spec": {**_counters(served, depth), **summarise_run(served)},
        "base": summarise_run(base) if base is not None else None,
        "identical": None if divergences is None else not divergences, "first_divergence": divergences or [],
    }  # fmt: skip
    check_counters(engine, result, drafting.url)
    return result


def _counters(served: Served, depth: int) -> dict[str, Any]:
    """Totals from requests (SGLang) or from the difference of the server's counters (vLLM); empty where there are none."""
    if any(output.histogram is not None for output in served.outputs):
        for output in served.outputs:
            histogram = output.histogram or []
            output.histogram = histogram + [0] * (depth + 1 - len(histogram))
        return summarise_counters(Served(served.outputs, 0.0, served.seconds), depth)
    steps, accepted = served.counters.get("verify_steps"), served.counters.get("accepted_drafts")
    if not steps or accepted is None:
        return {"verify_steps": int(steps or 0)}
    return {
        "accept_length": 1 + accepted / steps,
        "accept_per_position": [served.counters.get(f"position {i}", 0.0) / steps for i in range(depth)],
        "verify_steps": int(steps),
        "accepted_drafts": int(accepted),
    }


def _read_totals(text: str) -> dict[str, float]:
    """vLLM's counters in its metrics; ValueError at one that is no number."""
    totals: dict[str, float] = {}
    for name, metric in VLLM_COUNTERS.items():
        for labels, value in re.findall(rf"^{metric}(?:_total)?(\{{[^}}]*\}})? (\S+)$", text, re.M):
            place = re.search(r'position="(\d+)"', labels)
            key = f"{name} {place[1]}" if place else name
            totals[key] = totals.get(key, 0.0) + float(value)
            if not math.isfinite(totals[key]):
                raise ValueError(f"{metric} is {value}")
    return totals


def _whole(values: Any, name: str) -> list[int]:
    """`values`, which must be a list of whole numbers from 0 on; ValueError if it is anything else."""
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{name} is no list of whole numbers: {str(values)[:80]}")
    return values
