"""Write more prompts from draftsmith's topics and task templates; none that is kept for held-out evaluation.

python scripts/make_prompts.py COUNT OUT.jsonl [SEED]
"""

from __future__ import annotations

import sys
from pathlib import Path

from draftsmith.configs.console import closing, run_script
from draftsmith.configs.files import atomic_file
from draftsmith.data.prompt_maker import make_prompts


def main() -> None:
    """Draw the prompts and write them as `prompts.train` reads them."""
    count, out, seed = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    prompts = make_prompts(count, seed)
    with atomic_file(out) as temporary:
        temporary.write_text("".join(prompt.model_dump_json() + "\n" for prompt in prompts), encoding="utf-8")
    closing(f"{len(prompts):,} prompts in {out}", f"draftsmith synthesize CONFIG prompts.train={out}")


if __name__ == "__main__":
    run_script(main, __doc__, 2)
