#!/usr/bin/env bash
# Build the virtual environment of one serving engine for the CPU:  scripts/setup_engine.sh sglang|vllm [VENV_DIR]
#
# Default VENV_DIR: $DRAFTSMITH_VENVS/<engine>, or .venvs/<engine> in the repository. Versions are pinned in
# scripts/engines/<engine>_cpu/requirements.txt. A stamp written last names the requirements the environment was built
# from: a second call returns at once, an interrupted or outdated build is thrown away and redone.
set -euo pipefail

fail() { echo "setup_engine.sh: $*" >&2; exit 1; }

[[ $# -ge 1 && $# -le 2 && ( $1 == sglang || $1 == vllm ) ]] || fail "usage: setup_engine.sh sglang|vllm [VENV_DIR]"
engine=$1
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
requirements=$scripts/engines/${engine}_cpu/requirements.txt
venv=${2:-${DRAFTSMITH_VENVS:-$(dirname "$scripts")/.venvs}/$engine}
stamp=$venv/.draftsmith-engine
log=$venv.log
wanted=$(cat "$requirements" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)

is_ready() { [[ -x $venv/bin/python && $(cat "$stamp" 2>/dev/null) == "$wanted" ]]; }

is_ready && exit 0
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
command -v flock >/dev/null && flock 9 # a second builder waits here, and then finds the work done
is_ready && exit 0

if [[ -e $venv ]]; then
    [[ -f $venv/pyvenv.cfg || -z $(ls -A "$venv") ]] ||
        fail "$venv exists and is not a virtual environment: name another folder, or remove it"
    rm -rf "$venv"
fi
python=$(command -v python3.11 || command -v python3) || fail "no python3.11 or python3 on PATH"

phase() { # phase DESCRIPTION COMMAND...: one line on the terminal, the command's output in the log
    local began=$SECONDS
    echo -n "setup_engine.sh: $engine: $1 ... "
    if ! "${@:2}" >>"$log" 2>&1; then
        echo "failed"
        tail -n 15 "$log" >&2
        fail "building $venv failed while: $1 (whole log: $log). Mend the cause and run the same command again"
    fi
    echo "$((SECONDS - began)) s"
}

: >"$log"
pip=("$venv/bin/python" -m pip install -q --no-compile --disable-pip-version-check)
phase "creating $venv with $("$python" --version)" "$python" -m venv "$venv"
phase "installing torch" "${pip[@]}" "$(grep '^torch==' "$requirements")"
phase "installing $engine and $(grep -c '^[A-Za-z]' "$requirements") pinned packages" "${pip[@]}" --no-deps -r "$requirements"
phase "checking torch" "$venv/bin/python" -c "import torch; print(torch.__version__)"
echo "$wanted" >"$stamp"
