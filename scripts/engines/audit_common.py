"""What sglang_load_audit.py and vllm_load_audit.py share: command line, target tensors, inputs of the forward, report.

Runs under an engine's own Python, where draftsmith is not installed.
"""

import argparse
import json
import traceback
from pathlib import Path
from typing import Any

import serve_common
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

LONGEST_REFUSAL = 500  # characters; vLLM answers an unknown architecture with the list of all that it knows
PREFILL, RECURRENT, STRIDE = 24, 3, 16  # tokens with features, tokens drafted after them, positions between the former


def refusal(engine: str, error: Exception) -> str:
    """One line for an engine's exception; its traceback goes to the log."""
    traceback.print_exception(error)
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{engine} refuses it: {said[:LONGEST_REFUSAL]}{' ...' if len(said) > LONGEST_REFUSAL else ''}"


def argument_parser(engine: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"What {engine}'s own classes make of EAGLE-3 drafter checkpoints.")
    parser.add_argument("--target", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--drafter", type=Path, required=True, nargs="+", help="folders of drafters")
    parser.add_argument("--out", type=Path, required=True, help='{"reports": [one per drafter]}')
    parser.add_argument(
        "--forward",
        action="store_true",
        help="run the forward of every drafter that is wholly written, on drawn inputs",
    )
    parser.add_argument("--golden", type=Path, help="safetensors file of features and token_ids for the last drafter")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    for folder in (options.target, *options.drafter):
        if not (folder / "config.json").is_file():
            serve_common.fail(f"{folder}: no config.json there; expected a model folder")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return options


def read_target_tensor(target: Path, suffix: str) -> torch.Tensor | None:
    """The target's tensor whose name is `suffix` or ends with it after a dot; None if it has none."""
    found = {}
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: path for name in file.keys() if f".{name}".endswith(f".{suffix}")}  # noqa: SIM118
    if not found:
        return None
    if len(found) > 1:
        serve_common.fail(f"{target}: several tensors could be its {suffix}: {', '.join(sorted(found))}")
    ((name, path),) = found.items()
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def read_target_embedding(target: Path) -> torch.Tensor:
    """The target's input embedding (V, H), which engines share with the drafter."""
    embedding = read_target_tensor(target, "embed_tokens.weight")
    if embedding is None:
        serve_common.fail(f"{target}: no safetensors file there holds embed_tokens.weight")
    return embedding


def read_target_head(target: Path) -> torch.Tensor:
    """The target's output head (V, H): lm_head.weight, or the embedding where the two are tied."""
    head = read_target_tensor(target, "lm_head.weight")
    return read_target_embedding(target) if head is None else head


def target_id_faults(target_ids: torch.Tensor, vocabulary: int, folder: Path) -> list[str]:
    """What is wrong with the target ids (D,) that an engine derived from d2t: range, order, agreement with t2d."""
    name, faults = "d2t (engines read it as offset: target id = draft id + d2t)", []
    if target_ids.is_floating_point():
        faults.append(f"d2t: dtype {target_ids.dtype}, expected int64")
    if int(target_ids.min()) < 0 or int(target_ids.max()) >= vocabulary:
        faults.append(f"{name}: ids reach {int(target_ids.max())}, the vocabulary has {vocabulary}: absolute ids?")
    if not bool((target_ids[1:] > target_ids[:-1]).all()):
        faults.append(f"{name}: the target ids do not ascend")
    files = map(load_file, sorted(folder.glob("*.safetensors")))
    t2d = next((file["t2d"] for file in files if "t2d" in file), None)
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), target_ids.long()):
        faults.append(f"{name}: disagrees with t2d, which marks other target ids: absolute ids?")
    return faults


