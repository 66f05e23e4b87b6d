"""The environment builder is idempotent, redoes what was interrupted, and says in one line what failed.

A fake python3.11 stands in for the real one: it makes an environment whose own python notes what it was asked.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).parents[2] / "scripts" / "setup_engine.sh"
FAKE_PYTHON = """#!/bin/bash
if [[ $1 == --version ]]; then echo Python 3.11.0; exit; fi
mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"
cat > "$3/bin/python" <<'INNER'
#!/bin/bash
echo "$*" >> "$CALLS"
[[ -z $FAIL_ON || "$*" != *"$FAIL_ON"* ]] || { echo "no matching distribution"; exit 1; }
INNER
chmod +x "$3/bin/python"
"""


@pytest.fixture
def setup(tmp_path: Path):
    """Callable: run the script with the fake python; returns (completed process, calls of the environment's python)."""
    fake = tmp_path / "fake" / "python3.11"
    fake.parent.mkdir()
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    calls = tmp_path / "calls"

    def run(*arguments: str, fail_on: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
        calls.write_text("")
        environment = {
            **os.environ,
            "PATH": f"{fake.parent}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "FAIL_ON": fail_on,
            "DRAFTSMITH_VENVS": str(tmp_path / "venvs"),
        }
        done = subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, env=environment)
        return done, calls.read_text().splitlines()

    return run


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_second_call_does_nothing(setup, tmp_path, engine):
    done, calls = setup(engine)
    assert done.returncode == 0, done.stderr
    assert any("torch==2.13.0" in call for call in calls)
    assert any("--no-deps" in call and f"{engine}_cpu/requirements.txt" in call for call in calls)
    assert (tmp_path / "venvs" / engine / ".draftsmith-engine").is_file()
    again, calls = setup(engine)
    assert (again.returncode, again.stdout, calls) == (0, "", [])


def test_an_interrupted_build_is_redone_from_nothing(setup, tmp_path):
    setup("sglang")
    venv = tmp_path / "venvs" / "sglang"
    (venv / ".draftsmith-engine").unlink()
    (venv / "leftover").touch()
    done, calls = setup("sglang")
    assert done.returncode == 0
    assert calls
    assert not (venv / "leftover").exists()


def test_a_failed_install_names_the_phase_and_the_log_and_leaves_no_stamp(setup, tmp_path):
    done, _ = setup("vllm", fail_on="--no-deps")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "pinned packages" in last
    assert str(tmp_path / "venvs" / "vllm.log") in last
    assert "no matching distribution" in done.stderr
    assert not (tmp_path / "venvs" / "vllm" / ".draftsmith-engine").exists()


def test_a_folder_that_is_no_environment_is_left_alone(setup, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").touch()
    done, _ = setup("sglang", str(precious))
    assert done.returncode == 1
    assert "is not a virtual environment" in done.stderr
    assert (precious / "thesis.tex").exists()


def test_an_unknown_engine_is_refused(setup):
    done, _ = setup("tensorrt")
    assert done.returncode == 1
    assert "usage" in done.stderr
