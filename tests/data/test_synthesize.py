"""Promises of synthesis, against transformers' own generate on one prompt at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.conversations import read_conversations
from draftsmith.data.decode import Sampler
from draftsmith.data.harvest import harvest
from draftsmith.data.store import read_manifest
from draftsmith.data.summary import planned_conversations
from draftsmith.data.synthesize import dropped_file, finished_conversations, summary_file, synthesize
from tests.tiny_target import make_tiny_target

KILLED = """
import os, signal, sys
from draftsmith.configs.schema import load_config
from draftsmith.data.conversations import ConversationLog
from draftsmith.data.synthesize import synthesize

calls, append = 0, ConversationLog.append

def dying(log, conversations):
    global calls
    calls += 1
    if calls == 3:
        line = conversations[0].model_dump_json().encode()
        log._handle.write(line[: len(line) // 2])
        log._handle.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    append(log, conversations)

ConversationLog.append = dying
synthesize(load_config(sys.argv[1]), "train")
"""


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Callable[[list[str], int], tuple[list[int], list[tuple[int, int]], list[str], float]]:
    """Answer turns one at a time, unbatched, with generate and the template's own rendering of the history's text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)

    def answer(turns: list[str], limit: int) -> tuple[list[int], list[tuple[int, int]], list[str], float]:
        ids: list[int] = []
        spans, finish = [], []
        for number, turn in enumerate(turns):
            text = f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
            if number:
                text = ("\n" if ids[-1] == 2 else "<|im_end|>\n") + text
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
            prompt = torch.tensor([ids])
            full = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, do_sample=False, pad_token_id=2
            )[0].tolist()
            spans.append((len(ids), len(full)))
            finish.append("stop" if full[-1] == 2 else "length")
            ids = full
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
        gained = [float(logprobs[t - 1, ids[t]]) for start, end in spans for t in range(start, end)]
        return ids, spans, finish, sum(gained) / len(gained)

    return answer


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_greedy_text_equals_unbatched_generate(
    make_config: Callable[..., RunConfig], oracle: Callable[..., Any], batch_size: int
) -> None:
    config = make_config(synthesize__batch_size=batch_size)
    conversations = list(read_conversations(synthesize(config, "train")))
    assert [one.id for one in conversations] == ["p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7"]
    for conversation in conversations:
        turns = [message.content for message in conversation.messages if message.role == "user"]
        ids, spans, finish, logprob = oracle(turns, 24)
        assert list(conversation.input_ids) == ids
        assert list(conversation.spans) == spans and list(conversation.finish) == finish
        assert conversation.mean_logprob == pytest.approx(logprob, abs=1e-5)
        assert conversation.greedy
    reasons = {reason for one in conversations for reason in one.finish}
    assert reasons == {"stop", "length"}, "the case must hold turns of both kinds"


def test_sampled_text_depends_on_seed_and_id_but_not_on_the_batch(make_config: Callable[..., RunConfig]) -> None:
    def run(name: str, seed: int, batch_size: int) -> list[tuple[int, ...]]:
        config = make_config(
            name=name,
            synthesize__temperature=0.9,
            synthesize__top_p=0.95,
            synthesize__seed=seed,
            synthesize__batch_size=batch_size,
        )
        return [one.input_ids for one in read_conversations(synthesize(config, "train"))]

    first = run("a", 1, 8)
    assert first == run("b", 1, 2)
    assert first != run("c", 2, 8)


