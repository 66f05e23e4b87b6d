"""What sglang_load_audit.py and vllm_load_audit.py share: command line, checks of the draft vocabulary, report file."""

import argparse
import json
from pathlib import Path
from typing import Any

import serve_common
import torch
from safetensors.torch import load_file


def argument_parser(engine: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"What {engine}'s own classes make of EAGLE-3 drafter checkpoints.")
    parser.add_argument("--target", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--drafter", type=Path, required=True, nargs="+", help="folders of drafters")
    parser.add_argument("--out", type=Path, required=True, help='{"reports": [one per drafter]}')
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    for folder in (options.target, *options.drafter):
        if not (folder / "config.json").is_file():
            serve_common.fail(f"{folder}: no config.json there; expected a model folder")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return options


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


def finish(version: str, reports: list[dict[str, Any]], out: Path) -> int:
    """Print one line per drafter, write the report file; returns the exit code, 1 when any drafter has a fault."""
    for report in reports:
        print(f"{report['drafter']}: {'; '.join(report['faults']) or 'no faults'}")
    serve_common.write_atomically(out, json.dumps({"version": version, "reports": reports}, indent=1) + "\n")
    return int(any(report["faults"] for report in reports))
