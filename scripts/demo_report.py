"""What the demo found, in one table and result.json: accept length predicted and served, speed, and where all lies.

python scripts/demo_report.py runs/demo
"""

from __future__ import annotations

import sys
from pathlib import Path

from draftsmith.configs.console import out, run_script, table
from draftsmith.configs.files import read_json, write_json


def main() -> None:
    """Print the table and where everything lies."""
    run = Path(sys.argv[1])
    checked = read_json(
        run / "serve-check-sglang.json", what="what was served", mend="draftsmith serve-check sglang demo"
    )
    one = checked["comparison"]
    predicted, served = one["predicted"], one["within"] or one["served"]
    seconds = {
        verb: int(count) for verb, count in (line.split() for line in (run / "seconds.txt").read_text().splitlines())
    }
    if (run / "result.json").is_file():  # a second run has little left to do; the time a verb really took stays
        earlier = read_json(run / "result.json", what="the earlier result")["seconds"]
        seconds = {verb: max(seconds.get(verb, 0), earlier.get(verb, 0)) for verb in {**earlier, **seconds}}
    summary = {
        "accept_length@3": {"predicted": predicted["accept_length"], "served": served["accept_length"]},
        "per_position": {"predicted": predicted["accept_per_position"], "served": served["accept_per_position"]},
        "engine": f"{checked['engine']} {checked['version']}",
        "identical_output": checked["identical"],
        "tokens_per_second": checked["tokens_per_second"],
        "seconds": seconds,
    }
    write_json(run / "result.json", summary)

    pairs = [("accept_length@3", predicted["accept_length"], served["accept_length"])]
    pairs += [
        (f"first {i + 1} drafts right", p, s)
        for i, (p, s) in enumerate(zip(predicted["accept_per_position"], served["accept_per_position"], strict=True))
    ]
    rows = [[name, f"{p:.3f}", f"{s:.3f}", f"{(p - s) / s:+.1%}" if s else "-"] for name, p, s in pairs]
    out.print(
        table(
            f"predicted and served by {summary['engine']}, greedy, bonus token included",
            ["", "predicted", "served", "difference"],
            rows,
        )
    )
    same = "identical token by token" if checked["identical"] else f"DIFFERENT: {checked['first_divergence'][:3]}"
    places = [
        ("output with and without the drafter", same),
        ("drafter, as engines load it", run / "drafter"),
        ("exported versions", run / "export"),
        ("training curves", run / "train" / "report.png"),
        ("the report, to open in a browser", run / "serve-check-sglang.html"),
        ("these figures", run / "result.json"),
    ]
    for label, value in places:
        out.print(f"  {label}: {value}", highlight=False)
    out.print(f"  seconds: {', '.join(f'{verb} {count}' for verb, count in seconds.items())}", highlight=False)


if __name__ == "__main__":
    run_script(main, __doc__, 1)
