#!/usr/bin/env bash
# Serve prompts with vLLM on this machine's CPU; builds the engine's environment at the first call.
#   scripts/serve_vllm.sh --target DIR --prompts prompts.json --out result.json [--drafter DIR] [--compare] ...
# All options: scripts/serve_vllm.sh --help. OMP_NUM_THREADS (default 1) sets the threads.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${DRAFTSMITH_VENVS:-$(dirname "$scripts")/.venvs}/vllm
"$scripts/setup_engine.sh" vllm "$venv" >&2
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=passive
exec "$venv/bin/python" -W ignore "$scripts/engines/serve_vllm.py" "$@"
