#!/usr/bin/env bash
# The whole loop on SmolLM2-135M on a CPU: from prompts to a drafter that SGLang serves, and what it gains.
#   bash scripts/demo.sh            everything lands in runs/demo; a second run goes on from what exists
# Needs Python 3.11 and pip; makes its own environments (.venv, .venvs/sglang).
set -euo pipefail
cd "$(dirname "$0")/.."

config=demo run=runs/demo target=.cache/smollm2-135m
bash scripts/setup.sh
bash scripts/setup_engine.sh sglang
source "${DRAFTSMITH_VENV:-.venv}/bin/activate"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=passive OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}

mkdir -p $run
: >$run/seconds.txt
source scripts/steps.sh

step target python scripts/make_smollm2.py $target
draftsmith plan $config
step synthesize draftsmith synthesize $config
step vocab draftsmith vocab $config
step harvest draftsmith harvest $config
step train draftsmith train $config
step evaluate draftsmith evaluate $config
step convert draftsmith convert $run/train --target $target --out $run/drafter --overwrite
step verify draftsmith verify $run/drafter --target $target --store $run/harvest/train --deep
step export draftsmith export $run/drafter $run/export --target $target
step replay draftsmith evaluate $config --drafter $run/export/latest
version=$(basename "$(readlink $run/export/latest)")
if ! grep -q "export/$version\"" $run/serve-check-sglang.json 2>/dev/null; then
    OMP_NUM_THREADS=1 step serve draftsmith serve-check sglang $config --drafter $run/export/$version --max-running 32
fi
python scripts/demo_report.py $run
