"""Write more prompts from draftsmith's topics and task templates; none that is kept for held-out evaluation.

python scripts/make_prompts.py COUNT OUT.jsonl [--seed N] [--heldout]

--heldout draws from the (task, topic) pairs that are kept apart, for evaluation.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from draftsmith.configs.console import closing, run_script
from draftsmith.configs.files import atomic_file
from draftsmith.data.prompt_maker import draw_prompts, make_prompts


def main() -> None:
    """Draw the prompts and write them as `prompts.train` or `prompts.heldout` reads them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heldout", action="store_true")
    options = parser.parse_args()
    if options.heldout:
        prompts = draw_prompts(options.count, options.seed, reserved=True, taken=set())
    else:
        prompts = make_prompts(options.count, options.seed)
    with atomic_file(options.out) as temporary:
        temporary.write_text("".join(prompt.model_dump_json() + "\n" for prompt in prompts), encoding="utf-8")
    key = "prompts.heldout" if options.heldout else "prompts.train"
    closing(f"{len(prompts):,} prompts in {options.out}", f"draftsmith synthesize CONFIG {key}={options.out}")


if __name__ == "__main__":
    run_script(main, __doc__, 2)
