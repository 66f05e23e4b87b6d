"""Pictures and one self-contained page of what was evaluated and served, from the same JSON that the card reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.accept.compare import difference_text
from draftsmith.accept.overlap import trained_text
from draftsmith.configs.page import Page
from draftsmith.configs.picture import picture

SERVED, EVERYWHERE, REJECTION, TARGET_ONLY = "#1f5fa8", "#8a8f98", "#c2571a", "#3a8f4d"
GRID = {"alpha": 0.3}
MOST_BARS = 16


def write_evaluation(content: Mapping[str, Any], file: Path) -> tuple[Path, Path]:
    """Draw `evaluate.json`'s content beside it and write the page.

    Args:
        file: the JSON file; the picture and the page get its name with .png and .html.
    """
    png, html = file.with_suffix(".png"), file.with_suffix(".html")
    draw_evaluation(content, png)
    page = Page("Predicted acceptance", f"{content['drafter']} on {content['store']}")
    add_evaluation(page, content, png).write(html)
    return png, html


def draw_evaluation(content: Mapping[str, Any], file: Path) -> None:
    """Accept length by depth, acceptance by position, and accept length by context and category."""
    with picture(file, columns=3, size=(17, 5.2)) as (left, middle, right):
        _draw_depths(left, content)
        _draw_positions(middle, content)
        _draw_parts(right, content)


def add_evaluation(page: Page, content: Mapping[str, Any], png: Path) -> Page:
    """The section of an evaluation."""
    served, steps = content["as_served"], content["draft_steps"]
    page.section("Predicted by replay, greedy")
    page.text(
        f"accept_length@{steps} {served['accept_length']:.3f}{_between(served['interval'])} over {served['chains']:,} verify steps "
        f"of {content['conversations']} held-out conversations, bonus token included. As served: the walk that an engine takes; "
        "a chain starts behind the last accepted token. Intervals are 95 %, by bootstrap over conversations."
    )
    if content.get("trained_on"):
        page.text(f"Warning: {trained_text(content['trained_on'])}.")
    page.picture(png, "accept length by depth; acceptance by position; accept length by context and prompt category")
    rows = []
    for depth, entry in content["depths"].items():
        row = [
            depth,
            f"{entry['accept_length']:.3f}",
            interval_text(entry["interval"]),
            f"{entry['accept_per_position'][-1]:.3f}",
        ]
        for one in content["sampled"]:
            row += [f"{one[rule]['accept_length'][int(depth) - 1]:.3f}" for rule in ("rejection", "target_only")]
        rows.append(row)
    columns = ["drafts (K)", "accept_length@K, as served", "95 % interval", "all K right"]
    for one in content["sampled"]:
        columns += [f"rejection sampling at T {one['temperature']:g}", f"target only at T {one['temperature']:g}"]
    page.table(columns, rows)
    if any(one["text"] != "sampled" for one in content["sampled"]):
        page.text("Sampled columns: over all positions of greedy text, whose tokens are taken for typical ones.")
    parts = {f"context {name}": value for name, value in content["by_context"].items()}
    parts |= dict(sorted(content["by_category"].items(), key=lambda item: -item[1]["accept_length"]))
    page.table(
        ["part", "verify steps", "conversations", f"accept_length@{steps}", "95 % interval"],
        [
            [name, f"{v['chains']:,}", v["conversations"], f"{v['accept_length']:.3f}", interval_text(v["interval"])]
            for name, v in parts.items()
        ],
    )
    return page.text(
        f"{content['tokens']:,} tokens replayed in {content['seconds']:.1f} s ({content['tokens_per_second']:,.0f} tokens/s); labels "
        f"outside the draft vocabulary: {content['outside_share']:.1%}."
    )


def write_served(content: Mapping[str, Any], file: Path, evaluation: Mapping[str, Any] | None) -> tuple[Path, Path]:
    """Draw a serve-check beside its JSON file and write the page, with the evaluation of the same drafter if there is one."""
    png, html = file.with_suffix(".png"), file.with_suffix(".html")
    draw_served(content, png)
    page = Page(f"Served by {content['engine']} {content['version']}", content["drafter"])
    page.section("Predicted and served").text(("good: " if content["good"] else "BAD: ") + content["verdict"])
    for warning in content["warnings"]:
        page.text(f"Warning: {warning}.")
    for cause in content["causes"]:
        page.text(f"likely cause: {cause}")
    if content.get("trained_on"):
        page.text(f"Warning: {trained_text(content['trained_on'])}.")
    one = content["comparison"]
    within = one["within"] or {}
    rows = [
        [
            f"accept_length@{one['steps']}", f"{one['predicted']['accept_length']:.3f}", f"{one['served']['accept_length']:.3f}",
            f"{within['accept_length']:.3f}" if within else "-", f"{one['length_difference']:+.2%}",
        ]
    ]  # fmt: skip
    for i, difference in enumerate(one["position_differences"]):
        rows.append(
            [
                f"accept_{i}", f"{one['predicted']['accept_per_position'][i]:.3f}", f"{one['served']['accept_per_position'][i]:.3f}",
                f"{within['accept_per_position'][i]:.3f}" if within else "-", difference_text(difference),
            ]
        )  # fmt: skip
    page.table(["bonus token included", "predicted", "served", "served, within answers", "difference"], rows)
    page.picture(png, "predicted and served acceptance by position; tokens a second with and without the drafter")
    if within:
        page.text(
            f"{one['exact']} of {content['requests']} requests have exactly the predicted histogram, {one['inexact']} have not, "
            f"{one['other_text']} gave another text than was harvested. Engines also count drafts that the last step accepts "
            "beyond the end of an answer; 'within answers' leaves them out."
        )
    page.text(f"{one['served']['verify_steps']:,} verify steps. {_speed(content)}")
    if evaluation is not None:
        picture_file = html.with_suffix(".evaluation.png")
        draw_evaluation(evaluation, picture_file)
        add_evaluation(page, evaluation, picture_file)
        picture_file.unlink()
    page.write(html)
    return png, html


def draw_served(content: Mapping[str, Any], file: Path) -> None:
    """Predicted and served bars by position, and the speeds."""
    one, speed = content["comparison"], content["tokens_per_second"]
    kinds = [("predicted", one["predicted"], EVERYWHERE), ("served", one["served"], SERVED)]
    with picture(file, columns=2, size=(12, 4.6)) as (left, right):
        positions = range(len(one["position_differences"]))
        for offset, (label, values, colour) in zip((-0.2, 0.2), kinds, strict=True):
            places = [i + offset for i in positions]
            bars = left.bar(
                places,
                values["accept_per_position"],
                0.38,
                color=colour,
                label=f"{label}: accept length {values['accept_length']:.3f}",
            )
            left.bar_label(bars, fmt="%.3f", fontsize="small", padding=2)
        left.set_xticks(list(positions), [f"accept_{i}" for i in positions])
        left.margins(y=0.15)
        left.set_ylabel("share of verify steps")
        left.set_title(f"{content['engine']} {content['version']}, greedy: the first i+1 drafts are right")
        left.legend()
        named = [(f"{name} the drafter", value) for name, value in speed.items() if value]
        bars = right.bar(
            [name for name, _ in named], [value for _, value in named], 0.5, color=[SERVED, EVERYWHERE][: len(named)]
        )
        right.bar_label(bars, fmt="%.1f", padding=2)
        right.margins(y=0.15)
        right.set_ylabel("tokens/s, all requests together")
        right.set_title("speed on this machine")
        for axis in (left, right):
            axis.grid(axis="y", **GRID)
            axis.set_axisbelow(True)


def _draw_depths(axis: Any, content: Mapping[str, Any]) -> None:
    for key, label, colour in (
        ("depths", "greedy, as served", SERVED),
        ("depths_all_positions", "greedy, all positions", EVERYWHERE),
    ):
        depths = sorted(map(int, content[key]))
        entries = [content[key][str(depth)] for depth in depths]
        axis.plot(depths, [entry["accept_length"] for entry in entries], marker="o", color=colour, label=label)
        if key == "depths" and entries[0]["interval"]:
            axis.fill_between(
                depths, [e["interval"][0] for e in entries], [e["interval"][1] for e in entries], color=colour, alpha=0.15,
                label="95 % interval",
            )  # fmt: skip
    for one in content["sampled"][:1]:
        for rule, colour in (("rejection", REJECTION), ("target_only", TARGET_ONLY)):
            lengths = one[rule]["accept_length"]
            label = f"{'rejection sampling' if rule == 'rejection' else 'target only'}, T {one['temperature']:g}, all positions"
            axis.plot(range(1, len(lengths) + 1), lengths, linestyle="--", marker=".", color=colour, label=label)
    axis.set_xlabel("drafts a chain (K)")
    axis.set_ylabel("tokens a target forward")
    axis.set_title("accept_length@K, bonus token included")
    axis.grid(**GRID)
    axis.legend(fontsize="small")


def _draw_positions(axis: Any, content: Mapping[str, Any]) -> None:
    deepest = content["depths"][str(max(map(int, content["depths"])))]
    shares, spans = deepest["accept_per_position"], deepest["position_intervals"]
    places = range(len(shares))
    errors = None
    if spans:
        errors = [[max(0.0, s - low) for s, (low, _) in zip(shares, spans, strict=True)],
                  [max(0.0, high - s) for s, (_, high) in zip(shares, spans, strict=True)]]  # fmt: skip
    axis.bar(places, shares, 0.6, yerr=errors, color=SERVED, capsize=3, label="first i+1 drafts right, as served")
    alone = content["acc_deep"]
    for place, share in zip(places, shares, strict=True):
        high = spans[place][1] if spans else share
        axis.annotate(
            f"{share:.3f}",
            (place, (share + high) / 2),
            textcoords="offset points",
            xytext=(5, 2),
            ha="left",
            fontsize="small",
        )
    axis.plot(range(len(alone)), alone, "o", color=REJECTION, label="this draft right behind right ones")
    axis.set_xticks(list(places))
    axis.set_xlabel("draft position i")
    axis.set_title(f"accept_i at K = {len(shares)}")
    axis.margins(y=0.12)
    axis.grid(axis="y", **GRID)
    axis.set_axisbelow(True)
    axis.legend(fontsize="small")


def _draw_parts(axis: Any, content: Mapping[str, Any]) -> None:
    contexts = [(f"context {name}", value, EVERYWHERE) for name, value in content["by_context"].items()]
    ranked = sorted(content["by_category"].items(), key=lambda item: -item[1]["chains"])
    names = [(name, value, SERVED) for name, value in ranked[: MOST_BARS - len(contexts)]]
    names.sort(key=lambda item: -item[1]["accept_length"])
    rows = [*contexts, *names]
    for place, (_, value, colour) in enumerate(rows):
        length, span = value["accept_length"], value["interval"]
        error = [[max(0.0, length - span[0])], [max(0.0, span[1] - length)]] if span else None
        axis.barh(place, length - 1, 0.65, left=1, xerr=error, color=colour, capsize=2, error_kw={"elinewidth": 1})
        axis.annotate(
            f"{length:.2f}",
            (1, place),
            textcoords="offset points",
            xytext=(4, 0),
            va="center",
            fontsize="small",
            color="white",
        )
    axis.set_yticks(range(len(rows)), [f"{name} ({value['chains']:,})" for name, value, _ in rows], fontsize="small")
    axis.invert_yaxis()
    axis.set_xlim(left=1)
    axis.set_xlabel("tokens a target forward, as served")
    axis.set_title(f"accept_length@{content['draft_steps']} by context and category (verify steps)")
    axis.grid(axis="x", **GRID)
    axis.set_axisbelow(True)


def _speed(content: Mapping[str, Any]) -> str:
    with_, without = content["tokens_per_second"]["with"], content["tokens_per_second"]["without"]
    if not without:
        return f"{with_:.1f} tokens/s with the drafter."
    length = content["comparison"]["served"]["accept_length"]
    return (
        f"{with_:.1f} tokens/s with the drafter, {without:.1f} without: {with_ / without:.2f}x on this machine, where a drafter of this "
        f"depth pays from an accept length of about {length * without / with_:.2f}."
    )


def _between(interval: list[float] | None) -> str:
    return f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else ""


def interval_text(interval: Sequence[float] | None) -> str:
    """A 95 % interval as tables show it."""
    return f"{interval[0]:.3f} - {interval[1]:.3f}" if interval else "one conversation"
