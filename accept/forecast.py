"""What a drafter gains, or loses, before it is deployed: tokens a second from acceptance and the costs of three calls.

A round of speculation drafts k tokens, one call of the drafter after another, and verifies k+1 positions with one call
of the target:

    tokens a second at depth k = accept_length@k / (k * draft + verify(k + 1))
    speed-up at depth k        = accept_length@k * decode / (k * draft + verify(k + 1))

with accept_length@k = 1 + accept_0 + ... + accept_{k-1}. Costs depend on the batch size, so a table of costs has one row
a batch size. Whatever else a server does in a round counts to `verify`. A running server tells whole rounds only: k draft
steps and the verify together, at the depth that it runs with; then the round stands in place of both.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.configs.console import warn
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import read_json
from draftsmith.configs.picture import picture

MOST_STEPS = 8
WORTH = 1.05
"""A speed-up below this is lost in the noise of a server."""
NOISE = 0.05
"""A larger call that costs less by no more than this share was measured badly; by more, it was not that call."""
MOST_TICKS = 16
"""Depths that are written below a picture; of more, every second, third and so on."""

EXAMPLE = '{"1": {"decode_ms": 12, "draft_ms": 1, "verify_ms": {"2": 22, "4": 30}}}'


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one call each, at one batch size.

    Attributes:
        decode: one token of the target without speculation.
        draft: one draft step.
        verify: positions verified -> the target's call; between two the line through them counts, outside the nearest two.
        rounds: drafted tokens -> the whole round as a server was measured; if there are any, they count alone.
    """

    batch: int
    decode: float
    draft: float
    verify: Mapping[int, float]
    rounds: Mapping[int, float] = field(default_factory=dict)

    def verifying(self, positions: int) -> float:
        """The target's call over `positions` positions."""
        return self.verify[next(iter(self.verify))] if len(self.verify) == 1 else _on_the_line(self.verify, positions)

    def round(self, steps: int) -> float | None:
        """Drafting and verifying `steps` tokens; None if it was not measured and does not follow from what was."""
        if not self.rounds:
            return steps * self.draft + self.verifying(steps + 1)
        if len(self.rounds) == 1:
            return self.rounds.get(steps)
        return _on_the_line(self.rounds, steps)


def _on_the_line(known: Mapping[int, float], at: int) -> float:
    """The line through the two known sizes around `at`, or the nearest two; more never costs less outside all of them."""
    sizes = sorted(known)
    above = next((index for index, size in enumerate(sizes) if size >= at), len(sizes) - 1)
    first, second = sizes[max(0, above - 1)], sizes[max(1, above)]
    slope = (known[second] - known[first]) / (second - first)
    if slope < 0 and not sizes[0] <= at <= sizes[-1]:
        return known[sizes[0] if at < sizes[0] else sizes[-1]]
    return max(1e-9, known[first] + slope * (at - first))


@dataclass(frozen=True)
class Depth:
    """The forecast for k drafted tokens a chain.

    Attributes:
        accept_length: tokens a round, bonus token included.
        extrapolated: whether acceptance beyond the measured positions was needed.
        round_ms: drafting and verifying.
        speedup: over decoding without a drafter.
        tokens_per_second: of one request.
        break_even: the accept length at which this depth neither gains nor loses.
    """

    steps: int
    accept_length: float
    extrapolated: bool
    round_ms: float
    speedup: float
    tokens_per_second: float
    break_even: float


