#!/usr/bin/env bash
# What needs one GPU: kernels and weights against their references, the served model, a soak, and
# published shapes beside the reference. Sets up .venv where there is none.
# usage: bash launch/test_gpu.sh [--soak SECONDS] [--jobs N] [SUITE ...]
#            soak: of mixed load, default 600; jobs: test processes that compile kernels, default 8;
#            suites: kernels repeats weights cache served shapes, default all of them
# exit status: 0 all passed, 1 some failed, 2 it could not run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

soak=600 jobs=8 suites=()
all=(kernels repeats weights cache served shapes)
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
        --soak | --jobs)
            [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] ||
                { echo "$1 is '${2:-}', wanted a positive whole number." >&2; exit 2; }
            printf -v "${1#--}" %s "$2"
            shift 2 ;;
        *)
            [[ " ${all[*]} " == *" $1 "* ]] ||
                { echo "launch/test_gpu.sh takes --soak, --jobs and suites (${all[*]}), found '$1'." >&2; exit 2; }
            suites+=("$1")
            shift ;;
    esac
done

nvidia-smi -L > /dev/null 2>&1 ||
    { echo "No NVIDIA GPU was found, wanted one: run it on a machine with one." >&2; exit 2; }
bash launch/setup.sh test
bin=$(cd "${VENV:-.venv}/bin" && pwd)
source launch/suites.sh

export OMP_NUM_THREADS=1 SOAK_SECONDS=$soak
[ ${#suites[@]} -gt 0 ] || suites=("${all[@]}")
for name in "${suites[@]}"; do
    case $name in
        kernels) suite kernels -n "$jobs" -m "not slow and not benchmarks" tests/kernels/gpu ;;
        repeats) suite repeats -n "$jobs" -m "slow and not benchmarks" tests/kernels/gpu ;;
        weights) suite weights -m "not slow" tests/layers/gpu ;;
        cache) suite cache -s -m e2e tests/correctness/test_nvfp4_cache.py tests/correctness/test_radix.py ;;
        served) suite served -s -m e2e tests/e2e/test_endpoint.py tests/e2e/test_gpu_load.py ;;
        shapes) suite shapes -s -m e2e tests/e2e/test_gpu_shapes.py ;;
    esac
done

[ "$status" -eq 0 ] || echo "FAILED: see above."
for name in "${suites[@]}"; do
    echo "$name: $(tail -n 1 "$logs/$name")"
done
exit "$status"
