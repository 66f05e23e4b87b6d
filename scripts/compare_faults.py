"""What two silent faults cost: taps one layer off when serving, and the upstream mask when training.

    python scripts/compare_faults.py CONFIG [key=value ...]

CONFIG names a finished run. Its drafter is replayed with the taps it was trained on and with taps one layer later; a
second drafter is trained on the same store with `train.mask=upstream`. Prints a table and writes faults.json beside
the run's other results. Works in runs/NAME-later-taps and runs/NAME-upstream-mask; a second call goes on from there.
"""

from __future__ import annotations

import shutil
import sys

from draftsmith.configs.console import out, table
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import write_json
from draftsmith.configs.schema import RunConfig, load_config
from draftsmith.configs.target import read_target
from draftsmith.convert.evaluate import evaluate_drafter
from draftsmith.convert.read import read_drafter
from draftsmith.data.harvest import harvest
from draftsmith.data.store import HarvestReader
from draftsmith.train.evaluate import Evaluation
from draftsmith.train.trainer import train


def main() -> None:
    """Measure the three drafters on the same held-out conversations."""
    source, overrides = sys.argv[1], sys.argv[2:]
    right = load_config(source, overrides)
    taps = read_drafter(right.training, read_target(right.target.path)).spec.taps
    later = variant(source, overrides, right, "later-taps", f"target.taps={[tap + 1 for tap in taps]}")
    upstream = variant(source, overrides, right, "upstream-mask", "train.mask=upstream")
    harvest(later, "heldout")
    if not upstream.store("train").exists():
        shutil.copytree(right.folder / "harvest", upstream.folder / "harvest")
    train(upstream)
    found = {
        "as it should be": replayed(right, right),
        "taps one layer later": replayed(right, later),
        "upstream mask": replayed(upstream, right),
    }
    write_json(right.folder / "faults.json", {name: value.model_dump(mode="json") for name, value in found.items()})
    columns = [
        "accept length, as served",
        *(f"accept_{i}" for i in range(right.evaluate.draft_steps)),
        "length",
        "95 % interval",
        "acc_0",
    ]
    rows = [
        [
            name,
            *(f"{share:.3f}" for share in value.as_served.accept_per_position),
            f"{value.as_served.accept_length:.3f}",
            f"{value.as_served.interval[0]:.3f} - {value.as_served.interval[1]:.3f}",
            f"{value.acc[0]:.3f}",
        ]
        for name, value in found.items()
    ]
    out.print(table(f"{right.name}: {found['upstream mask'].conversations} held-out conversations", columns, rows))


def variant(source: str, overrides: list[str], right: RunConfig, suffix: str, change: str) -> RunConfig:
    """A run of another name over the same conversations and draft vocabulary."""
    config = load_config(source, [*overrides, f"name={right.name}-{suffix}", change])
    if not config.folder.exists():
        config.folder.mkdir(parents=True)
        shutil.copytree(right.folder / "conversations", config.folder / "conversations")
        shutil.copy(right.vocab_file, config.vocab_file)
    return config


def replayed(drafter: RunConfig, states: RunConfig) -> Evaluation:
    """The drafter of one run on the held-out states of another, whatever taps those are."""
    target = read_target(drafter.target.path)
    reader = HarvestReader(states.store("heldout"))
    return evaluate_drafter(read_drafter(drafter.training, target), target, reader, drafter, None)


if __name__ == "__main__":
    try:
        main()
    except DraftsmithError as error:
        sys.exit(f"error: {error}")
