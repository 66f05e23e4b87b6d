#!/usr/bin/env bash
# Which parameters of a drafter does vLLM leave unwritten? Its own class answers; see scripts/engines/vllm_load_audit.py.
#   scripts/audit_vllm.sh --target DIR --out audit.json --drafter DIR [DIR ...] [--forward] [--golden inputs.safetensors]
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${DRAFTSMITH_VENVS:-$(dirname "$scripts")/.venvs}/vllm
"$scripts/setup_engine.sh" vllm "$venv" >&2
exec "$venv/bin/python" "$scripts/engines/vllm_load_audit.py" "$@"
