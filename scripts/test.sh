#!/usr/bin/env bash
# Lints, type-checks and tests; stops at the first stage that fails.
#
# Usage: scripts/test.sh [--slow] [PYTEST_ARGUMENT ...]
#   --slow   run the slow tests too
#   PYTHON   in the environment: the interpreter to make .venv with
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/env.sh
source scripts/env.sh

select="not slow"
if [[ ${1:-} == --slow ]]; then
  select=""
  shift
fi

ensure_env test
python=.venv/bin/python

echo "== ruff check"
"$python" -m ruff check .

echo "== ruff format --check"
"$python" -m ruff format --check .

echo "== pyright"
# Without the variable it asks the network for a newer release.
PYRIGHT_PYTHON_IGNORE_WARNINGS=1 "$python" -m pyright --pythonpath "$python"

echo "== pytest (${select:-all tests})"
# The tests simulate several devices, which only the CPU backend can. Two processes,
# each with whole files, since tests of a file share what they compile.
JAX_PLATFORMS=cpu "$python" -m pytest -m "$select" -n 2 --dist loadfile "$@"
