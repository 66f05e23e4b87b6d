#!/usr/bin/env bash
# Which tensors of a drafter does SGLang really load? Its own classes answer; see scripts/engines/sglang_load_audit.py.
#   scripts/audit_sglang.sh --target DIR --out audit.json --drafter DIR [DIR ...] [--forward] [--golden inputs.safetensors]
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${DRAFTSMITH_VENVS:-$(dirname "$scripts")/.venvs}/sglang
"$scripts/setup_engine.sh" sglang "$venv" >&2
exec "$venv/bin/python" "$scripts/engines/sglang_load_audit.py" "$@"
