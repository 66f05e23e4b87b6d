#!/usr/bin/env bash
# Which parameters of a drafter does vLLM leave unwritten? Its own class answers; see scripts/engines/vllm_load_audit.py.
#   scripts/audit_vllm.sh --target DIR --out audit.json --drafter DIR [DIR ...]
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${DRAFTSMITH_VENVS:-$(dirname "$scripts")/.venvs}/vllm
"$scripts/setup_engine.sh" vllm "$venv" >&2
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 PYTHONPATH=
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=passive
exec "$venv/bin/python" -W ignore "$scripts/engines/vllm_load_audit.py" "$@"
