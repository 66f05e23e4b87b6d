"""What a served run says of acceptance. Standard library only: engines' own Pythons import it too.

How the engines count (read in SGLang 0.5.23 and vLLM 0.32.0, and confirmed by tests/engines). A *verify step* is one
target forward over the last token and `steps` drafts; it accepts the longest prefix of the drafts that equals what the
target itself would produce. Both engines agree on everything below.

- The first generated token comes from the prefill and belongs to no verify step. A request that ends with it (a stop
  token, or max_new_tokens 1) has no verify steps at all.
- Every later token belongs to a verify step, the last one included. A step always drafts `steps` tokens, also when
  fewer than that may still be produced, and its accepted drafts are counted *before* the output is cut at a stop token
  or at max_new_tokens: accepted drafts beyond the end count in full (SGLang: batch_result_processor.py
  `_resolve_spec_v2_tokens`; vLLM: scheduler.py `update_from_output`, which trims in `_update_request_with_output`
  afterwards). What the target "would produce" after a stop token is its plain continuation, and the drafter continues
  past it too.
- So with a steps-per-request histogram h (h[i] = verify steps with i accepted drafts), the tokens of a request are at
  most 1 + sum_i h[i] * (i + 1), and fewer by what the last step accepted beyond the end. Drop the last step, or let a
  predictor look past the end, to compare exactly; `per_step` of vLLM's outputs lists every step in order.
- Neither engine drafts fewer tokens near max_new_tokens. Near the context limit vLLM does (read, not run), so both
  serve scripts leave `CONTEXT_SLACK` positions unused unless --context-length says otherwise.

accept_length is 1 + accepted_drafts / verify_steps, from those counters. SGLang's own `spec_accept_length` (completion
tokens / verify steps) counts the prefill's token and cuts the last step, and is not used.
"""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Output:
    """What one request came back with. histogram[i] counts its verify steps with i accepted drafts."""

    id: str
    output_ids: list[int]
    verify_steps: int | None = None
    histogram: list[int] | None = None
    per_step: list[int] | None = None


@dataclass
class Served:
    """What a serve function returns: outputs in the order of the prompts, and the clock."""

    outputs: list[Output]
    start_seconds: float
    seconds: float
    counters: dict[str, Any] = field(default_factory=dict)


def summarise_counters(served: Served, steps: int) -> dict[str, Any]:
    """Totals over requests. accept_per_position[i] = verify steps that accepted more than i drafts / verify steps."""
    histogram = [sum(output.histogram[i] for output in served.outputs) for i in range(steps + 1)]
    verify_steps = sum(histogram)
    accepted = sum(count * i for i, count in enumerate(histogram))
    reported = {"verify_steps": verify_steps, "accepted_drafts": accepted, **served.counters}
    if (reported["verify_steps"], reported["accepted_drafts"]) != (verify_steps, accepted):
        raise RuntimeError(
            f"the engine's counters contradict each other: histograms say {verify_steps} verify steps and {accepted} "
            f"accepted drafts, the totals {reported['verify_steps']} and {reported['accepted_drafts']}"
        )
    divisor = max(verify_steps, 1)
    return {
        "accept_length": 1 + accepted / divisor,
        "accept_per_position": [sum(histogram[i + 1 :]) / divisor for i in range(steps)],
        "verify_steps": verify_steps,
        "accepted_drafts": accepted,
        "histogram": histogram,
    }


def summarise_run(served: Served) -> dict[str, Any]:
    tokens = sum(len(output.output_ids) for output in served.outputs)
    return {
        "tokens": tokens,
        "seconds": round(served.seconds, 3),
        "tokens_per_second": round(tokens / served.seconds, 2),
        "start_seconds": round(served.start_seconds, 2),
        "outputs": [{k: v for k, v in asdict(output).items() if v is not None} for output in served.outputs],
    }


def first_divergences(base: list[Output], spec: list[Output]) -> list[dict[str, Any]]:
    """For every request whose tokens differ: where first, and both tokens there (None past the end of the shorter)."""
    found = []
    for plain, drafted in zip(base, spec, strict=True):
        if plain.output_ids == drafted.output_ids:
            continue
        shared = min(len(plain.output_ids), len(drafted.output_ids))
        index = next((i for i in range(shared) if plain.output_ids[i] != drafted.output_ids[i]), shared)
        tokens = [ids[index] if index < len(ids) else None for ids in (plain.output_ids, drafted.output_ids)]
        found.append({"id": plain.id, "index": index, "base": tokens[0], "spec": tokens[1]})
    return found
