"""How many conversations, turns and tokens a run has or will have, for its plan; reads no weights and imports no torch."""

from __future__ import annotations

from draftsmith.configs.files import read_json
from draftsmith.configs.schema import RunConfig
from draftsmith.data.prompt_sets import select_prompts
from draftsmith.data.synthesize import digest_of, summary_file


def planned_conversations(config: RunConfig) -> tuple[int, int, int | None]:
    """Training conversations, their assistant turns, and their tokens (None until they are synthesised).

    Raises:
        DraftsmithError: prompts that cannot be read.
    """
    digest, count, turns = digest_of(select_prompts(config, "train"))
    file = summary_file(config, "train")
    if file.is_file():
        summary = read_json(file, what="the summary of the conversations")
        if summary.get("complete") and summary.get("prompts") == digest:
            return summary["conversations"], summary["turns"], summary["tokens"]
    return count, turns, None
