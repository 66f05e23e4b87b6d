"""An engine's process that is wrong on purpose, or right: it speaks as scripts/engines/harvest_common.py says.

    faulty_engine.py FAULT ANSWERS.safetensors JOB.json

Right answers come from a file, `LENGTH.states` and `LENGTH.next` for the sequence of that length; the fault spoils them.
NumPy only, so that it starts at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def main() -> None:
    fault, answers, job = sys.argv[1], load_file(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    Path(job["log"]).write_text("the engine's own last words\n")
    if fault == "dies at once":
        sys.exit(1)
    if fault == "cannot start":
        print(json.dumps({"error": "ValueError: no room for the weights"}), flush=True)
        sys.exit(1)
    print(json.dumps({"ready": json.dumps(job["layers"])}), flush=True)
    folder = Path(job["folder"])
    folder.mkdir()
    for line in sys.stdin:
        if fault == "dies at work":
            sys.exit(1)
        files, chosen = [], []
        for row in json.loads(line):
            states = answers[f"{len(row)}.states"]
            if fault == "layers short":
                states = states[:, 1:]
            if fault == "rows short":  # what a prefix cache or a piece would leave
                states = states[1:]
            if fault == "shifted":
                states = np.roll(states, 1, axis=0)
            ids = [*row[:-1], row[-1] + 1] if fault == "other tokens" else row
            file = folder / f"{len(row)}.safetensors"
            save_file({"hidden_states": np.ascontiguousarray(states), "token_ids": np.array(ids)}, file)
            files.append(str(file))
            chosen.append(int(answers[f"{len(row)}.next"][0]))
        print(json.dumps({"files": files, "next": chosen}), flush=True)


if __name__ == "__main__":
    main()
