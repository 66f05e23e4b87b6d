"""Fixtures of the tests that drive real engines: a target, a drafter that knows some conversations, served results.

Each engine is started twice in a session (with the drafter, and without); every test reads the same results.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `import copycat` here and in the tests

REPOSITORY = Path(__file__).parents[2]
STEPS = 3
QUESTIONS = {
    # "hash" ends by max_new_tokens and "hello" by its stop token, both with accepted drafts beyond the end;
    # "robot" is learnt with mistakes, "times" is not learnt at all, "france" ends with the prefill's token.
    "hash": ("Explain what a hash table is.", 46),
    "hello": ("Say hello.", 48),
    "robot": ("Write a short story about a robot who learns to paint.", 40),
    "times": ("What is 12 times 7? Explain step by step.", 24),
    "france": ("What is the capital of France?", 1),
}


def run_script(name: str, *arguments: object, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """Run scripts/<name>; the caller looks at the exit code."""
    command = [str(REPOSITORY / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="session")
def script() -> Callable[..., subprocess.CompletedProcess[str]]:
    return run_script


@dataclass(frozen=True)
class Workbench:
    """The target, the fitted drafter and the conversations it was fitted to."""

    target: Any
    drafter: Any
    conversations: dict[str, Any]
    folder: Path
    prompts: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "drafter"

    @property
    def stop_token(self) -> int:
        return self.target.config.eos_token_id

    def expected(self, name: str) -> list[int]:
        """The tokens an engine must return: transformers' greedy ones, up to the stop token or max_new_tokens."""
        tokens = self.conversations[name].continuation[: QUESTIONS[name][1]]
        return tokens[: tokens.index(self.stop_token) + 1] if self.stop_token in tokens else tokens


@pytest.fixture(scope="session")
def workbench(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    import copycat
    import torch

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("engines")
    target = copycat.Target(target_folder)
    prompts = {name: target.prompt(question) for name, (question, _) in QUESTIONS.items()}
    longest = max(new_tokens for _, new_tokens in QUESTIONS.values())
    conversations = target.continue_greedily(prompts, longest + STEPS + 1)
    learnt = [c for c in conversations if c.id not in {"times", "france"}]
    drafter = copycat.fit(target, learnt, mistaught={"robot"}, draft_vocab=512, steps=STEPS)
    drafter.save(folder / "drafter")
    document = {
        "prompts": [
            {"id": name, "input_ids": prompts[name], "max_new_tokens": new} for name, (_, new) in QUESTIONS.items()
        ],
        "stop_token_ids": [target.config.eos_token_id],
    }
    (folder / "prompts.json").write_text(json.dumps(document))
    return Workbench(target, drafter, {c.id: c for c in conversations}, folder, folder / "prompts.json")


def _serve(engine: str, workbench: Workbench, target_folder: Path) -> dict[str, Any]:
    out = workbench.folder / f"{engine}.json"
    done = run_script(
        f"serve_{engine}.sh",
        *("--target", target_folder, "--drafter", workbench.checkpoint, "--prompts", workbench.prompts),
        *("--out", out, "--steps", STEPS, "--compare"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="session")
def sglang_result(workbench: Workbench, target_folder: Path) -> dict[str, Any]:
    return _serve("sglang", workbench, target_folder)


@pytest.fixture(scope="session")
def vllm_result(workbench: Workbench, target_folder: Path) -> dict[str, Any]:
    return _serve("vllm", workbench, target_folder)
