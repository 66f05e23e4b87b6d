"""Promises of the prompt sets and their maker."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.prompt_maker import is_reserved, load_tasks, make_prompts
from draftsmith.data.prompt_rows import Prompt, normalise
from draftsmith.data.prompt_sets import load_prompts, openings, overlaps, select_prompts


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_builtin_sets_are_large_and_varied() -> None:
    train, heldout = load_prompts("builtin:train"), load_prompts("builtin:heldout")
    assert len(train) >= 600 and len(heldout) >= 96
    for prompts in (train, heldout):
        categories = Counter(prompt.category for prompt in prompts)
        assert {"chat", "code", "maths", "multi-turn", "extraction", "german", "chinese"} <= categories.keys()
        assert max(categories.values()) < len(prompts) / 5
    assert {len(prompt.turns) for prompt in train} == {1, 2, 3}


def test_no_heldout_question_occurs_in_training() -> None:
    train, heldout = load_prompts("builtin:train"), load_prompts("builtin:heldout")
    asked = {key for prompt in train for key in prompt.key}
    assert not [prompt.id for prompt in heldout if prompt.key[0] in asked]
    held = openings(heldout)
    assert not [prompt.id for prompt in train if overlaps(prompt, held)]


def test_no_task_and_topic_pair_stands_in_both_sets() -> None:
    reserved = {}
    for task in load_tasks():
        for topic in task.topics:
            for wording in range(task.wordings()):
                reserved[tuple(map(normalise, task.fill(topic, wording)))] = is_reserved(task, topic)
    assert not [p.id for p in load_prompts("builtin:train") if reserved.get(p.key, False)]
    assert not [p.id for p in load_prompts("builtin:heldout") if not reserved.get(p.key, True)]


def test_made_prompts_are_new_repeatable_and_never_reserved() -> None:
    made = make_prompts(400, seed=5)
    assert made == make_prompts(400, seed=5) != make_prompts(400, seed=6)
    known = {p.key for source in ("builtin:train", "builtin:heldout") for p in load_prompts(source)}
    assert len({prompt.key for prompt in made} - known) == 400
    held = {
        tuple(map(normalise, task.fill(topic, wording)))
        for task in load_tasks()
        for topic in task.topics
        if is_reserved(task, topic)
        for wording in range(task.wordings())
    }
    assert held.isdisjoint(prompt.key for prompt in made)


def test_asking_for_too_many_made_prompts_says_how_many_there_are() -> None:
    with pytest.raises(DraftsmithError, match="at most"):
        make_prompts(10**6)


def test_three_forms_of_row_are_read(tmp_path: Path) -> None:
    source = write(
        tmp_path / "p.jsonl",
        [
            {"id": "a", "category": "x", "turns": ["one", "two"], "system": "be brief"},
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "ho"},
                    {"role": "user", "content": "bye"},
                ]
            },
            {"prompt": "plain"},
        ],
    )
    assert load_prompts(source) == [
        Prompt(id="a", category="x", turns=("one", "two"), system="be brief"),
        Prompt(id="p-000002", category="general", turns=("hi", "bye"), system="s"),
        Prompt(id="p-000003", category="general", turns=("plain",)),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{not json", "not JSON"),
        ("[1]", "not an object"),
        ({"question": "x"}, "without turns, messages, conversations or prompt"),
        ({"messages": []}, "without a user turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "that begins with the assistant"),
        ({"messages": [{"role": "gpt", "content": "x"}]}, "with role gpt"),
        ({"messages": [{"role": "user", "content": None}]}, "with content that is no text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "with content that is no text"),
        ({"prompt": "  "}, "with an empty user turn"),
        ({"turns": "x"}, "without a user turn"),
        ({"prompt": "good"}, "repeated question"),
    ],
)
def test_a_bad_row_is_skipped_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: object, reason: str
) -> None:
    prompts = load_prompts(write(tmp_path / "p.jsonl", [{"prompt": "Good!"}, row, {"prompt": "better"}]))
    assert [prompt.turns[0] for prompt in prompts] == ["Good!", "better"]
    assert f"1 of 3 rows of {tmp_path / 'p.jsonl'} skipped: 1 {reason}" in capsys.readouterr().err.replace("\n", "")


def test_a_file_without_a_usable_row_stops(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="no usable prompt"):
        load_prompts(write(tmp_path / "p.jsonl", ["{"]))
    with pytest.raises(DraftsmithError, match="do not exist"):
        load_prompts(str(tmp_path / "absent.jsonl"))


def test_a_limit_keeps_the_mix_of_the_file(tmp_path: Path) -> None:
    rows: list[object] = [
        {"id": f"{c}{n}", "category": c, "prompt": f"{c} {n}"}
        for c, count in (("a", 8), ("b", 4))
        for n in range(count)
    ]
    source = write(tmp_path / "p.jsonl", rows)
    assert [prompt.id for prompt in load_prompts(source, 6)] == ["a0", "a2", "a4", "a6", "b0", "b2"]
    assert [prompt.id for prompt in load_prompts(source, 1)] == ["a0"]
    assert len(load_prompts(source, 99)) == 12


def test_overlap_is_found_whatever_case_and_punctuation() -> None:
    train = [
        Prompt(id="1", turns=("What's  UP?",)),
        Prompt(id="2", turns=("x", "ＷＨＡＴ s up")),
        Prompt(id="3", turns=("new",)),
    ]
    held = openings([Prompt(id="h", turns=("what s up",))])
    assert [prompt.id for prompt in train if overlaps(prompt, held)] == ["1", "2"]


@pytest.mark.parametrize(
    ("first", "second", "answers", "split", "fault"),
    [
        ({"id": "x", "prompt": "a"}, {"id": "x~2", "prompt": "b"}, 3, "train", True),
        ({"id": "x~3", "prompt": "a"}, {"id": "x", "prompt": "b"}, 3, "train", True),
        ({"id": "x~4", "prompt": "a"}, {"id": "x", "prompt": "b"}, 3, "train", False),
        ({"id": "x~2", "prompt": "a"}, {"id": "x", "prompt": "b"}, 1, "train", False),
        ({"id": "x~02", "prompt": "a"}, {"id": "x", "prompt": "b"}, 3, "train", False),
        ({"id": "x~2", "prompt": "a"}, {"id": "x~3", "prompt": "b"}, 3, "train", False),
        ({"id": "q", "turns": ["a", "b"]}, {"id": "q#2", "prompt": "c"}, 1, "train", True),
        ({"id": "q", "turns": ["a", "b"]}, {"id": "q#3", "prompt": "c"}, 1, "train", False),
        ({"id": "q", "prompt": "a"}, {"id": "q#2", "prompt": "c"}, 1, "train", False),
        ({"id": "q", "turns": ["a", "b"]}, {"id": "q#2", "prompt": "c"}, 2, "heldout", True),
        ({"id": "q", "prompt": "a"}, {"id": "q~2", "prompt": "c"}, 2, "heldout", False),
        ({"id": "q", "turns": ["a", "b"]}, {"id": "q~2#2", "prompt": "c"}, 2, "train", True),
        ({"id": "q~2", "turns": ["a", "b"]}, {"id": "q~2#2", "prompt": "c"}, 1, "train", True),
    ],
)
def test_an_id_that_another_rows_further_answer_or_part_gets_is_refused_before_work(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], answers: int, split: Any, fault: bool
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (first, second)))
    config = RunConfig.model_validate(
        {
            "name": "n", "target": {"path": "t"}, "prompts": {"train": str(file), "heldout": str(file)},
            "synthesize": {"answers": answers, "temperature": 1.0},
        }
    )  # fmt: skip
    if split == "train":
        config = config.model_copy(update={"prompts": config.prompts.model_copy(update={"heldout": "builtin:heldout"})})
    if not fault:
        assert len(list(select_prompts(config, split))) == (2 * answers if split == "train" else 2)
        return
    with pytest.raises(DraftsmithError, match=r"same id(.|\n)*row [12] (.|\n)*row [12],"):
        list(select_prompts(config, split))
