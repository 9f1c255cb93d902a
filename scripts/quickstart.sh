#!/usr/bin/env bash
# From a fresh clone to translations: trains on the built-in phrases, scores, translates.
# A second run finds the environment and the finished training.
#
# Usage: scripts/quickstart.sh [WORKDIR]
#   WORKDIR  where the run is kept; default runs/phrases in the repository
#   PYTHON   in the environment: the interpreter to make .venv with
set -euo pipefail

from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

workdir=${1:-$PWD/runs/phrases}
[[ $workdir == /* ]] || workdir=$from/$workdir # as the caller meant it
workdir=${workdir#"$PWD/"}

ensure_env ""
program=.venv/bin/transformer-jax

echo "== train"
"$program" train --config=configs/phrases.py --workdir="$workdir"

echo "== evaluate"
"$program" evaluate --workdir="$workdir"

echo "== translate"
sentences=(
  "Today the tired girl does not read my newspaper."
  "The child says that a teacher does not call my mother."
  "An old woman says that my friendly children have seen my door."
)
printf '  %s\n' "${sentences[@]}"
printf '%s\n' "${sentences[@]}" | "$program" translate --workdir="$workdir"

shown=$(printf %q "$workdir")
cat <<END
== next, from $PWD
echo "The girl reads a new book." | $program translate --workdir=$shown
echo "The boy opens the door." | $program translate --workdir=$shown --nbest=4 --json
$program describe --config=configs/base.py
$program train --config=configs/phrases.py --workdir=runs/pre-norm --config.model.norm=pre
$program train --help
.venv/bin/python -m pip install -e '.[gpu]'   # to train on an NVIDIA GPU
scripts/test.sh
END
