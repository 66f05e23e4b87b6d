#!/usr/bin/env bash
# Serve prompts with SGLang on this machine's CPU; builds the engine's environment at the first call.
#   scripts/serve_sglang.sh --target DIR --prompts prompts.json --out result.json [--drafter DIR] [--compare] ...
# All options: scripts/serve_sglang.sh --help. OMP_NUM_THREADS (default 1) sets the threads.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${DRAFTSMITH_VENVS:-$(dirname "$scripts")/.venvs}/sglang
"$scripts/setup_engine.sh" sglang "$venv" >&2
exec "$venv/bin/python" "$scripts/engines/serve_sglang.py" "$@"
