"""What all rooms' tests share: the real small target, made when it is missing."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests for xdist, and bring those that take the longest to the front."""
    for item in items:
        group = TOGETHER.get(item.path.name)
        if group and item.path.parent.name in ("accept", "convert", "engines"):
            item.add_marker(pytest.mark.xdist_group(f"{group}-long" if "rope_base" in item.name else group))
    items.sort(key=lambda item: next((n for n, part in enumerate(LONGEST) if part in item.nodeid), len(LONGEST)))


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
