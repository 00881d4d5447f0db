#!/usr/bin/env bash
# Gets a checkout of a trainer for compat/tests/test_trainer_checkouts.py.
set -euo pipefail
usage="usage: trainer_checkout.sh areal|skyrl FOLDER [COMMIT OR TAG]"
folder=${2:?$usage}
case $1 in
  areal) repository=inclusionAI/AReaL version=${3:-4aef98d8d818af55b43621aaadba047ae10f4e77} ;;
  skyrl) repository=NovaSky-AI/SkyRL version=${3:-a9564572eb8e91076be43c1bd5e4615e3de17265} ;;
  *) echo "$usage" >&2 && exit 2 ;;
esac

git init -q "$folder"
git -C "$folder" fetch -q --depth 1 "https://github.com/$repository.git" "$version"
git -C "$folder" checkout -q FETCH_HEAD
echo "export ${1^^}_CHECKOUT=$(cd "$folder" && pwd)"
