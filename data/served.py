"""A target that an engine holds: hidden states come from its process, in files, task by task.

The engine runs under its own Python (scripts/engines/harvest_vllm.py, harvest_sglang.py) and is asked for layers by
number, layer-input indices as ours. Behind them stands what the head gets: of SGLang the final state itself; of vLLM what
leaves the last layer, asked for as the number of layers, and the final norm is applied here. Every sequence comes back
with its token ids and the token that the engine itself chose after it: ids, rows and shapes must be exact, and the head
here must mostly choose that token too.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

import draftsmith
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import HarvestSection
from draftsmith.configs.target import Target
from draftsmith.convert.engine_loader import TITLES, Engine, find_python
from draftsmith.data.codec import Codec
from draftsmith.data.rows import RowSource

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}  # fmt: skip
DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
"""Environment of the engine where the user's own says nothing else."""

START_LIMIT, TASK_LIMIT = 3600.0, 3600.0
"""Seconds for an engine to be ready, and for one batch."""

CALLS = {"vllm": "vllm.LLM", "sglang": "sglang.Engine"}
"""What harvest.engine_options reaches."""

ENOUGH = 4
"""Sequences after which the engine's next tokens tell whether its states and our head belong together."""

PLAIN_NORM_ONLY = ("gemma",)
"""Part of the model types whose final norm is no x / rms(x) * weight."""


