#!/usr/bin/env bash
# Convert every fixture with draftsmith and load the result with the peers' own drafter classes: --to vllm with
# speculators, --to sglang with SpecForge. What came out is in tests/convert/peers/README.md.
#   scripts/peers/load_written.sh WORK     WORK: where make_fixtures.sh made the environments
set -uo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
work=${1:?name the folder of the environments}
fixtures=$root/tests/convert/peers
written=$(mktemp -d)
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

for source in "$fixtures"/{specforge,speculators,modelopt,angelslim}-*; do
    name=$(basename "$source")
    options=()
    [ "$name" = specforge-training-plain ] && options=(--config "$source/draft-config.json")
    [ "$name" = modelopt-plain ] && options=(--rope-scaling none)
    [ "$name" = angelslim-plain ] && options=(--rope-theta 10000)
    for form in vllm sglang; do
        peer=$([ $form = vllm ] && echo speculators || echo specforge)
        if ! draftsmith convert "$source" --target "$fixtures/target" --out "$written/$name-$form" --to $form \
            "${options[@]}" 2>"$written/log"; then
            echo "$name-$form: $(grep -m1 -A1 'cannot be' "$written/log" | tr -s '\n ' ' ')"
        else
            "$work/$peer/bin/python" "$here/load_written.py" $peer "$written/$name-$form" "$fixtures/target" \
                2>"$written/log" || tail -1 "$written/log"
        fi
    done
done
rm -rf "$written"