@dataclass(frozen=True)
class Forecast:
    """All depths at one batch size, and the one to deploy; None: deploy none."""

    costs: Costs
    depths: tuple[Depth, ...]

    @property
    def best(self) -> Depth | None:
        """The fastest depth if it is worth deploying."""
        fastest = max(self.depths, key=lambda depth: depth.speedup)
        return fastest if fastest.speedup >= WORTH else None

    @property
    def verdict(self) -> str:
        """The plain truth in one sentence."""
        fastest = max(self.depths, key=lambda depth: depth.speedup)
        label = f"batch size {self.costs.batch}"
        if self.best is not None:
            return f"{label}: {fastest.steps} drafted tokens, {fastest.speedup:.2f}x"
        if fastest.speedup >= 1:
            return f"{label}: not worth deploying, {fastest.speedup:.2f}x at the best depth ({fastest.steps})"
        return (
            f"{label}: do not deploy: speculation loses at every depth, {fastest.speedup:.2f}x at the best "
            f"({fastest.steps}); it needs an accept length of {fastest.break_even:.2f} there and has {fastest.accept_length:.2f}"
        )


def forecast(
    accept: Sequence[float], costs: Costs, most: int = MOST_STEPS, lengths: Mapping[int, float] | None = None
) -> Forecast:
    """Forecast depths 1..most.

    Args:
        accept: accept_i of measured chains: P(the first i+1 drafts are all right).
        costs: at one batch size.
        lengths: depth -> accept length that was measured at that depth, which counts in place of the sum of `accept`: the
            walk of an engine differs from depth to depth.

    Raises:
        DraftsmithError: values that are no probabilities, that grow, or costs that are not positive.
    """
    check_accept(accept)
    known, walked = list(accept), lengths or {}
    depths = []
    for steps in range(1, most + 1):
        gained = walked.get(steps) or 1 + sum(_accept_at(known, index) for index in range(steps))
        spent = costs.round(steps)
        if spent is None:
            continue
        depths.append(
            Depth(
                steps, gained, steps > len(known) and steps not in walked, spent, gained * costs.decode / spent, 1000 * gained / spent,
                spent / costs.decode,
            )
        )  # fmt: skip
    if not depths:
        raise DraftsmithError(
            "the only round that was measured is deeper than the forecast", where=f"batch size {costs.batch}",
            found=sorted(costs.rounds), expected=f"a depth within 1..{most}", mend="pass a larger --steps",
        )  # fmt: skip
    return Forecast(costs, tuple(depths))


def _accept_at(accept: Sequence[float], index: int) -> float:
    """accept_i; beyond what was measured every further draft is right as often, given the ones before, as the last was."""
    if index < len(accept):
        return accept[index]
    last = accept[-1]
    before = accept[-2] if len(accept) > 1 else 1.0
    ratio = last / before if before else 0.0
    return last * ratio ** (index - len(accept) + 1)


def check_accept(accept: Sequence[float]) -> None:
    """Stop at what cannot be acceptance."""
    shares = all(type(value) in (int, float) and 0 <= value <= 1 for value in accept)
    if not accept or not shares or any(a < b for a, b in itertools.pairwise(accept)):
        raise DraftsmithError(
            "acceptance must be probabilities that never grow: accept_i is the share of chains whose first i+1 drafts "
            "are all right", where="acceptance", found=list(accept), expected="for instance 0.7,0.45,0.28",
            mend="take accept_per_position of evaluate.json, or the engine's counters divided by its verify steps",
        )  # fmt: skip


def read_accept(text: str) -> tuple[list[float], dict[int, float]]:
    """Acceptance from numbers with commas, or from the JSON file that `draftsmith evaluate` wrote.

    Returns:
        accept_i of the deepest walk that was measured, and depth -> accept length of every walk that was (none with commas).
    """
    lengths: dict[int, float] = {}
    if Path(text).suffix == ".json":
        accept, lengths = _evaluated(
            read_json(Path(text), what="the evaluation", mend="draftsmith evaluate CONFIG"), text
        )
    else:
        try:
            accept = [float(part) for part in text.split(",")]
        except ValueError:
            raise DraftsmithError(
                "acceptance is neither a JSON file nor numbers with commas", where="ACCEPTANCE", found=text,
                expected="evaluate.json, or for instance 0.7,0.45,0.28",
            ) from None  # fmt: skip
    check_accept(accept)
    return accept, lengths


