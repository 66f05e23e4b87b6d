#!/usr/bin/env bash
# Make tests/convert/peers again from PyPI: one throw-away environment for each peer, then its own save functions.
#   scripts/peers/make_fixtures.sh WORK [OUT]      WORK: an empty folder outside the repository, about 3 GB
# OUT is tests/convert/peers unless named. With the versions below every file comes out the same, byte by byte.
# Peers are installed without their dependencies, which would bring gigabytes of CUDA; what their imports need is listed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
work=${1:?name an empty folder for the environments}
out=${2:-$here/../../tests/convert/peers}
torch="torch==2.13.0 numpy==2.4.6"
hf="transformers==5.8.1 safetensors==0.8.0"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=$here

# environment NAME PEER==VERSION PACKAGE...
environment() {
    local python=$work/$1/bin/python
    [ -e "$python" ] || python3.11 -m venv "$work/$1"
    # shellcheck disable=SC2086
    "$python" -m pip install --quiet $torch
    "$python" -m pip install --quiet $hf "${@:3}"
    "$python" -m pip install --quiet --no-deps "$2"
}

environment specforge specforge==0.2.0 pydantic pyyaml psutil requests typing-extensions
environment speculators speculators==0.9.0 pydantic pydantic-settings pyyaml psutil loguru click rich typer tqdm \
    httpx aiohttp openai "datasets<=5.1.0" hs-connectors==0.9.0
environment modelopt nvidia-modelopt==0.47.0 accelerate requests ninja nvidia-ml-py omegaconf "pulp<4" pydantic pyyaml \
    regex rich scipy tqdm
environment angelslim angelslim==0.5.0 accelerate datasets requests tqdm

mkdir -p "$out"
cd "$out"
rm -rf target specforge-* speculators-* modelopt-* angelslim-*
"$work/specforge/bin/python" "$here/tiny.py" target
"$work/specforge/bin/python" "$here/specforge_fixtures.py" . target
"$work/speculators/bin/python" "$here/speculators_fixtures.py" .
"$work/modelopt/bin/python" "$here/modelopt_fixtures.py" .
"$work/angelslim/bin/python" "$here/angelslim_fixtures.py" . target
du -cb ./*/* | tail -1
