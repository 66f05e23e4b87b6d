#!/usr/bin/env bash
# Set up and run every check: ruff, types, tests, and the tests that drive the real SGLang and vLLM.
#   scripts/test.sh          everything; builds the engines' environments too
#   scripts/test.sh --fast   no engines and no slow tests, about five minutes with set-up
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-all}
[ "$mode" = all ] || [ "$mode" = --fast ] || { echo "usage: scripts/test.sh [--fast]" >&2; exit 2; }
bash scripts/setup.sh
source "${DRAFTSMITH_VENV:-.venv}/bin/activate"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

# Engines install while the fast tests run: one waits for the network, the other for the processor.
if [ "$mode" = all ]; then
    bash scripts/setup_engine.sh sglang & sglang=$!
fi
ruff check .
ruff format --check --quiet .
mypy
pytest -q -n 2 -m "not engine and not slow"
if [ "$mode" = all ]; then
    wait "$sglang"
    bash scripts/setup_engine.sh vllm & vllm=$!
    pytest -q -n 2 --dist loadgroup -m "slow and not engine"
    wait "$vllm"
    pytest -q -n 2 --dist loadgroup -m engine
fi
