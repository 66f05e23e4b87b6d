"""Set the accept length that evaluation predicted beside the one that the engine served; write result.json.

python scripts/demo_report.py runs/demo runs/demo/serve-VERSION.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from draftsmith.configs.console import out, run_script, table
from draftsmith.configs.files import read_json, write_json


def main() -> None:
    """Print the table and where everything lies."""
    run, served_file = Path(sys.argv[1]), Path(sys.argv[2])
    replayed = run / f"evaluate-{served_file.stem.removeprefix('serve-')}.json"
    predicted = read_json(
        replayed, what="the served version's evaluation", mend="draftsmith evaluate CONFIG --drafter DIR"
    )["as_served"]
    result = read_json(served_file, what="the served result")
    served = result["spec"]
    seconds = {
        verb: int(count) for verb, count in (line.split() for line in (run / "seconds.txt").read_text().splitlines())
    }
    if (run / "result.json").is_file():  # a second run has little left to do; the time a verb really took stays
        earlier = read_json(run / "result.json", what="the earlier result")["seconds"]
        seconds = {verb: max(seconds.get(verb, 0), earlier.get(verb, 0)) for verb in {**earlier, **seconds}}
    summary = {
        "accept_length@3": {"predicted": predicted["accept_length"], "served": served["accept_length"]},
        "per_position": {"predicted": predicted["accept_per_position"], "served": served["accept_per_position"]},
        "engine": f"{result['engine']} {result['version']}",
        "identical_output": result["identical"],
        "tokens_per_second": {"with": served["tokens_per_second"], "without": result["base"]["tokens_per_second"]},
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
    same = "identical token by token" if result["identical"] else f"DIFFERENT: {result['first_divergence'][:3]}"
    places = [
        ("output with and without the drafter", same),
        ("drafter, as engines load it", run / "drafter"),
        ("exported versions", run / "export"),
        ("training curves", run / "train" / "report.png"),
        ("these figures", run / "result.json"),
    ]
    for label, value in places:
        out.print(f"  {label}: {value}", highlight=False)
    out.print(f"  seconds: {', '.join(f'{verb} {count}' for verb, count in seconds.items())}", highlight=False)


if __name__ == "__main__":
    run_script(main, __doc__, 2)
