#!/usr/bin/env bash
# Gets a checkout of TRL for examples/trl/tests/test_trl_checkout.py: trl_checkout.sh FOLDER [COMMIT OR TAG]
set -euo pipefail
folder=${1:?usage: trl_checkout.sh FOLDER [COMMIT OR TAG]}
version=${2:-f2cd57710ae345ea6428ae95363267fcf38a3dc8}

git init -q "$folder"
git -C "$folder" fetch -q --depth 1 https://github.com/huggingface/trl.git "$version"
git -C "$folder" checkout -q FETCH_HEAD
echo "export TRL_CHECKOUT=$(cd "$folder" && pwd)"
