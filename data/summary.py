"""How many conversations, turns and tokens a run has or will have, for its plan; reads no weights and imports no torch."""

from __future__ import annotations

from draftsmith.configs.files import read_json
from draftsmith.configs.schema import RunConfig
from draftsmith.data.synthesize import prompts_hash, select_prompts, summary_file


def planned_conversations(config: RunConfig) -> tuple[int, int, int | None]:
    """Training conversations, their assistant turns, and their tokens (None until they are synthesised).

    Raises:
        DraftsmithError: prompts that cannot be read.
    """
    prompts, file = select_prompts(config, "train"), summary_file(config, "train")
    if file.is_file():
        summary = read_json(file, what="the summary of the conversations")
        if summary.get("complete") and summary.get("prompts") == prompts_hash(prompts):
            return summary["conversations"], summary["turns"], summary["tokens"]
    return len(prompts), sum(len(prompt.turns) for prompt in prompts), None
