"""Write the held-out prompts of a run as serve_sglang.py and serve_vllm.py read them: one request an assistant turn.

python scripts/heldout_prompts.py CONFIG OUT.json [key=value ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from draftsmith.configs.console import console, run_script
from draftsmith.configs.files import write_json
from draftsmith.configs.schema import load_config
from draftsmith.data.conversations import read_conversations
from draftsmith.data.target_model import chat_format


def main() -> None:
    """Read the conversations, keep what stood before each answer, and write the requests."""
    config, out = load_config(sys.argv[1], sys.argv[3:]), Path(sys.argv[2])
    chat = chat_format(config)
    requests = [
        {
            "id": f"{conversation.id}/{turn}",
            "input_ids": list(conversation.input_ids[:start]),
            "max_new_tokens": config.synthesize.max_new_tokens,
        }
        for conversation in read_conversations(config.conversations("heldout"))
        for turn, (start, _) in enumerate(conversation.spans)
    ]
    write_json(out, {"prompts": requests, "stop_token_ids": sorted(chat.stop_ids)})
    console.print(f"{len(requests)} requests in {out}", highlight=False)


if __name__ == "__main__":
    run_script(main, __doc__, 2)
