"""Promises of the harvest from an engine, kept against one that is wrong on purpose."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import HarvestSection, RunConfig
from draftsmith.configs.target import read_target
from draftsmith.data.harvest import _check_engine, harvest
from draftsmith.data.ranks import Rank
from draftsmith.data.store import HarvestReader

PARTS = [(list(range(3, 3 + length)), [(1, length)]) for length in (30, 12, 25, 8, 19)]


@pytest.fixture(scope="module")
def answers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a right engine says: what enters layers 2, 4 and 5, what leaves the last one before the norm; the next token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    seen: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_pre_hook(lambda _, arguments: seen.__setitem__("last", arguments[0][0]))
    found = {}
    for ids, _ in PARTS:
        with torch.no_grad():
            output = model(torch.tensor([ids]), output_hidden_states=True)
        states = [output.hidden_states[layer][0] for layer in (2, 4, 5)]
        found[f"{len(ids)}.states"] = torch.stack([*states, seen["last"]], dim=1)
        found[f"{len(ids)}.next"] = output.logits[0, -1:].argmax(-1)
    file = tmp_path_factory.mktemp("answers") / "answers.safetensors"
    save_file(found, file)
    return file


@pytest.fixture
def engine(
    answers: Path, tmp_path: Path, make_config: Callable[..., RunConfig], put_conversations: Callable[..., Any]
) -> Callable[[str], RunConfig]:
    """A run whose engine is the faulty one with this fault."""

    def make(fault: str) -> RunConfig:
        python = tmp_path / "python"
        script = Path(__file__).parent / "faulty_engine.py"
        command = shlex.join([sys.executable, str(script), fault, str(answers)])
        python.write_text(f'#!/bin/sh\nexec {command} "$2"\n')
        python.chmod(0o755)
        config = make_config(harvest__backend="vllm", harvest__engine_python=str(python))
        put_conversations(config, PARTS)
        return config

    return make


def test_an_engine_that_is_right_gives_the_rows_that_the_trunk_gives(
    engine: Callable[[str], RunConfig], make_config: Callable[..., RunConfig], put_conversations: Callable[..., Any]
) -> None:
    served = list(HarvestReader(harvest(engine("none"), "train")))
    config = make_config(name="own")
    put_conversations(config, PARTS)
    for ours, theirs in zip(HarvestReader(harvest(config, "train")), served, strict=True):
        torch.testing.assert_close(theirs.taps.float(), ours.taps.float(), rtol=2**-7, atol=1e-4)
        torch.testing.assert_close(theirs.final.float(), ours.final.float(), rtol=2**-7, atol=1e-4)
        assert torch.equal(theirs.argmax, ours.argmax)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("dies at once", r"has ended(?s:.*)own last words"),
        ("cannot start", "no room for the weights"),
        ("dies at work", "the engine has ended"),
        ("layers short", r"not the rows that were asked for(?s:.*)\(30, 4, 64\)"),
        ("rows short", r"not the rows that were asked for(?s:.*)\(29, 4, 64\)(?s:.*)\(30, 4, 64\)"),
        ("other tokens", "of other tokens"),
        ("shifted", "other tokens than its own states say"),
    ],
)
def test_a_wrong_engine_is_refused_by_name_and_leaves_no_shard(
    engine: Callable[[str], RunConfig], fault: str, words: str
) -> None:
    config = engine(fault)
    with pytest.raises(DraftsmithError, match=words):
        harvest(config, "train")
    assert not list(config.store("train").glob("shard-*"))


def test_sglang_is_not_asked_for_the_embedding_and_is_named_where_it_is_missing(
    make_config: Callable[..., RunConfig], put_conversations: Callable[..., Any], tmp_path: Path
) -> None:
    config = make_config(harvest__backend="sglang", target__taps=[0, 2, 4])
    put_conversations(config, PARTS)
    with pytest.raises(DraftsmithError, match=r"nothing leaves one before layer 0(?s:.*)\[0, 2, 4\]"):
        harvest(config, "train")
    config = make_config(name="other", harvest__backend="sglang", harvest__engine_python=str(tmp_path / "absent"))
    put_conversations(config, PARTS)
    with pytest.raises(DraftsmithError, match=r"no Python with SGLang(?s:.*)setup_engine.sh sglang"):
        harvest(config, "train")


def test_several_processes_or_workers_are_refused(tiny: Path) -> None:
    with pytest.raises(DraftsmithError, match="one process"):
        _check_engine(read_target(tiny), Rank(0, 2, 0, 2))
    with pytest.raises(ValueError, match="workers=1"):
        HarvestSection(backend="vllm", workers=2)


def test_an_sglang_that_cannot_hand_out_layers_is_refused_with_its_version(
    tmp_path: Path, make_config: Callable[..., RunConfig], put_conversations: Callable[..., Any]
) -> None:
    """SGLang 0.5.15 has forward hooks, and no argument that names the layers to capture."""
    package = tmp_path / "old" / "sglang" / "srt"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text('__version__ = "0.5.15"\n')
    (package / "__init__.py").touch()
    (package / "server_args.py").write_text(
        "class ServerArgs:\n    def __init__(self, model_path: str, forward_hooks: list) -> None: ...\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parents[1]} exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    config = make_config(harvest__backend="sglang", harvest__engine_python=str(python))
    put_conversations(config, PARTS)
    with pytest.raises(DraftsmithError, match=r"SGLang 0\.5\.15 cannot hand out layers: it lacks return_aux_hidden"):
        harvest(config, "train")
    assert not list(config.store("train").glob("*.safetensors"))
