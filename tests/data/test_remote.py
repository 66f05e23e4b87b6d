"""Promises of synthesis on servers: whatever fails on the way, the conversations are those of an unbroken run."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.conversations import read_conversations
from draftsmith.data.replies import BadReplyError
from draftsmith.data.servers import Pool
from draftsmith.data.synthesize import rejects_file, summary_file, synthesize
from draftsmith.data.vocab import build_vocab

_spec = importlib.util.spec_from_file_location("faulty_server", Path(__file__).with_name("faulty_server.py"))
assert _spec is not None and _spec.loader is not None
faulty_server = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(faulty_server)

NURSERY = """
import os, sys
import openai
from draftsmith.configs.schema import load_config
from draftsmith.data.synthesize import synthesize
from draftsmith.data.target_model import chat_format

config = load_config(sys.argv[1])
chat_format(config)  # imports are done once, for all that are forked
for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            synthesize(config, "train")
            os._exit(0)
        finally:
            os._exit(1)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""
"""Runs synthesize in a forked process for every line that it reads; writes the process and then its exit status."""


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    servers = []

    def start(**options: Any) -> Any:
        servers.append(faulty_server.FaultyServer(**options).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def remote(make_config: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., RunConfig]:
    """A configuration of `rows` prompts, some of two turns, answered by the given servers."""

    def make(servers: list[Any], rows: int = 40, **changes: Any) -> RunConfig:
        prompts = tmp_path / "many.jsonl"
        prompts.write_text(
            "".join(
                json.dumps({"id": f"p{n}", "turns": [f"question {n}"] + ["and then?"] * (n % 3 == 0)}) + "\n"
                for n in range(rows)
            )
        )
        values = {
            "prompts__train": str(prompts), "synthesize__backend": "openai", "synthesize__concurrency": 8,
            "synthesize__servers": [getattr(server, "url", server) for server in servers],
            "synthesize__timeout": 5.0, "synthesize__retries": 12, "synthesize__patience": 20.0,
        }  # fmt: skip
        return make_config(**{**values, **changes})

    return make


def test_every_conversation_has_the_ids_that_the_server_generated(serve: Any, remote: Any) -> None:
    server = serve()
    conversations = list(read_conversations(synthesize(remote([server], synthesize__temperature=0.7), "train")))
    assert [one.id for one in conversations] == [f"p{n}" for n in range(40)]
    answers = {json.dumps(body["prompt"]): body for body in server.requests}
    assert len(answers) == len(server.requests) == 40 + 14
    for one in conversations:
        assert not one.greedy and one.mean_logprob == pytest.approx(-0.5)
        for (start, end), finish in zip(one.spans, one.finish, strict=True):
            body = answers[json.dumps(list(one.input_ids[:start]))]
            assert (list(one.input_ids[start:end]), finish) == faulty_server.reply_ids(body["prompt"], body["seed"], 24)
    assert len({body["seed"] for body in server.requests}) == 54, "a seed a conversation and turn"
    assert 1 < server.most_at_once <= 8


def test_a_prompt_is_asked_as_often_as_wanted_and_answered_differently(serve: Any, remote: Any) -> None:
    config = remote([serve()], rows=4, synthesize__temperature=0.7, synthesize__answers=3)
    conversations = list(read_conversations(synthesize(config, "train")))
    assert [one.id for one in conversations] == [f"p{n}{copy}" for n in range(4) for copy in ("", "~2", "~3")]
    assert len({one.input_ids for one in conversations}) == 12
    assert len({one.messages[0].content for one in conversations[:3]}) == 1, "the same question"
    assert all(one.temperature == 0.7 and not one.greedy for one in conversations)
    more = remote([serve()], rows=4, synthesize__temperature=0.7, synthesize__answers=4)
    again = list(read_conversations(synthesize(more, "train")))
    assert len(again) == 16 and [one for one in again if "~4" not in one.id] == conversations


def test_whatever_fails_on_the_way_the_file_is_that_of_an_unbroken_run(serve: Any, remote: Any) -> None:
    unbroken = synthesize(remote([serve()], name="unbroken"), "train").read_bytes()
    faulty = [
        serve(faults=faulty_server.FAULTS, share=0.4, delay=1.5),
        serve(faults=faulty_server.FAULTS, share=0.2, delay=1.5),
    ]
    dead = "http://127.0.0.1:9/v1"
    config = remote([*faulty, dead], synthesize__timeout=0.8)
    assert synthesize(config, "train").read_bytes() == unbroken
    assert all(server.answered for server in faulty), "both servers take their turns"
    asked: dict[str, set[int]] = {}
    for body in faulty[0].requests + faulty[1].requests:
        asked.setdefault(json.dumps(body["prompt"]), set()).add(body["seed"])
    assert all(len(seeds) == 1 for seeds in asked.values()), "asked again with the same seed"


def test_a_server_that_dies_and_comes_back_loses_and_doubles_nothing(serve: Any, remote: Any) -> None:
    unbroken = synthesize(remote([serve()], name="unbroken"), "train").read_bytes()
    first = faulty_server.FaultyServer(latency=0.05).start()
    port = first.server_address[1]
    config = remote([first])

    def die_and_return() -> None:
        while len(first.answered) < 15:
            time.sleep(0.01)
        first.stop()
        time.sleep(1.0)
        serve(port=port)

    thread = threading.Thread(target=die_and_return)
    thread.start()
    path = synthesize(config, "train")
    thread.join()
    assert path.read_bytes() == unbroken


def test_servers_that_never_answer_stop_the_run_and_keep_what_is_there(serve: Any, remote: Any) -> None:
    config = remote(["http://127.0.0.1:9/v1"], synthesize__patience=0.5)
    with pytest.raises(DraftsmithError, match=r"no server can be reached(.|\n)*same command again"):
        synthesize(config, "train")
    server = serve()
    assert len(list(read_conversations(synthesize(remote([server]), "train")))) == 40


@pytest.mark.parametrize("models", ['{"object": "list", "data": []}', "<html>sign in</html>", "{}", "[]"])
def test_a_server_that_lists_no_model_is_asked_ever_more_rarely_and_not_for_ever(
    serve: Any, remote: Any, models: str
) -> None:
    server = serve()
    server.models = models
    config = remote([server], rows=2, synthesize__patience=2.0)
    with pytest.raises(DraftsmithError, match=r"no server can be reached(.|\n)*(lists no model|broken answer)"):
        synthesize(config, "train")
    assert 2 <= server.models_asked <= 8


def test_a_server_that_sees_another_prompt_stops_by_name(serve: Any, remote: Any) -> None:
    config = remote([serve(faults=("other prompt",), share=1.0)], synthesize__retries=0)
    with pytest.raises(DraftsmithError, match=r"answer nothing(.|\n)*saw another prompt"):
        synthesize(config, "train")


def _text(text: str) -> Callable[..., None]:
    """A server that gives this text and no ids."""

    def change(choice: dict[str, Any], body: dict[str, Any]) -> None:
        del choice["token_ids"]
        choice["text"], choice["finish_reason"] = text, "stop"

    return change


LIES: dict[str, tuple[Callable[..., None], str]] = {
    "an id outside": (lambda choice, body: choice.update(token_ids=[512, 2]), "outside the target's vocabulary of 512"),
    "a huge id": (lambda choice, body: choice.update(token_ids=[10**25]), "outside the target's vocabulary"),
    "too many": (
        lambda choice, body: choice.update(token_ids=[50] * 500, text="P" * 500, finish_reason="length"),
        "more tokens than max_tokens",
    ),
    "another text": (lambda choice, body: choice.update(text="Good day!"), "not those of its text"),
    "a surrogate": (lambda choice, body: choice.update(text="\ud800"), "not those of its text"),
    "a surrogate alone": (_text("so \ud800"), "no valid Unicode"),
    "a long text": (_text("word " * 500), "far more text"),
    "a number for the prompt": (lambda choice, body: choice.update(prompt_token_ids=7), "saw another prompt"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_contradicts_itself_is_refused_by_name(serve: Any, remote: Any, lie: str) -> None:
    server = serve()
    server.change, reason = LIES[lie]
    config = remote([server], rows=3, synthesize__retries=1, synthesize__concurrency=1)
    with pytest.raises(DraftsmithError, match=rf"stayed unanswered(.|\n)*{reason}(.|\n)*{server.url}"):
        synthesize(config, "train")
    assert not config.conversations("train").read_bytes()
    server.change = None
    assert len(list(read_conversations(synthesize(config, "train")))) == 3


TRUTHS: dict[str, tuple[list[int], str, str]] = {
    "the end left in the text": ([40, 41, 2], "FG<|im_end|>", "stop"),
    "the end kept back": ([40, 41], "FG", "stop"),
    "special tokens left out": ([40, 0, 41, 2], "FG", "stop"),
    "special tokens left in": ([40, 0, 41, 2], "F<|endoftext|>G", "stop"),
    "half a character": ([40, 130, 2], "F", "stop"),
    "half a character shown": ([40, 130, 2], "F\ufffd", "stop"),
    "spaces": ([40, 223, 41, 2], "F G", "stop"),
    "no text": ([40, 41, 2], "", "stop"),
    "nothing but the end": ([2], "", "stop"),
}


@pytest.mark.parametrize("truth", TRUTHS)
def test_ids_whose_text_a_server_shows_in_its_own_way_are_kept(serve: Any, remote: Any, truth: str) -> None:
    server = serve()
    ids, text, finish = TRUTHS[truth]
    server.change = lambda choice, body: choice.update(token_ids=ids, text=text, finish_reason=finish)
    for one in read_conversations(synthesize(remote([server], rows=2, synthesize__retries=0), "train")):
        assert all(list(one.input_ids[start:end]) == [*ids[: len(ids) - (ids[-1] == 2)], 2] for start, end in one.spans)


def test_connections_dropped_in_one_moment_set_a_server_aside_once(serve: Any) -> None:
    server = serve(faults=("drop",), share=1.0, latency=0.5)

    async def burst() -> int:
        pool = Pool([server.url], "none", 60.0, 60.0)
        one = await pool.take()
        body = {"max_tokens": 4, "prompt": [40], "model": "tiny"}
        asked = [pool.call(one, lambda: one.client.completions.create(**body, seed=1)) for _ in range(48)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        await pool.close()
        assert all(isinstance(result, BadReplyError) for result in results)
        return one.failures

    assert asyncio.run(burst()) == 1


def test_prompts_that_stay_unanswered_are_asked_by_the_next_run_alone(serve: Any, remote: Any) -> None:
    config = remote([serve(faults=("500",), share=0.5)], synthesize__retries=0)
    with pytest.raises(DraftsmithError, match=r"stayed unanswered(.|\n)*HTTP 500"):
        synthesize(config, "train")
    kept = {one.id: one for one in read_conversations(config.conversations("train"))}
    assert 0 < len(kept) < 40
    server = serve()
    done = list(read_conversations(synthesize(remote([server]), "train")))
    assert [one.id for one in done] == [f"p{n}" for n in range(40)]
    assert all(one == kept.get(one.id, one) for one in done)
    assert len({json.dumps(body["prompt"]) for body in server.requests}) < 54


def test_the_key_comes_from_the_environment(serve: Any, remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVERS_KEY", "sesame")
    server = serve()
    config = remote([server], rows=2, synthesize__api_key_env="MY_SERVERS_KEY")
    synthesize(config, "train")
    assert set(server.headers_seen) == {"Bearer sesame"}
    assert "sesame" not in "".join(file.read_text() for file in config.folder.rglob("*") if file.is_file())


def test_without_token_ids_the_text_gives_them(serve: Any, remote: Any) -> None:
    server = serve()
    server.token_ids = False
    config = remote([server], rows=6, synthesize__token_ids=False)
    from draftsmith.data.target_model import chat_format

    chat = chat_format(config)
    for one in read_conversations(synthesize(config, "train")):
        for (start, end), finish in zip(one.spans, one.finish, strict=True):
            body = next(body for body in server.requests if body["prompt"] == list(one.input_ids[:start]))
            assert "return_token_ids" not in body
            ids, _ = faulty_server.reply_ids(body["prompt"], body["seed"], 24)
            assert chat.written(one.input_ids[start:end]) == faulty_server.text_of(ids)
            assert (one.input_ids[end - 1] == 2) == (finish == "stop")


def test_cut_turns_are_counted_and_their_end_of_turn_is_never_generated(serve: Any, remote: Any) -> None:
    server = serve()
    config = remote([server], synthesize__max_new_tokens=6)
    conversations = list(read_conversations(synthesize(config, "train")))
    finish = [(one, index) for one in conversations for index, reason in enumerate(one.finish) if reason == "length"]
    assert json.loads(summary_file(config, "train").read_text())["cut"] == len(finish) > 10
    for one, index in finish:
        start, end = one.spans[index]
        assert end - start == 6 and 2 not in one.input_ids[start:end]
        assert not one.generated_mask()[end:].any() or index + 1 < len(one.spans)
    dropped = list(
        read_conversations(synthesize(remote([server], synthesize__max_new_tokens=6, synthesize__cut="drop"), "train"))
    )
    assert [one.id for one in dropped] == [one.id for one in conversations if "length" not in one.finish]


def test_prompts_that_a_server_refuses_are_listed_and_the_run_completes_without_them(
    serve: Any, remote: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    unbroken = list(read_conversations(synthesize(remote([serve()], rows=20, name="unbroken"), "train")))
    server = serve()
    other = unbroken[7]
    server.refuses = lambda body: body["prompt"] == list(other.input_ids[: other.spans[0][0]])
    config = remote([server], rows=20)
    done = list(read_conversations(synthesize(config, "train")))
    assert done == [one for one in unbroken if one is not other]
    listed = [json.loads(line) for line in rejects_file(config, "train").read_text().splitlines()]
    assert [(row["id"], row["line"]) for row in listed] == [("p7", 8)]
    assert "HTTP 400" in listed[0]["reason"] and "not for me" in listed[0]["reason"]
    said = " ".join(capsys.readouterr().err.split())
    assert "1 of 20 rows" in said and "HTTP 400" in said and "cut turn" not in said
    summary = json.loads(summary_file(config, "train").read_text())
    assert summary["complete"] and summary["dropped"] == 0 and sum(summary["rejected"].values()) == 1
    asked = len(server.requests)
    synthesize(config, "train")
    assert len(server.requests) == asked, "complete already"


@pytest.mark.parametrize("rows", [3, 40])
def test_servers_that_refuse_every_prompt_stop_the_run(serve: Any, remote: Any, rows: int) -> None:
    server = serve()
    server.refuses = lambda body: True
    config = remote([server], rows=rows)
    with pytest.raises(DraftsmithError, match=r"(refuse every prompt|answer nothing)(.|\n)*not for me"):
        synthesize(config, "train")
    assert not json.loads(summary_file(config, "train").read_text())["complete"]
    server.refuses = lambda body: body["seed"] % 2 == 0
    with pytest.raises(DraftsmithError, match="of the prompts are unusable"):
        synthesize(remote([server], rows=40, prompts__max_rejected=0.1), "train")


def test_an_answer_of_no_token_is_a_refused_prompt_unless_its_ids_end_the_turn(serve: Any, remote: Any) -> None:
    server = serve()

    def empty(choice: dict[str, Any], body: dict[str, Any]) -> None:
        if body["seed"] % 8 == 0:
            choice.update(token_ids=[], text="", finish_reason="stop")

    server.change = empty
    config = remote([server])
    done = {one.id for one in read_conversations(synthesize(config, "train"))}
    listed = [json.loads(line) for line in rejects_file(config, "train").read_text().splitlines()]
    assert listed and all("an empty answer" in row["reason"] and server.url in row["reason"] for row in listed)
    assert done | {row["id"] for row in listed} == {f"p{n}" for n in range(40)} and len(done) + len(listed) == 40


def test_rejects_are_listed_with_line_and_reason_and_too_many_stop(serve: Any, remote: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": "fine"},
        {"messages": []},
        {"prompt": "word " * 200},
        {"prompt": "fine!"},
        {"prompt": "also fine"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"prompts__train": str(file), "synthesize__max_prompt_tokens": 100}
    config = remote([serve()], prompts__max_rejected=0.4, **changes)
    synthesize(config, "train")
    listed = [json.loads(line) for line in rejects_file(config, "train").read_text().splitlines()]
    assert sorted((row["line"], row["reason"]) for row in listed) == [
        (2, "without a user turn"), (3, "longer than 100 tokens"), (4, "repeated question"),
    ]  # fmt: skip
    with pytest.raises(DraftsmithError, match=r"40% of the prompts are unusable(.|\n)*rejects.jsonl"):
        synthesize(remote([serve()], name="few", prompts__max_rejected=0.3, **changes), "train")
    with pytest.raises(DraftsmithError, match=r"line 2(.|\n)*without a user turn"):
        synthesize(remote([serve()], name="strict", prompts__strict=True, **changes), "train")


def test_conversations_of_a_server_feed_the_vocabulary(serve: Any, remote: Any) -> None:
    config = remote([serve()])
    synthesize(config, "train")
    build_vocab(config)
    assert config.vocab_file.is_file()


@pytest.mark.slow
def test_twenty_kills_at_random_moments_end_with_the_unbroken_file(serve: Any, remote: Any, tmp_path: Path) -> None:
    """A kill loses at most what was in flight: every later run begins with what the killed one had on disk."""
    unbroken = synthesize(remote([serve()], rows=400, name="unbroken"), "train").read_bytes()
    server = serve(latency=0.06, faults=("drop", "500", "truncated"), share=0.1)
    config = remote([server], rows=400, synthesize__concurrency=4)
    file = tmp_path / "killed.json"
    file.write_text(config.model_dump_json())
    path, chance, torn = config.conversations("train"), random.Random(7), 0
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY, str(file)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
    ) as nursery:  # fmt: skip
        assert nursery.stdin is not None and nursery.stdout is not None

        def begin() -> int:
            print(file=nursery.stdin, flush=True)
            return int(nursery.stdout.readline())

        for kill in range(20):
            before = len(server.requests)
            process = begin()
            limit = time.monotonic() + 60
            while len(server.requests) == before and time.monotonic() < limit:
                time.sleep(0.005)
            time.sleep(chance.random() * 0.5)
            os.kill(process, signal.SIGKILL)
            status = int(nursery.stdout.readline())
            assert os.WTERMSIG(status) == signal.SIGKILL, "the prompts ran out before the kills did"
            if kill % 3 == 2 and path.stat().st_size > 40:  # as if the kill had torn the last line
                os.truncate(path, path.stat().st_size - chance.randrange(1, 40))
                torn += 1
            ids = [one.id for one in read_conversations(path)] if path.is_file() else []
            assert len(set(ids)) == len(ids)
        assert torn >= 3
        begin()
        assert int(nursery.stdout.readline()) == 0
        nursery.stdin.close()
    assert path.read_bytes() == unbroken
