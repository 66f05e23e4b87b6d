"""More prompts from hand-written tasks and topics (prompts/templates.yaml), the same ones for the same seed.

A fixed tenth of all (task, topic) pairs is reserved for held-out prompts: `make_prompts` never uses them.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import cache
from math import prod

import yaml

from draftsmith.configs.errors import DraftsmithError
from draftsmith.data.prompt_files import BUILTIN, FOLDER
from draftsmith.data.prompt_rows import Prompt
from draftsmith.data.prompt_sets import load_prompts

TEMPLATES = FOLDER / "templates.yaml"
RESERVED_SHARE = 10
"""One pair in this many belongs to held-out."""


@dataclass(frozen=True)
class Task:
    """A template: wordings for each user turn, and the topics that fit it."""

    name: str
    category: str
    turns: tuple[tuple[str, ...], ...]
    topics: tuple[str, ...]
    endings: tuple[str, ...] = ("",)
    system: str | None = None

    def wordings(self) -> int:
        """Different conversations that one topic gives."""
        return prod(map(len, self.turns)) * len(self.endings)

    def fill(self, topic: str, wording: int) -> tuple[str, ...]:
        """The user turns for `topic`, `wording` being 0 .. wordings() - 1."""
        turns = []
        for choices in self.turns:
            wording, choice = divmod(wording, len(choices))
            turns.append(_capitalise(choices[choice].replace("{topic}", topic)))
        turns[-1] = f"{turns[-1]} {self.endings[wording]}".rstrip()
        return tuple(turns)


@cache
def load_tasks() -> tuple[Task, ...]:
    """The tasks of templates.yaml, in its order."""
    content = yaml.safe_load(TEMPLATES.read_text(encoding="utf-8"))
    return tuple(
        Task(
            name=name,
            category=task["category"],
            turns=tuple(tuple(wordings) for wordings in task["turns"]),
            topics=tuple(content["topics"][task["topics"]]),
            endings=tuple(content["endings"][task["endings"]]) if "endings" in task else ("",),
            system=task.get("system"),
        )
        for name, task in content["tasks"].items()
    )


def is_reserved(task: Task, topic: str) -> bool:
    """Whether the pair belongs to held-out; decided by a hash of its two names, so that new topics move nothing."""
    digest = hashlib.sha256(f"{task.name}\n{topic}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % RESERVED_SHARE == 0


def make_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """`count` different prompts that stand in neither built-in set, tasks taking turns; ids `made-SEED-000001` and on.

    Raises:
        DraftsmithError: `count` exceeds what tasks, topics and wordings give.
    """
    taken = {prompt.key for source in BUILTIN for prompt in load_prompts(source)}
    return draw_prompts(count, seed, reserved=False, taken=taken)


def draw_prompts(count: int, seed: int, *, reserved: bool, taken: set[tuple[str, ...]]) -> list[Prompt]:
    """`count` prompts from the reserved or the free pairs, none with a key in `taken`."""
    shuffler = random.Random(seed)
    piles = []
    for task in load_tasks():
        pairs = [topic for topic in task.topics if is_reserved(task, topic) == reserved]
        pile = [(task, topic, wording) for wording in range(task.wordings()) for topic in pairs]
        shuffler.shuffle(pile)
        piles.append(pile)
    made: list[Prompt] = []
    seen = set(taken)
    while len(made) < count and any(piles):
        for pile in piles:
            while pile and len(made) < count:
                task, topic, wording = pile.pop()
                prompt = Prompt(
                    id=f"made-{seed}-{len(made) + 1:06d}",
                    category=task.category,
                    turns=task.fill(topic, wording),
                    system=task.system,
                )
                if prompt.key not in seen:
                    seen.add(prompt.key)
                    made.append(prompt)
                    break
    if len(made) < count:
        raise DraftsmithError(
            "the templates do not give so many different prompts",
            where=TEMPLATES,
            found=f"{count:,} asked for",
            expected=f"at most {len(made):,}",
            mend="add topics or tasks, or ask for fewer",
        )
    return made


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]