def test_inverse_transform_sampling_by_hand() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.4]]).log().repeat(6, 1)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.89, 0.91, 0.999])
    # descending: id 1 up to 0.5, id 2 up to 0.9, id 0 up to 1
    assert Sampler(1.0, 1.0).choose(logits, uniform).tolist() == [1, 1, 2, 2, 0, 0]
    # top_p 0.6 keeps ids 1 and 2, renormalised: id 1 up to 5/9 = 0.556
    assert Sampler(1.0, 0.6).choose(logits, uniform).tolist() == [1, 1, 1, 2, 2, 2]
    # temperature 0.5 squares the odds: 25 : 16 : 1 of 42
    assert Sampler(0.5, 1.0).choose(logits, uniform).tolist() == [1, 1, 1, 2, 2, 0]
    assert Sampler(0.0).choose(logits, None).tolist() == [1] * 6


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    unbroken = synthesize(make_config(name="unbroken", synthesize__batch_size=2), "train").read_bytes()
    config = make_config(synthesize__batch_size=2)
    file = tmp_path / "killed.json"
    file.write_text(config.model_dump_json())
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", KILLED, str(file)], env=environment, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    path = config.conversations("train")
    assert len(list(read_conversations(path))) == 4 and not path.read_bytes().endswith(b"\n")
    with pytest.raises(DraftsmithError, match="unfinished"):
        finished_conversations(config, "train")
    assert synthesize(config, "train").read_bytes() == unbroken