def _evaluated(found: Mapping[str, Any], file: str) -> tuple[list[float], dict[int, float]]:
    """As `read_accept`, of an evaluation's content: its configured depth and `depths`."""
    served, depths = found.get("as_served"), found.get("depths", {})
    if not isinstance(served, dict) or not isinstance(served.get("accept_per_position"), list):
        raise DraftsmithError(
            "the file has no as_served.accept_per_position", where=file, mend="draftsmith evaluate CONFIG"
        )
    deepest, lengths = served["accept_per_position"], {}
    entries = depths.items() if isinstance(depths, dict) else [("depths", depths)]
    for depth, entry in entries:
        try:
            shares, length = entry["accept_per_position"], float(entry["accept_length"])
            if len(shares) != int(depth) or not 1 <= length <= len(shares) + 1:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise DraftsmithError(
                f"depths.{depth} of the evaluation makes no sense", where=file, found=json.dumps(entry)[:200],
                expected="accept_length within 1..depth+1, and accept_per_position of as many shares as the depth",
                mend="draftsmith evaluate CONFIG",
            ) from None  # fmt: skip
        check_accept(shares)
        lengths[int(depth)] = length
        deepest = max(deepest, shares, key=len)
    return deepest, lengths


def read_verify(text: str) -> dict[int, float]:
    """`30` (whatever the depth) or `2:22,4:30` (positions:milliseconds, each number of positions once)."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        if len(pairs) == 1 and len(pairs[0]) == 1:
            return {1: float(pairs[0][0])}
        costs = [(int(size), float(cost)) for size, cost in pairs]
    except ValueError:
        raise DraftsmithError(
            "the cost of verifying is not understood", where="--verify-ms", found=text,
            expected="30, or positions:milliseconds like 2:22,4:30",
        ) from None  # fmt: skip
    if len(dict(costs)) < len(costs):
        raise DraftsmithError(
            "a number of positions has two costs", where="--verify-ms", found=text, expected="each number of positions once",
            mend="keep one of them, or their mean",
        )  # fmt: skip
    return dict(costs)


def read_costs(file: Path) -> list[Costs]:
    """A table of costs by batch size.

    Raises:
        DraftsmithError: the file is missing or has other fields.
    """
    found = read_json(file, what="the table of costs")
    rows = []
    for batch, entry in found.items():
        try:
            if "round_ms" in entry:
                rounds = {int(depth): cost for depth, cost in entry["round_ms"].items()}
                rows.append(make_rounds(int(batch), entry["decode_ms"], rounds))
                continue
            verify = entry["verify_ms"]
            sizes = verify if isinstance(verify, Mapping) else {"1": verify}
            rows.append(
                make_costs(int(batch), entry["decode_ms"], entry["draft_ms"], {int(k): v for k, v in sizes.items()})
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise DraftsmithError(
                "the table of costs is not understood", where=file, found=json.dumps({batch: entry}), expected=EXAMPLE
            ) from None
    if not rows:
        raise DraftsmithError("the table of costs is empty", where=file, expected=EXAMPLE)
    return sorted(rows, key=lambda costs: costs.batch)


def make_costs(batch: int, decode: Any, draft: Any, verify: Mapping[int, Any]) -> Costs:
    """Costs, if every one is a positive number of milliseconds (a draft may cost nothing) and verifying more costs no less."""
    known = _positive(batch, decode, draft, verify)
    if (fall := falling(known)) is not None:
        few, many = fall
        raise DraftsmithError(
            "verifying more positions cannot cost less", where=f"verify costs at batch size {batch}",
            found=f"{few} positions {known[few]:g} ms, {many} positions {known[many]:g} ms",
            expected=f"costs that grow with the positions, or fall by at most {NOISE:.0%} (noise)",
            mend="measure both again, or pass one cost for all depths",
        )  # fmt: skip
    return Costs(batch, float(decode), float(draft), known)


def make_rounds(batch: int, decode: Any, rounds: Mapping[int, Any]) -> Costs:
    """Costs of a server whose rounds were measured whole, by depth; a warning where a deeper round costs less."""
    if not rounds:
        raise DraftsmithError(
            "no round was measured", where=f"batch size {batch}", expected="milliseconds by drafted tokens"
        )
    known = _positive(batch, decode, 0, rounds)
    if (fall := falling(known)) is not None:
        few, many = fall
        warn(
            f"batch size {batch}: a round of {many} drafts took {known[many]:.1f} ms, one of {few} {known[few]:.1f} ms: "
            "measure again, under the same load"
        )
    return Costs(batch, float(decode), 0.0, {}, known)


def falling(known: Mapping[int, float]) -> tuple[int, int] | None:
    """The first two sizes of which the larger costs less, by more than noise."""
    pairs = itertools.combinations(sorted(known), 2)
    return next(((few, many) for few, many in pairs if known[many] < (1 - NOISE) * known[few]), None)


def _positive(batch: int, decode: Any, draft: Any, by_size: Mapping[int, Any]) -> dict[int, float]:
    """`by_size` as numbers; an error if these or the other costs are not milliseconds."""
    numbers = {"decode": decode, "draft": draft, **{f"verify at {size}": cost for size, cost in by_size.items()}}
    for label, value in numbers.items():
        if type(value) not in (int, float) or not 0 <= value < float("inf") or (value == 0 and label != "draft"):
            raise DraftsmithError(
                f"the cost of {label} must be a positive number of milliseconds",
                where=f"batch size {batch}",
                found=value,
            )
    if not by_size or min(by_size) < 1 or batch < 1:
        raise DraftsmithError(
            "positions and batch sizes count from 1", where=f"batch size {batch}", found=dict(by_size)
        )
    return {size: float(cost) for size, cost in by_size.items()}


def draw(forecasts: Sequence[Forecast], file: Path) -> None:
    """Speed-up by depth, one line a batch size (bars where each has one depth), as a PNG that replaces an older one whole."""
    with picture(file, size=(7, 4.2)) as axis:
        paint(axis, forecasts)


def paint(axis: Any, forecasts: Sequence[Forecast]) -> None:
    """The same on matplotlib's axes: whole depths across, and bars from zero."""
    depths = sorted({depth.steps for entry in forecasts for depth in entry.depths})
    single = all(len(entry.depths) == 1 for entry in forecasts)
    width = 0.8 / len(forecasts)
    for number, entry in enumerate(forecasts):
        steps = [depth.steps for depth in entry.depths]
        speedups = [depth.speedup for depth in entry.depths]
        label, aside = f"batch {entry.costs.batch}", 0.0
        if single:
            aside = (number - (len(forecasts) - 1) / 2) * width
            axis.bar([steps[0] + aside], speedups, width * 0.9, label=label)
            color = "black"
        else:
            (line,) = axis.plot(steps, speedups, marker="o", label=label)
            color = line.get_color()
        if entry.best is not None:
            circle = {"markersize": 12, "markerfacecolor": "none", "color": color}
            axis.plot(entry.best.steps + aside, entry.best.speedup, "o", **circle)
    axis.set_xticks(depths[:: -(-len(depths) // MOST_TICKS)])
    if single:
        axis.set_xlim(depths[0] - 1, depths[-1] + 1)
        axis.set_ylim(0, 1.15 * max(1.0, *(depth.speedup for entry in forecasts for depth in entry.depths)))
    axis.axhline(1.0, color="black", linewidth=1)
    across = axis.get_yaxis_transform()
    axis.text(0.995, 1.0, "without a drafter", transform=across, ha="right", va="bottom", fontsize="small")
    axis.set_xlabel("drafted tokens a chain")
    axis.set_ylabel("speed-up")
    axis.set_title("forecast (circle: the depth to deploy)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
