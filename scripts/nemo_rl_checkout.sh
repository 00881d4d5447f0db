#!/usr/bin/env bash
# Gets a checkout of NeMo RL for compat/tests/test_nemo_rl_checkout.py: nemo_rl_checkout.sh FOLDER [COMMIT OR TAG]
set -euo pipefail
folder=${1:?usage: nemo_rl_checkout.sh FOLDER [COMMIT OR TAG]}
version=${2:-7ea279abfbeb698b092856d0dab61e7cf39bc909}

git init -q "$folder"
git -C "$folder" fetch -q --depth 1 https://github.com/NVIDIA-NeMo/RL.git "$version"
git -C "$folder" checkout -q FETCH_HEAD
echo "export NEMO_RL_CHECKOUT=$(cd "$folder" && pwd)"
