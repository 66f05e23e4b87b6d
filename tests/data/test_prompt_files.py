"""Promises of prompt sources: every form gives the same prompts, bad rows are named, memory stays flat."""

from __future__ import annotations

import datetime
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.configs.errors import DraftsmithError
from draftsmith.data.prompt_rows import BadRowError, Prompt, normalise, read_row
from draftsmith.data.prompt_sets import load_prompts, stream_prompts
from draftsmith.data.rejects import Rejects

MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
    [
        {"role": "user", "content": "é\u2028ü"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "bye"},
    ],
]
EXPECTED = [(("hi",), "s"), (("é\u2028ü", "bye"), None)]


def said(prompts: list[Prompt]) -> list[Any]:
    return [(prompt.questions, prompt.system) for prompt in prompts]


def sources(folder: Path) -> dict[str, str]:
    """The same two conversations in every form of file."""
    import pyarrow
    from datasets import Dataset, DatasetDict
    from pyarrow import parquet

    rows = [{"messages": messages} for messages in MESSAGES]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [
        {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in messages]}
        for messages in MESSAGES
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (folder / "b.json").write_text(json.dumps(rows, indent=2))
    (folder / "c.json").write_text("".join(json.dumps(row) + "\n" for row in shared))
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "d.parquet")
    table = Dataset.from_list(rows)
    table.save_to_disk(str(folder / "e"))
    DatasetDict({"train": table.select([0]), "test": table}).save_to_disk(str(folder / "f"))
    (folder / "g").mkdir()
    (folder / "g" / "train.jsonl").write_text((folder / "a.jsonl").read_text())
    return {
        "jsonl": str(folder / "a.jsonl"), "json": str(folder / "b.json"), "ShareGPT in jsonl named json": str(folder / "c.json"),
        "parquet": str(folder / "d.parquet"), "saved dataset": str(folder / "e"),
        "split of a saved dataset": f"hf:{folder / 'f'}:test", "folder of files": str(folder / "g"),
        "load_dataset of a local folder": f"hf:{folder / 'g'}:train",
    }  # fmt: skip


def test_every_form_of_source_gives_the_same_prompts(tmp_path: Path) -> None:
    for form, source in sources(tmp_path).items():
        assert said(load_prompts(source)) == EXPECTED, form


def test_a_dataset_that_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sources(tmp_path)
    with pytest.raises(DraftsmithError, match="dataset cannot be read"):
        load_prompts(f"hf:{tmp_path / 'f'}:absent")


@pytest.mark.parametrize(
    ("row", "questions"),
    [
        ({"prompt": "q", "response": "a"}, ("q",)),
        ({"prompt": [{"role": "user", "content": "q"}], "completion": "a"}, ("q",)),
        ({"conversations": [{"role": "user", "content": "q"}]}, ("q",)),
        ({"messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": "q", "name": None}]}, ("q",)),
        ({"prompt": "q", "messages": None, "turns": None, "id": None, "category": None, "tools": "[]"}, ("q",)),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}]}, ("q",)),
    ],
)  # fmt: skip
def test_rows_of_many_forms(row: dict[str, Any], questions: tuple[str, ...]) -> None:
    assert read_row(row, "x").questions == questions


