#!/usr/bin/env bash
# Which tensors of a drafter does SGLang really load? Its own classes answer; see scripts/engines/sglang_load_audit.py.
#   scripts/audit_sglang.sh --target DIR --out audit.json --drafter DIR [DIR ...] [--golden inputs.safetensors]
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${DRAFTSMITH_VENVS:-$(dirname "$scripts")/.venvs}/sglang
"$scripts/setup_engine.sh" sglang "$venv" >&2
export SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$scripts/engines/sglang_cpu HF_HUB_OFFLINE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=passive
exec "$venv/bin/python" -W ignore "$scripts/engines/sglang_load_audit.py" "$@"
