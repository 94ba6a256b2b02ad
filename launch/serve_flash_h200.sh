#!/usr/bin/env bash
# Serves a full-NVFP4 DeepSeek-V4-Flash on H200s, two for a replica. NOT RUN: tensor parallelism was
# never run (TP above 1), nor a whole model of this size; the numbers below are computed.
# usage: bash launch/serve_flash_h200.sh MODEL_DIR [options of sglang serve]
#   TP=2 GPUs share a replica, DP=1 replicas: TP x DP GPUs are used; both are environment variables.
#
# Every rank holds the whole KV pool, so small TP and more replicas keep the most context: on eight
# GPUs TP=2 DP=4 holds 39.4 M tokens, TP=8 DP=1 22.7 M. One H200 cannot hold the weights.
# The model is split by --tp-size alone: --ep-size and --attn-dp-size above 1 are refused at start.
# Prefill runs eagerly; CUDA graphs are captured for decode batches of up to 256.
#
# capacity: python -m sglang_dsv4.bench.header_only flash DIR
# capacity: python -m sglang_dsv4.inspect DIR --gpu-mem 140 --mem-fraction 0.88 --max-running-requests 256 --tp TP
# capacity: TP 2: weights 76.56 GiB a rank, pools 46.14, tokens 9844736
# capacity: TP 4: weights 38.60 GiB a rank, pools 84.10, tokens 18415872
# capacity: TP 8: weights 19.61 GiB a rank, pools 103.09, tokens 22701312
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case " $* " in
    "  " | *" -h "* | *" --help "*) sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
bash launch/setup.sh run
exec "${VENV:-.venv}/bin/python" -m sglang_dsv4.launch_server --model-path "$1" \
    --tp-size "${TP:-2}" --dp-size "${DP:-1}" \
    --mem-fraction-static 0.88 --context-length 1048576 --chunked-prefill-size 8192 \
    --max-running-requests 256 --cuda-graph-max-bs-decode 256 "${@:2}"
