#!/usr/bin/env bash
# Serves a full-NVFP4 DeepSeek-V4-Flash on B200s, one for a replica. NOT RUN: no Blackwell GPU was
# there, and tensor parallelism was never run (TP above 1); the numbers below are computed.
# usage: bash launch/serve_flash_b200.sh MODEL_DIR [options of sglang serve]
#   TP=1 GPUs share a replica, DP=1 replicas: TP x DP GPUs are used; both are environment variables.
#
# One B200 holds the weights and one request of a whole 1 Mi context beside them, with 0.9 of its
# memory static. Two GPUs a replica hold 14 times the tokens of one: on eight GPUs TP=2 DP=4 holds
# 73.6 M tokens, TP=1 DP=8 10.1 M, TP=8 DP=1 31.3 M.
# Attention is FlashInfer's cake reader, but for HCA layers of a context above 180224 tokens, whose
# lists it refuses: our own kernel serves these, and all HCA decode where --context-length is larger
# than that, since CUDA graphs have the lists' full width.
# The model is split by --tp-size alone: --ep-size and --attn-dp-size above 1 are refused at start.
# Prefill runs eagerly; CUDA graphs are captured for decode batches of up to 256.
#
# capacity: python -m sglang_dsv4.bench.header_only flash DIR
# capacity: python -m sglang_dsv4.inspect DIR --gpu-mem 179 --mem-fraction 0.9 --max-running-requests 256 --tp TP
# capacity: TP 1: weights 152.49 GiB a rank, pools 8.11, tokens 1258752
# capacity: TP 2: weights 76.56 GiB a rank, pools 84.04, tokens 18401024
# capacity: TP 8: weights 19.61 GiB a rank, pools 140.99, tokens 31257600
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case " $* " in
    "  " | *" -h "* | *" --help "*) sed -n '2,21s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
bash launch/setup.sh run
exec "${VENV:-.venv}/bin/python" -m sglang_dsv4.launch_server --model-path "$1" \
    --tp-size "${TP:-1}" --dp-size "${DP:-1}" \
    --mem-fraction-static 0.9 --context-length 1048576 --chunked-prefill-size 8192 \
    --max-running-requests 256 --cuda-graph-max-bs-decode 256 "${@:2}"
