"""What all rooms' tests share: the real small target, made when it is missing."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
TOGETHER = {
    "test_probe_smollm2.py": "probe", "test_storage_zero.py": "zero", "test_storage_dcp.py": "dcp",
    "test_serving.py": "workbench", "test_load_audit.py": "workbench", "test_serve_check.py": "serve-check",
    "test_forms.py": "forms", "test_harvest_engine.py": "harvest", "test_converted.py": "converted",
    "test_synthesis_server.py": "server", "test_standin_ops.py": "operators",
}  # fmt: skip
"""Files whose tests share a costly fixture: under `--dist loadgroup` one process runs all of a group."""

LONGEST = (
    "test_a_wrong_rope_base", "test_probe_smollm2.py", "test_a_killed_export_to_s3", "test_a_two_process_run_killed",
    "test_serve_check.py", "test_serving.py", "test_load_audit.py", "test_harvest_engine.py", "test_forms.py",
)  # fmt: skip
"""What begins first, so that no process is left alone with it at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring what takes the longest to the front."""
    items.sort(key=lambda item: next((n for n, part in enumerate(LONGEST) if part in item.nodeid), len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `--dist loadgroup` the groups of `TOGETHER`, in the order of `LONGEST`; every other test is on its own.

    xdist's own groups write into node ids, which pytest 9.2 does not let them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = TOGETHER.get(Path(nodeid.partition("::")[0]).name, nodeid)
            return "probe-long" if "_rope_base" in nodeid else group

    if config.getoption("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False
    return Grouped(config, log)


@pytest.fixture(scope="session")
def target_folder() -> Path:
    """SmolLM2-135M-Instruct: $DRAFTSMITH_TARGET, or .cache/smollm2-135m, made by the first process that misses it."""
    folder = Path(os.environ.get("DRAFTSMITH_TARGET", REPOSITORY / ".cache" / "smollm2-135m"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").is_file():
            maker = REPOSITORY / "scripts" / "make_smollm2.py"
            subprocess.run([sys.executable, str(maker), str(folder)], check=True)
    return folder
