"""Metrics to TensorBoard or wandb beside metrics.jsonl; wandb stays offline where no key is configured."""

from __future__ import annotations

import os
import uuid
from typing import Any

from draftsmith.configs.files import read_json, write_json
from draftsmith.configs.schema import RunConfig


class Tracker:
    """One logger for the run, on the first process only.

    Lists and mappings become one scalar an entry: `acc_i/0`, `acc_i/1`, ..., `heldout_by_context/0-1024`.

    Args:
        first: finished steps; what was logged after them, before the run was killed, is logged again.
    """

    def __init__(self, config: RunConfig, *, first: int, enabled: bool) -> None:
        self._writer: Any = None
        self._wandb: Any = None
        if not enabled or config.train.log_with == "none":
            return
        config.training.mkdir(parents=True, exist_ok=True)
        if config.train.log_with == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(config.training / "tensorboard"), purge_step=first + 1 if first else None)
        else:
            import wandb

            online = bool(os.environ.get("WANDB_API_KEY"))
            self._wandb = wandb.init(
                project="draftsmith",
                name=config.name,
                id=wandb_id(config),
                resume="allow",
                dir=str(config.training),
                config=config.model_dump(mode="json"),
                mode=os.environ.get("WANDB_MODE", "online" if online else "offline"),  # type: ignore[arg-type]
            )

    def log(self, row: dict[str, Any], step: int) -> None:
        """Record every number of `row` at `step`."""
        scalars = dict(_scalars(row))
        if self._writer is not None:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    def close(self) -> None:
        """Flush and end."""
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()


def wandb_id(config: RunConfig) -> str:
    """The wandb run id of this run's folder, made once and kept in it: two runs of one name never share a curve."""
    file = config.training / "wandb.json"
    if file.is_file():
        known = read_json(file, what="the run's wandb id", mend=f"rm {file}").get("id")
        if isinstance(known, str):
            return known
    made = f"{config.name}-{uuid.uuid4().hex[:8]}"
    write_json(file, {"id": made})
    return made


def _scalars(row: dict[str, Any]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, list):
            found += [(f"{name}/{index}", float(item)) for index, item in enumerate(value)]
        elif isinstance(value, dict):
            found += [(f"{name}/{key}", float(item)) for key, item in value.items()]
        elif name != "step" and value is not None:
            found.append((name, float(value)))
    return found
