"""A server's answer whose log-probabilities are no numbers is refused, and so is a record that holds such a one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types import Completion

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.chat import ChatFormat, Rendered
from draftsmith.data.conversations import read_conversations
from draftsmith.data.replies import BadReplyError, read_reply
from draftsmith.data.target_model import configured_stop_ids, load_tokenizer


def answer(*logprobs: float) -> Completion:
    """As the client builds it from JSON, which Python's servers write with bare NaN and Infinity."""
    choice = {
        "index": 0, "finish_reason": "length", "text": "FG", "token_ids": [40, 41],
        "logprobs": {"token_logprobs": list(logprobs)},
    }  # fmt: skip
    text = json.dumps({"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]})
    return Completion.model_validate(json.loads(text))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_log_probability_that_is_no_number_is_a_bad_reply(
    make_config: Callable[..., RunConfig], wrong: float
) -> None:
    config = make_config()
    chat = ChatFormat(load_tokenizer(config.target), configured_stop_ids(config.target.path))
    prompt = Rendered("a", [40])
    assert read_reply(answer(-0.5, -1), prompt, chat, limit=24, vocab_size=512, chat_endpoint=False).logprob == -1.5
    with pytest.raises(BadReplyError, match="log-probabilities that sum up to"):
        read_reply(answer(-0.5, wrong), prompt, chat, limit=24, vocab_size=512, chat_endpoint=False)


def test_a_recorded_one_is_refused_by_line(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., Any]
) -> None:
    config = make_config()
    put_conversations(config, [([5, 6, 7], [(1, 3)]), ([5, 6, 8], [(1, 3)])])
    file = config.conversations("train")
    lines = file.read_text().splitlines()
    for number in ("NaN", "Infinity"):
        file.write_text(
            "\n".join([lines[0], lines[1].replace('"mean_logprob": -1.0', f'"mean_logprob": {number}'), ""])
        )
        with pytest.raises(DraftsmithError, match=r"line 2 is no conversation: mean_logprob .*finite number"):
            list(read_conversations(file))