def test_a_second_run_writes_nothing_and_says_so(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    path = synthesize(config, "train")
    before = (path.stat().st_mtime_ns, summary_file(config, "train").stat().st_mtime_ns)
    monkeypatch.setattr("draftsmith.data.answering.load_target", lambda *_: pytest.fail("weights were loaded"))
    assert synthesize(config, "train") == path
    assert (path.stat().st_mtime_ns, summary_file(config, "train").stat().st_mtime_ns) == before
    assert "complete already" in capsys.readouterr().err


@pytest.mark.parametrize("left", ["half", "torn", "nothing"])
def test_a_shortened_file_is_refused_and_the_missing_conversations_are_asked_again(
    make_config: Callable[..., RunConfig], left: str
) -> None:
    config = make_config()
    path = synthesize(config, "train")
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes({"half": b"".join(lines[:4]), "torn": whole[:-9], "nothing": b""}[left])
    with pytest.raises(DraftsmithError, match=r"not those that were finished(.|\n)*mend: draftsmith synthesize"):
        finished_conversations(config, "train")
    assert synthesize(config, "train").read_bytes() == whole
    assert len(finished_conversations(config, "train")) == 8


def test_answers_that_fall_out_lie_beside_and_can_be_put_back(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = synthesize(make_config(), "train")
    whole, aside = path.read_bytes(), dropped_file(make_config(), "train")
    assert not aside.exists()
    synthesize(make_config(prompts__train_limit=3), "train")
    assert "5 conversations that were there fall out" in " ".join(capsys.readouterr().err.split())
    synthesize(make_config(prompts__train_limit=2), "train")
    assert len(path.read_bytes().splitlines()) == 2 and len(aside.read_bytes().splitlines()) == 6
    both = path.read_bytes() + aside.read_bytes()
    assert sorted(both.splitlines()) == sorted(whole.splitlines())
    path.write_bytes(both)
    monkeypatch.setattr("draftsmith.data.answering.load_target", lambda *_: pytest.fail("asked again"))
    assert synthesize(make_config(), "train").read_bytes() == whole
    assert not aside.exists()


def test_cut_answers_lie_beside_and_a_run_that_would_drop_all_touches_nothing(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    path = synthesize(make_config(synthesize__max_new_tokens=2, prompts__train_limit=3), "train")
    files = {file: file.read_bytes() for file in path.parent.iterdir()}
    assert all("length" in one.finish for one in read_conversations(path)), "the case must hold cut turns alone"
    changes = {"synthesize__max_new_tokens": 2, "synthesize__cut": "drop"}
    with pytest.raises(DraftsmithError, match="leaves none"):
        synthesize(make_config(prompts__train_limit=3, **changes), "train")
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == files
    config = make_config(name="some")
    some = synthesize(config, "train").read_bytes()
    left = synthesize(make_config(name="some", synthesize__cut="drop"), "train").read_bytes()
    beside = dropped_file(config, "train").read_bytes()
    assert left and beside and sorted((left + beside).splitlines()) == sorted(some.splitlines())


def test_more_prompts_are_added_to_what_is_there(make_config: Callable[..., RunConfig]) -> None:
    few = list(read_conversations(synthesize(make_config(prompts__train_limit=3), "train")))
    assert planned_conversations(make_config()) == (8, 11, None)
    many = list(read_conversations(synthesize(make_config(), "train")))
    assert [one for one in many if one.id in {one.id for one in few}] == few
    tokens = sum(len(one.input_ids) for one in many)
    assert planned_conversations(make_config()) == (8, 11, tokens)


def test_other_settings_prompts_or_targets_are_refused(
    make_config: Callable[..., RunConfig], tiny: Path, tmp_path: Path
) -> None:
    path = synthesize(make_config(), "train")
    before = path.read_bytes()
    with pytest.raises(DraftsmithError, match="another max_new_tokens"):
        synthesize(make_config(synthesize__max_new_tokens=25), "train")
    with pytest.raises(DraftsmithError, match="another dtype"):
        synthesize(make_config(target__dtype="bfloat16"), "train")
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    settings = json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 1e-6}
    (other / "config.json").write_text(json.dumps(settings))
    tuned = make_tiny_target(tmp_path / "tuned", seed=1)  # the same in all but its weights' values
    for another in (other, tuned):
        with pytest.raises(DraftsmithError, match="another target"):
            synthesize(make_config(target__path=str(another)), "train")
        with pytest.raises(DraftsmithError, match="another target"):
            finished_conversations(make_config(target__path=str(another)), "train")
    config = make_config()
    prompts = Path(config.prompts.train)
    prompts.write_text(prompts.read_text().replace("hello", "goodbye"))
    with pytest.raises(DraftsmithError, match="p4 was asked something else"):
        synthesize(config, "train")
    assert path.read_bytes() == before


def test_too_long_prompts_are_rejected_and_counted(
    make_config: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(synthesize__max_prompt_tokens=29)
    conversations = list(read_conversations(synthesize(config, "train")))
    assert "p5" not in {one.id for one in conversations}
    longest = max(start for one in conversations for start, _ in one.spans)
    assert longest <= 29
    # p3 has three turns; its later prompts grow past the limit, and the turns before stay
    assert len(next(one for one in conversations if one.id == "p3").spans) < 3
    assert "1 longer than 29 tokens" in capsys.readouterr().err
    with pytest.raises(DraftsmithError, match="no prompt is usable"):
        synthesize(make_config(name="none", synthesize__max_prompt_tokens=3), "train")
    assert not make_config(name="none").folder.exists()


def test_a_missing_target_names_the_command_and_nothing_is_written(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(target__path="/nonexistent/target")
    with pytest.raises(DraftsmithError, match="make_smollm2"):
        synthesize(config, "train")
    assert not config.folder.exists()


def test_heldout_is_answered_and_harvested_in_its_own_dtype(make_config: Callable[..., RunConfig]) -> None:
    changes = {"prompts__heldout_limit": 2, "target__dtype": "bfloat16", "synthesize__max_new_tokens": 2}
    for name, dtype, expected in (("a", "float32", "float32"), ("b", "target", "bfloat16")):
        config = make_config(name=name, synthesize__heldout_dtype=dtype, **changes)
        synthesize(config, "heldout")
        assert json.loads(summary_file(config, "heldout").read_text())["settings"]["dtype"] == expected
        assert read_manifest(harvest(config, "heldout")).computed_in == expected


def test_workers_write_the_same_bytes(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    alone = synthesize(make_config(), "train").read_bytes()
    together = make_config(name="together", synthesize__workers=2)
    assert synthesize(together, "train").read_bytes() == alone


def test_a_summary_that_says_nothing_is_refused_in_words(make_config: Callable[..., RunConfig]) -> None:
    config = make_config()
    summary_file(config, "train").parent.mkdir(parents=True)
    summary_file(config, "train").write_text("{}")
    config.conversations("train").write_text("")
    assert planned_conversations(config)[2] is None
    with pytest.raises(DraftsmithError, match="unfinished"):
        finished_conversations(config, "train")
    with pytest.raises(DraftsmithError, match=r"made with another(.|\n)*mend: (.|\n)*rm "):
        synthesize(config, "train")
