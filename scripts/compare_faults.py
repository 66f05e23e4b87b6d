"""What two silent faults cost: taps one layer off when serving, and the upstream mask when training.

    python scripts/compare_faults.py CONFIG [key=value ...]

CONFIG names a finished run. Its drafter is replayed with the taps it was trained on and with taps one layer later; a
second drafter is trained on the same store with `train.mask=upstream`. Prints a table and writes faults.json beside
the run's other results. Works in runs/NAME-later-taps and runs/NAME-upstream-mask; a second call goes on from there.
Differences are paired: the same conversations are drawn for both drafters in every bootstrap sample.
"""

from __future__ import annotations

import shutil
import sys

import numpy as np

from draftsmith.accept.evaluate import drafter_chains
from draftsmith.configs.console import out, run_script, table
from draftsmith.configs.files import write_json
from draftsmith.configs.schema import RunConfig, load_config
from draftsmith.configs.target import read_target
from draftsmith.convert.read import read_drafter
from draftsmith.data.harvest import harvest
from draftsmith.data.store import HarvestReader
from draftsmith.train.evaluate import Chains, walk
from draftsmith.train.trainer import train

MEASURES = {
    "accept_length, as served": lambda c: (1 + c.accepted[walk(c)]).tolist(),
    "accept_length, all positions": lambda c: (1 + c.accepted).tolist(),
    "first chain of a turn": lambda c: (1 + c.accepted[first_chains(c)]).tolist(),
}
"""Name -> tokens gained by each chain that counts."""


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
    reference = replayed(right, right)
    faults = {"taps one layer later": replayed(right, later), "upstream mask": replayed(upstream, right)}
    rows = []
    for measure, gained in MEASURES.items():
        base = {number: gained(chains) for number, chains in reference.items()}
        rows.append([measure, "as it should be", f"{mean(base):.3f}", "", ""])
        for name, chains in faults.items():
            other = {number: gained(chains[number]) for number in base}
            low, high = paired_interval(base, other)
            rows.append(
                [measure, name, f"{mean(other):.3f}", f"{mean(other) - mean(base):+.3f}", f"{low:+.3f} to {high:+.3f}"]
            )
    columns = ["measure", "drafter", "tokens a chain", "difference", "95 % interval"]
    write_json(right.folder / "faults.json", {"conversations": len(reference), "columns": columns, "rows": rows})
    out.print(table(f"{right.name}: {len(reference)} held-out conversations", columns, rows))


def variant(source: str, overrides: list[str], right: RunConfig, suffix: str, change: str) -> RunConfig:
    """A run of another name over the same conversations and draft vocabulary."""
    config = load_config(source, [*overrides, f"name={right.name}-{suffix}", change])
    if not config.folder.exists():
        config.folder.mkdir(parents=True)
        shutil.copytree(right.folder / "conversations", config.folder / "conversations")
        shutil.copy(right.vocab_file, config.vocab_file)
    return config


def replayed(drafter: RunConfig, states: RunConfig) -> dict[int, Chains]:
    """The drafter of one run on the held-out states of another, whatever taps those are."""
    target = read_target(drafter.target.path)
    return drafter_chains(
        read_drafter(drafter.training, target), target, HarvestReader(states.store("heldout")), drafter
    )


def first_chains(chains: Chains) -> np.ndarray:
    """Places in `chains.starts` where a turn begins: the upstream mask never trains them."""
    return np.flatnonzero(np.diff(chains.starts, prepend=-2) != 1)


def mean(gained: dict[int, list[int]]) -> float:
    """Mean over all chains of all conversations."""
    return float(np.mean(np.concatenate([np.array(values) for values in gained.values()])))


def paired_interval(
    base: dict[int, list[int]], other: dict[int, list[int]], resamples: int = 4000
) -> tuple[float, float]:
    """95 % bootstrap interval of mean(other) - mean(base), drawn over conversations."""
    sums = np.array([[sum(base[n]), len(base[n]), sum(other[n]), len(other[n])] for n in base], dtype=float)
    drawn = sums[np.random.default_rng(0).integers(0, len(sums), (resamples, len(sums)))].sum(1)
    low, high = np.quantile(drawn[:, 2] / drawn[:, 3] - drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    run_script(main, __doc__, 1)
