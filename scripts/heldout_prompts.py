"""Write the held-out prompts of a run as serve_sglang.py and serve_vllm.py read them: one request an assistant turn.

python scripts/heldout_prompts.py CONFIG OUT.json [key=value ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from draftsmith.accept.requests import heldout_requests, prompts_document
from draftsmith.configs.console import console, run_script
from draftsmith.configs.files import write_json
from draftsmith.configs.schema import load_config


def main() -> None:
    """Read the conversations, keep what stood before each answer, and write the requests."""
    config, out = load_config(sys.argv[1], sys.argv[3:]), Path(sys.argv[2])
    requests = heldout_requests(config)
    write_json(out, prompts_document(config, requests))
    console.print(f"{len(requests)} requests in {out}", highlight=False)


if __name__ == "__main__":
    run_script(main, __doc__, 2)
