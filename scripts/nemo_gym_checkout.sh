#!/usr/bin/env bash
# Gets a checkout of NeMo Gym for compat/tests/test_nemo_gym_checkout.py: nemo_gym_checkout.sh FOLDER [COMMIT OR TAG]
set -euo pipefail
folder=${1:?usage: nemo_gym_checkout.sh FOLDER [COMMIT OR TAG]}
version=${2:-07d6b0d07b22fcf530b4c211dae2ee23100428e4}

git init -q "$folder"
git -C "$folder" sparse-checkout set nemo_gym tests/unit_tests
git -C "$folder" fetch -q --depth 1 --filter=blob:none https://github.com/NVIDIA-NeMo/Gym.git "$version"
git -C "$folder" checkout -q FETCH_HEAD
echo "export NEMO_GYM_CHECKOUT=$(cd "$folder" && pwd)"
