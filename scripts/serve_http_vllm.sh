#!/usr/bin/env bash
# vLLM's own OpenAI-compatible server on this machine's CPU, for `synthesize.backend=openai`; builds what it needs first.
#   scripts/serve_http_vllm.sh TARGET_DIR PORT [further options of `vllm serve`]
# Listens on 127.0.0.1. OMP_NUM_THREADS (default 1) sets the threads. For tests and small targets: no speed is claimed.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ $# -ge 2 ]] || { echo "usage: serve_http_vllm.sh TARGET_DIR PORT [OPTIONS]" >&2; exit 2; }
target=$1 port=$2
shift 2
venv=${DRAFTSMITH_VENVS:-$(dirname "$scripts")/.venvs}/vllm
"$scripts/setup_engine.sh" vllm "$venv" >&2

requirements=$scripts/engines/vllm_http/requirements.txt
extra=$venv-http
wanted=$(sha256sum <"$requirements" | cut -d' ' -f1)
exec 9>"$extra.lock"
command -v flock >/dev/null && flock 9
if [[ $(cat "$extra/.stamp" 2>/dev/null) != "$wanted" ]]; then
    rm -rf "$extra"
    "$venv/bin/python" -m pip install -q --no-deps --disable-pip-version-check --target "$extra" -r "$requirements" >&2
    echo "$wanted" >"$extra/.stamp"
fi
exec 9>&-

export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export TORCH_COMPILE_DISABLE=1 # --enforce-eager leaves what ranks log-probabilities compiled, by g++ at the first request
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=$extra
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=passive
exec "$venv/bin/python" -W ignore -m vllm.entrypoints.openai.api_server --model "$target" --host 127.0.0.1 --port "$port" \
    --dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 8 "$@"
