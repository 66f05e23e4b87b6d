"""A stand-in for an engine's Python, as an executable file: real processes that behave as broken engines do."""

from __future__ import annotations

import sys
from pathlib import Path

SOURCE = '''#!{python}
"""Takes the arguments of a serve script and misbehaves."""
import json, os, signal, subprocess, sys, time
out = sys.argv[sys.argv.index("--out") + 1]
base = out[: -len(".json")]
prompts = json.load(open(sys.argv[sys.argv.index("--prompts") + 1]))["prompts"]
def reached(word):
    with open(base + ".progress", "a") as file:
        file.write(word + "\\n")
def stubborn():
    """A worker that ignores polite requests, and one that left the session."""
    if not os.fork():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if not os.fork():
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
def outputs(histogram):
    found = []
    for prompt in prompts:
        found.append({{"id": prompt["id"], "output_ids": [1, 2]}} | ({{"histogram": histogram}} if histogram else {{}}))
    return found
def finish(spec):
    result = {{"engine": "fake", "version": "1", "dtype": "float32", "steps": 3, "spec": spec, "base": {{"tokens_per_second": 1.0}},
              "identical": True, "first_divergence": []}}
    with open(out, "w") as file:
        json.dump(result, file)
stubborn()
{behaviour}
'''

BEHAVIOURS = {
    "never ready": 'reached("starting"); print("loading weights", flush=True); time.sleep(600)',
    "not even starting": 'print("importing", flush=True); time.sleep(600)',
    "dies": 'reached("starting"); reached("ready"); print("CUDA error: out of luck", flush=True); os._exit(7)',
    "killed": 'reached("starting"); print("loading weights", flush=True); os.kill(os.getpid(), signal.SIGKILL)',
    "never done": 'reached("starting"); reached("ready"); time.sleep(600)',
    "no counters": 'reached("ready"); finish({"tokens_per_second": 1.0, "outputs": outputs(None)})',
    "no verify steps": 'reached("ready"); finish({"accept_length": 1.0, "accept_per_position": [0, 0, 0], "verify_steps": 0, '
    '"tokens_per_second": 1.0, "outputs": outputs(None)})',
    "no result": 'reached("ready")',
}


def write(folder: Path, behaviour: str) -> Path:
    """The executable of one behaviour."""
    file = folder / "python"
    file.write_text(SOURCE.format(python=sys.executable, behaviour=BEHAVIOURS[behaviour]))
    file.chmod(0o755)
    return file
