#!/usr/bin/env bash
# Gets a checkout of another project, for the tests that run its own tests: checkout.sh PROJECT FOLDER [COMMIT OR TAG].
# It prints the variable that these tests read.
set -euo pipefail
project=${1:?usage: checkout.sh PROJECT FOLDER [COMMIT OR TAG]}
folder=${2:?usage: checkout.sh PROJECT FOLDER [COMMIT OR TAG]}

case $project in
    areal) repository=inclusionAI/AReaL version=4aef98d8d818af55b43621aaadba047ae10f4e77 ;;
    miles) repository=radixark/miles version=31f1ca961a94cb860cec3b2dea34ec332bfa8f76 ;;
    nemo_gym) repository=NVIDIA-NeMo/Gym version=07d6b0d07b22fcf530b4c211dae2ee23100428e4 ;;
    nemo_rl) repository=NVIDIA-NeMo/RL version=7ea279abfbeb698b092856d0dab61e7cf39bc909 ;;
    roll) repository=alibaba/ROLL version=8eb27cc2dc34c4d1310b169d9b86d339004d811a ;;
    skyrl) repository=NovaSky-AI/SkyRL version=a9564572eb8e91076be43c1bd5e4615e3de17265 ;;
    slime) repository=THUDM/slime version=624b824a898ab0ec1fcb4d373004c7f3852bf515 ;;
    transfer_queue) repository=Ascend/TransferQueue version=b75d570d88c50bbfcbe2171baa727fadd7216f76 ;;
    trl) repository=huggingface/trl version=f2cd57710ae345ea6428ae95363267fcf38a3dc8 ;;
    *) echo "checkout.sh: '$project' is not known. Expected one of those in $0." >&2; exit 1 ;;
esac

git init -q "$folder"
git -C "$folder" fetch -q --depth 1 "https://github.com/$repository.git" "${3:-$version}"
git -C "$folder" checkout -q FETCH_HEAD
echo "export ${project^^}_CHECKOUT=$(cd "$folder" && pwd)"
