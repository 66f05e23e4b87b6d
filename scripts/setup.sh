#!/usr/bin/env bash
# Make .venv with draftsmith in it (Python 3.11 or newer, and pip). A second call returns at once.
# Where no GPU is found torch is pinned to the CPU build; an unpinned torch pulls gigabytes of CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${DRAFTSMITH_VENV:-.venv}
python=$(command -v python3.11 || command -v python3)
stamp=$(cat pyproject.toml constraints-cpu.txt scripts/setup.sh | sha256sum | cut -d' ' -f1)
[ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ] && exit 0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: draftsmith needs Python 3.11 or newer; found $("$python" --version)" >&2
    exit 2
}
constraint=(-c constraints-cpu.txt)
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then constraint=(); fi

started=$SECONDS
echo "setup: building $venv (log: $venv.log)"
rm -rf "$venv"
if ! { "$python" -m venv "$venv" &&
    "$venv/bin/pip" install --quiet --no-compile "${constraint[@]}" -e '.[test,demo]'; } >"$venv.log" 2>&1; then
    tail -n 15 "$venv.log" >&2
    echo "error: the environment could not be built; see $venv.log" >&2
    exit 1
fi
echo "$stamp" >"$venv/.stamp"
echo "setup: $venv ready after $((SECONDS - started)) s"
