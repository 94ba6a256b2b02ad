#!/usr/bin/env bash
# Sets up .venv, then runs ruff, mypy, the unit tests in parallel and the end-to-end tests.
# usage: bash launch/test.sh [pytest arguments]     with arguments: one pytest run of just those
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/setup.sh test
bin=$(cd "${VENV:-.venv}/bin" && pwd)
cores=$("$bin/python" -c 'import os; print(len(os.sched_getaffinity(0)))')
source launch/suites.sh

if [ $# -gt 0 ]; then
    OMP_NUM_THREADS=$cores "$bin/python" -m pytest "$@"
    exit
fi

check() {
    echo "== $*"
    "$@" || status=1
}

# mypy does not follow package-dir, so it sees the package laid out as in the wheel.
types() {
    local tree=.mypy_cache/tree
    rm -rf "$tree"
    mkdir -p "$tree/sglang_dsv4"
    tar -c --exclude="*.safetensors" sglang_dsv4 | tar -x -C "$tree"
    cp -r patches kernels "$tree/sglang_dsv4/"
    (cd "$tree" && "$bin/python" -m mypy --config-file ../../pyproject.toml \
        --python-executable "$bin/python" --cache-dir ../cache -p sglang_dsv4)
}

check "$bin/ruff" check .
check "$bin/ruff" format --check .
check types
OMP_NUM_THREADS=$(((cores + 1) / 2)) suite unit -n 2 -m "not e2e and not benchmarks"
OMP_NUM_THREADS=$cores suite e2e -m "e2e and not benchmarks"

[ "$status" -eq 0 ] || echo "FAILED: see above."
tail -qn 1 "$logs/unit" "$logs/e2e"
exit "$status"
