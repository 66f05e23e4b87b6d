#!/usr/bin/env bash
# The whole loop on one GPU: SGLang answers thousands of prompts, its hidden states are harvested, a drafter is trained,
# converted, replayed and served by SGLang, predicted beside served. Everything lands in runs/smollm2-gpu.
#
#   bash scripts/gpu_loop.sh TARGET ENGINE_PYTHON [KEY=VALUE]...
#
# TARGET is SmolLM2-135M's folder (scripts/make_smollm2.py); ENGINE_PYTHON an interpreter that has SGLang; KEY=VALUE
# override configs/presets/smollm2-gpu.yaml. `draftsmith` is run with $PYTHON (default: python3). A second run goes on.
#   PROMPTS, ANSWERS, HELDOUT  prompts for training, sampled answers to each, held-out prompts (5100, 3, 500)
#   SERVER                     further arguments of SGLang's server
#   ENGINE_OPTIONS             JSON of further arguments of SGLang's engine in serve-check
#   VLLM_PYTHON                an interpreter that has vLLM, which then serves the drafter too
#   DEVICE                     cuda, or cpu for a trial
set -euo pipefail
cd "$(dirname "$0")/.."

target=$1 engine=$2
shift 2
config=smollm2-gpu run=runs/smollm2-gpu
python=${PYTHON:-python3} device=${DEVICE:-cuda} port=30000 none={}
settings=("target.path=$target" prompts.train=$run/prompts-train.jsonl prompts.heldout=$run/prompts-heldout.jsonl)
settings+=(synthesize.temperature=0.7 "synthesize.answers=${ANSWERS:-3}" "$@") options=${ENGINE_OPTIONS:-}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
mkdir -p $run
: >$run/seconds.txt

draftsmith() { "$python" -m draftsmith "$@"; }
source scripts/steps.sh
ready() {
    local began=$SECONDS
    until "$python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=5)" 2>/dev/null; do
        if ! kill -0 "$server" 2>/dev/null || ((SECONDS - began > 600)); then
            tail -40 $run/server.log >&2
            echo "error: SGLang's server is not ready; its log: $run/server.log" >&2
            exit 1
        fi
        sleep 1
    done
}
stop() {
    [ -z "${server:-}" ] || kill -- "-$server" 2>/dev/null || true
    server=
}
trap stop EXIT

"$python" scripts/make_prompts.py "${PROMPTS:-5100}" $run/prompts-train.jsonl
"$python" scripts/make_prompts.py "${HELDOUT:-500}" $run/prompts-heldout.jsonl --heldout

if [ ! -f $run/answered ]; then
    # shellcheck disable=SC2086
    setsid "$engine" -m sglang.launch_server --model-path "$target" --host 127.0.0.1 --port $port --device "$device" \
        ${SERVER:-} >$run/server.log 2>&1 &
    server=$!
    step server ready
    step synthesize-heldout draftsmith synthesize $config --split heldout "${settings[@]}" \
        synthesize.temperature=0 synthesize.answers=1
    step synthesize draftsmith synthesize $config --split train "${settings[@]}"
    stop
    touch $run/answered
fi
step vocab draftsmith vocab $config "${settings[@]}"
step harvest draftsmith harvest $config "${settings[@]}"
step train draftsmith train $config "${settings[@]}"
step convert draftsmith convert $run/train --target "$target" --out $run/drafter --overwrite
step verify draftsmith verify $run/drafter --target "$target" --store $run/harvest/train
step evaluate draftsmith evaluate $config "${settings[@]}"
step bench-evaluate "$python" scripts/bench_evaluate.py $config "${settings[@]}" --tokens 100000
step serve draftsmith serve-check sglang $config "${settings[@]}" --engine-python "$engine" --device "$device" \
    --engine-options "${options:-$none}" --max-running 32
[ -z "${VLLM_PYTHON:-}" ] || step serve-vllm draftsmith serve-check vllm $config "${settings[@]}" \
    --engine-python "$VLLM_PYTHON" --device "$device" --max-running 32
column -t $run/seconds.txt 2>/dev/null || cat $run/seconds.txt
