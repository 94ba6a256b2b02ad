#!/usr/bin/env bash
# Measures the server with SGLang's bench_serving and compares with launch/baselines/cpu.json.
# usage: bash launch/bench_serving.sh [--update-baseline] [--baseline FILE] [--results FOLDER]
#            [--repeats N] [--threads N] [--timeout SECONDS]
#        bash launch/bench_serving.sh --compare-stock [--shapes flash|pro] [--layers N] ...
#            on a GPU: this server beside stock SGLang's FP8 on the same shapes, random weights
# exit status: 0 no regression, 1 a regression or no baseline, 2 it could not run, 130 after Ctrl-C
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case " $* " in
    *" -h "* | *" --help "*) sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
bash launch/setup.sh run
if [ "${1:-}" = --compare-stock ]; then
    exec "${VENV:-.venv}/bin/python" -m sglang_dsv4.bench.compare_stock "${@:2}"
fi
exec "${VENV:-.venv}/bin/python" -m sglang_dsv4.bench "$@"