def test_reasoning_of_a_kept_tool_call_stays_and_a_call_without_result_goes() -> None:
    call = {"role": "assistant", "content": "", "reasoning_content": "think", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]}  # fmt: skip
    user, tool = {"role": "user", "content": "q"}, {"role": "tool", "content": "r", "tool_call_id": "1"}
    kept = read_row({"messages": [user, call, tool]}, "x").asked(0)
    assert [message["role"] for message in kept] == ["user", "assistant", "tool"]
    assert kept[1]["reasoning_content"] == "think" and kept[2]["tool_call_id"] == "1"
    assert read_row({"messages": [user, call]}, "x").turns == ("q",)
    again = Prompt.model_validate_json(read_row({"messages": [user, call, tool]}, "x").model_dump_json())
    assert again == read_row({"messages": [user, call, tool]}, "x")
    share = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": null}}'},
        {"from": "observation", "value": "r"},
    ]
    assert read_row({"conversations": share}, "x").asked(0)[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "without a user turn"),
        ([{"role": "system", "content": "s"}], "without a user turn"),
        ([{"role": "assistant", "content": "a"}], "begins with the assistant"),
        ([{"role": "gpt", "content": "a"}], "role gpt"),
        ([{"role": "user"}], "no text"),
        ([{"role": "user", "content": [{"type": "text", "text": "q"}]}], "no text"),
        ([{"role": "user", "content": "q"}, {"role": "tool", "content": "r"}], "no call asked for"),
        ([{"role": "user", "content": "\ud800"}], "no valid Unicode"),
        ("text", "malformed messages"),
    ],
)
def test_a_bad_row_says_why(messages: Any, reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        read_row({"messages": messages}, "x")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "id": "\ud800"}, "no valid Unicode"),
        ({"prompt": "q", "tools": [{"name": "f", "since": datetime.date(2026, 1, 1)}]}, "JSON does not know"),
        ({"prompt": "q", "tools": [{"name": b"f"}]}, "JSON does not know"),
        ({"prompt": "q", "tools": [functools.reduce(lambda inner, _: {"a": inner}, range(2000), {})]}, "JSON does not know|deeply"),
        ({"turns": [[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]]}, "system message inside a turn"),
    ],
)  # fmt: skip
def test_a_row_that_no_file_should_hold_is_a_bad_row(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        read_row(row, "x")


def test_a_line_that_is_nested_too_deeply_is_one_bad_row(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": ' + "[" * 100_000 + "]" * 100_000 + '}\n{"prompt": "b"}\n')
    assert [entry.prompt.turns for entry in stream_prompts(str(file), Rejects(str(file)))] == [("a",), ("b",)]
    array = tmp_path / "p.json"
    array.write_text('[{"prompt": "a"}, ' + "[" * 100_000 + "]" * 100_000 + "]")
    with pytest.raises(DraftsmithError, match="row 2 of the JSON array is nested too deeply"):
        load_prompts(str(array))


def test_what_stands_behind_a_json_array_is_not_dropped(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('[{"prompt": "a"}]\n[{"prompt": "b"}]\n')
    with pytest.raises(DraftsmithError, match="stands behind the JSON array of 1 rows"):
        load_prompts(str(file))


def test_a_table_gives_no_call_the_arguments_of_another(tmp_path: Path) -> None:
    """Arrow gives every struct the fields of all of them, and null where there was none."""
    import pyarrow as pa
    from pyarrow import parquet

    def row(name: str, arguments: dict[str, str]) -> dict[str, Any]:
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        }
        return {"messages": [{"role": "user", "content": name}, call, {"role": "tool", "content": "r"}]}

    parquet.write_table(
        pa.Table.from_pylist([row("f", {"city": "Bern"}), row("g", {"day": "2"})]), tmp_path / "p.parquet"
    )
    calls = [prompt.asked(0)[1]["tool_calls"][0]["function"] for prompt in load_prompts(str(tmp_path / "p.parquet"))]
    assert calls == [{"name": "f", "arguments": {"city": "Bern"}}, {"name": "g", "arguments": {"day": "2"}}]


def test_questions_that_differ_in_a_sign_or_a_vowel_mark_are_different() -> None:
    texts = [
        "What is 7+3?",
        "What is 7-3?",
        "What is 7*3?",
        "What is 7/3?",
        "What is 7.3?",
        "C++",
        "C#",
        "C",
        "ปี",
        "ปู",
        "कि",
        "की",
    ]
    assert len({normalise(text) for text in texts}) == len(texts)
    assert normalise("Well -- hello, World!") == normalise("  well hello world ")


def test_a_json_array_that_breaks_off_stops_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('[{"prompt": "a"}, {"prompt": "b"')
    with pytest.raises(DraftsmithError, match="after 1 rows"):
        load_prompts(str(file))


def test_strict_stops_at_the_first_bad_row_and_not_at_a_repeated_one(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "A"}\n\n{"prompt": 1}\n')
    with pytest.raises(DraftsmithError, match=r"line 4(.|\n)*no text"):
        list(stream_prompts(str(file), Rejects(str(file), strict=True)))


GROWTH = """
import resource, sys
from draftsmith.data.prompt_sets import stream_prompts
from draftsmith.data.rejects import Rejects
import pyarrow.parquet
count, marks = 0, []
for entry in stream_prompts(sys.argv[1], Rejects(sys.argv[1])):
    count += 1
    if count in (2_000, 100_000):
        marks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(count, (marks[1] - marks[0]) / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
def test_a_hundred_thousand_rows_stream_through_little_memory(tmp_path: Path, form: str) -> None:
    """100 MB of text; what grows is two hashes a row."""
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / f"big.{form}"
    rows = ({"prompt": f"{n} " + "lorem ipsum " * 80} for n in range(100_000))
    if form == "parquet":
        schema = pyarrow.schema([("prompt", pyarrow.string())])
        with parquet.ParquetWriter(file, schema) as writer:
            for _ in range(100):
                writer.write_table(pyarrow.Table.from_pylist([next(rows) for _ in range(1000)], schema))
    else:
        with file.open("w") as handle:
            for n, row in enumerate(rows):
                handle.write(
                    ("[" if form == "json" and not n else "," if form == "json" else "") + json.dumps(row) + "\n"
                )
            handle.write("]" if form == "json" else "")
    done = subprocess.run([sys.executable, "-c", GROWTH, str(file)], capture_output=True, text=True, check=True)
    count, megabytes = done.stdout.split()
    assert count == "100000" and float(megabytes) < 40, f"{megabytes} MB more at row 100,000 than at row 2,000"