class EngineProcess:
    """The engine's process and what goes to and fro.

    Raises:
        DraftsmithError: no Python with the engine, an engine that does not start, fails or gives no answer in time.
    """

    def __init__(self, section: HarvestSection, job: dict[str, Any], scratch: Path) -> None:
        self.name: Engine = "sglang" if section.backend == "sglang" else "vllm"
        python, looked = find_python(self.name, section.engine_python)
        if python is None:
            raise DraftsmithError(
                f"no Python with {TITLES[self.name]} is there", where="harvest.engine_python", found=", ".join(looked),
                mend=f"scripts/setup_engine.sh {self.name}, or name one: harvest.engine_python=/path/to/venv",
            )  # fmt: skip
        engines = Path(draftsmith.__file__).resolve().parent / "engines"
        self._log = scratch / "engine.log"
        file = scratch / "job.json"
        file.write_text(json.dumps({**job, "folder": str(scratch / "states"), "log": str(self._log)}))
        environment = DEFAULTS | dict(os.environ) | ENVIRONMENT | _paths(self.name, engines)
        self._process = subprocess.Popen(
            [str(python), str(engines / f"harvest_{self.name}.py"), str(file)], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            self.version = str(self._answer(START_LIMIT)["ready"])
        except BaseException:
            self.close()
            raise

    def compute(self, rows: list[list[int]]) -> list[tuple[Path, int]]:
        """A file of states for each sequence, and the token that the engine would write after it."""
        try:
            self._stream("stdin").write(json.dumps(rows) + "\n")
            self._stream("stdin").flush()
        except BrokenPipeError:
            raise self._fault("the engine has ended") from None
        answer = self._answer(TASK_LIMIT)
        return [(Path(file), token) for file, token in zip(answer["files"], answer["next"], strict=True)]

    def close(self) -> None:
        """End the engine; its input ends, then it is killed if it stays."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, limit: float) -> dict[str, Any]:
        output = self._stream("stdout")
        ready, _, _ = select.select([output], [], [], limit)
        line = output.readline() if ready else ""
        if not line:
            raise self._fault("the engine has ended" if ready else f"the engine said nothing for {limit:g} seconds")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._fault(f"the engine failed: {answer['error']}")
        return answer

    def _stream(self, name: str) -> TextIO:
        stream: TextIO = getattr(self._process, name)
        return stream

    def _fault(self, problem: str) -> DraftsmithError:
        said = self._log.read_text(errors="replace").strip().splitlines()[-12:] if self._log.is_file() else []
        return DraftsmithError(
            problem, where=f"harvest.backend={self.name}",
            found="\n    ".join(["it last said:", *said]) if said else None,
            mend=f"harvest.engine_options={{...}} reaches {CALLS[self.name]}; harvest.backend=transformers needs no engine",
        )  # fmt: skip


def _paths(engine: str, engines: Path) -> dict[str, str]:
    """The engine's modules of ours; without a GPU SGLang runs on operators of ours too."""
    if engine == "sglang" and not torch.cuda.is_available():
        return {"PYTHONPATH": f"{engines / 'sglang_cpu'}{os.pathsep}{engines}", "SGLANG_USE_CPU_ENGINE": "1"}
    return {"PYTHONPATH": str(engines)}


class ServedTarget(RowSource):
    """States of a target that an engine holds.

    Args:
        target: its files; final norm and head are read from them.
        taps: layer-input indices.
        process: an engine that computes these taps, ascending, and what the head gets or, of vLLM, the final norm.
    """

    def __init__(self, target: Target, taps: Sequence[int], codec: Codec, dtype: str, process: EngineProcess) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        kind = getattr(torch, dtype)
        head = target.require("head").load().to(device, kind)
        super().__init__(codec, lambda states: states @ head.T, device)
        self._norm = target.require("final_norm").load().to(device, kind)
        self._eps, self._hidden, self._kind = target.rms_norm_eps, target.hidden_size, kind
        self._taps, self._process = tuple(taps), process
        self._asked = self._agreed = 0

    def states(self, rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """taps (T, K, H) and final (T, H) on the device, T being the tokens of all rows.

        Raises:
            DraftsmithError: the engine fails; its ids, rows or shapes are others than those asked for; its next tokens
                are not what the head makes of the final states.
        """
        answers = self._process.compute([row.tolist() for row in rows])
        parts = [self._read(file, row) for (file, _), row in zip(answers, rows, strict=True)]
        taps = torch.cat([part[:, :-1] for part in parts]).to(self.device)
        final = torch.cat([part[:, -1] for part in parts]).to(self.device)
        if self._process.name == "vllm":
            final = self._normed(final)
        self._compare(final, np.cumsum([len(row) for row in rows]) - 1, [token for _, token in answers])
        return taps, final

    def _read(self, file: Path, row: np.ndarray) -> Tensor:
        found = load_file(file)
        file.unlink()
        states, wanted = found["hidden_states"], (len(row), len(self._taps) + 1, self._hidden)
        if tuple(states.shape) != wanted or states.dtype != self._kind:
            raise DraftsmithError(
                "the engine's states are not the rows that were asked for", where=file.name,
                found=f"{tuple(states.shape)} {states.dtype}", expected=f"{wanted} {self._kind}",
                mend="harvest.backend=transformers, and report the engine's version",
            )  # fmt: skip
        if not np.array_equal(found["token_ids"].numpy(), row):
            raise DraftsmithError("the engine's states are of other tokens than those that were sent", where=file.name)
        return states

    def _normed(self, residual: Tensor) -> Tensor:
        """x / rms(x) * weight, in float32 as models do it."""
        wide = residual.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self._norm * wide.to(self._kind)

    def _compare(self, final: Tensor, last: np.ndarray, chosen: list[int]) -> None:
        ours = self._argmax(final, last).tolist()
        self._asked += len(ours)
        self._agreed += sum(one == other for one, other in zip(ours, chosen, strict=True))
        if self._asked >= ENOUGH and 2 * self._agreed < self._asked:
            raise DraftsmithError(
                "the engine goes on with other tokens than its own states say under the target's norm and head",
                where=f"harvest.backend={self._process.name}",
                found=f"{self._agreed} of {self._asked} sequences agree",
                expected="nearly all: the target's files are other ones than the engine serves, or its final norm is "
                "of another kind",
                mend="harvest.backend=transformers",
            )


@contextmanager
def served_target(
    section: HarvestSection, target: Target, taps: Sequence[int], codec: Codec, dtype: str, longest: int
) -> Iterator[ServedTarget]:
    """An engine that holds the target while the block runs; `longest` is the most tokens of a sequence.

    Raises:
        DraftsmithError: vLLM, and the target's final norm is of a kind that is not known here; SGLang, and the embedding is
            to be tapped; or the engine does not start.
    """
    if section.backend == "sglang" and 0 in taps:
        raise DraftsmithError(
            "SGLang hands out what leaves a layer, and nothing leaves one before layer 0", where="target.taps",
            found=list(taps), expected="taps from 1 on", mend="harvest.backend=vllm or transformers, or other taps",
        )  # fmt: skip
    if section.backend == "vllm" and any(
        kind in target.model_type or kind in target.architecture.lower() for kind in PLAIN_NORM_ONLY
    ):
        raise DraftsmithError(
            "the final norm of this target is not applied to an engine's states", where="harvest.backend",
            found=target.architecture, mend="harvest.backend=transformers",
        )  # fmt: skip
    layers = [*taps, target.num_layers] if section.backend == "vllm" else list(taps)
    job = {
        "target": str(target.path.resolve()), "dtype": dtype, "layers": layers, "longest": longest,
        "batch_tokens": section.batch_tokens, "options": section.engine_options,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="draftsmith-harvest-") as scratch:
        process = EngineProcess(section, job, Path(scratch))
        try:
            yield ServedTarget(target, taps, codec, dtype, process)
        finally:
            process.close()