def forward_inputs(
    options: argparse.Namespace, folder: Path, columns: int, vocabulary: int, context: int
) -> dict[str, torch.Tensor] | None:
    """What the forward of a drafter is fed with, None if it is not to be run.

    `features` (T, columns), `token_ids` and `positions` (T + later steps,): the file of --golden for the last drafter;
    else random numbers, the same for every engine, at positions far enough apart to tell one RoPE from another.
    """
    if options.golden and folder == options.drafter[-1]:
        given = load_file(options.golden)
        tokens = given["token_ids"].long()
        return {"features": given["features"].float(), "token_ids": tokens, "positions": torch.arange(len(tokens))}
    if not options.forward:
        return None
    generator = torch.Generator().manual_seed(0)
    stride = max(1, min(STRIDE, context // (PREFILL + 1)))
    positions = torch.arange(PREFILL) * stride
    return {
        "features": torch.randn(PREFILL, columns, generator=generator),
        "token_ids": torch.randint(vocabulary, (PREFILL + RECURRENT,), generator=generator),
        "positions": torch.cat((positions, positions[-1] + 1 + torch.arange(RECURRENT))),
    }


class CausalCache:
    """Attention of one request: keys and values kept in order of arrival."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Append key and value (n, kv heads, dim), let query (n, heads, dim) see all up to itself -> (n, heads * dim)."""
        self.keys.append(key)
        self.values.append(value)
        keys, values = torch.cat(self.keys).transpose(0, 1), torch.cat(self.values).transpose(0, 1)
        seen = torch.ones(len(query), keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - len(query))
        mixed = F.scaled_dot_product_attention(query.transpose(0, 1), keys, values, seen, scale=scale, enable_gqa=True)
        return mixed.transpose(0, 1).reshape(len(query), -1)


def run_chain(step, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prefill with features, then feed one token at a time with the previous step's hidden state.

    step(token_ids, hidden, positions, first: bool) -> (logits, next hidden). Returns the inputs and, float32,
    `prefill_logits` (T, D), `prefill_hidden` (T, H), `logits` (steps, D), `hidden` (steps, H): the latter two at the
    chain of the last index, the prefill being step 0.
    """
    fed, count = inputs["features"], len(inputs["features"])
    logits, hidden = [], []
    for first, last in [(0, count)] + [(i, i + 1) for i in range(count, len(inputs["token_ids"]))]:
        said, state = step(inputs["token_ids"][first:last], fed, inputs["positions"][first:last], first == 0)
        logits.append(said.float())
        hidden.append(state.float().clone())
        fed = state[-1:].clone()
    return {
        **{name: tensor.contiguous() for name, tensor in inputs.items()},
        "prefill_logits": logits[0].contiguous(),
        "prefill_hidden": hidden[0].contiguous(),
        "logits": torch.stack([row[-1] for row in logits]),
        "hidden": torch.stack([row[-1] for row in hidden]),
    }


def golden_file(options: argparse.Namespace, folder: Path) -> Path:
    """Where the forward of a drafter is written: beside --out."""
    if options.golden and folder == options.drafter[-1]:
        return options.out.with_suffix(".golden.safetensors")
    return options.out.with_suffix(f".{options.drafter.index(folder)}.golden.safetensors")


def save_golden(options: argparse.Namespace, folder: Path, golden: dict[str, torch.Tensor]) -> str:
    save_file(golden, golden_file(options, folder))
    return str(golden_file(options, folder))


def finish(version: str, reports: list[dict[str, Any]], options: argparse.Namespace) -> int:
    """Print one line per drafter, write the report file; returns the exit code, 1 when any drafter has a fault."""
    last = reports[-1]
    if options.golden and not last.get("golden"):
        serve_common.fail(f"--golden: the forward of {last['drafter']} was not run: {last['faults']}")
    for report in reports:
        print(f"{report['drafter']}: {'; '.join(report['faults']) or 'no faults'}")
    serve_common.write_atomically(options.out, json.dumps({"version": version, "reports": reports}, indent=1) + "\n")
    return int(any(report["faults"] for report in reports))
