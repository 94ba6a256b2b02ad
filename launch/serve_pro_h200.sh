#!/usr/bin/env bash
# Serves a full-NVFP4 DeepSeek-V4-Pro on eight H200s. NOT RUN: tensor parallelism was never run (TP
# above 1), nor a whole model of this size; the numbers below are computed.
# usage: bash launch/serve_pro_h200.sh MODEL_DIR [options of sglang serve]
#
# Eight ranks are both the least that hold the weights and the most that split the model: an expert
# of 3072 is 24 tiles of 128. Each rank has 16 query heads. The pools hold two requests of a whole
# 1 Mi context; a smaller --context-length keeps one request from taking half of them.
# The model is split by --tp-size alone: --ep-size and --attn-dp-size above 1 are refused at start.
# Prefill runs eagerly; CUDA graphs are captured for decode batches of up to 128.
#
# capacity: python -m sglang_dsv4.bench.header_only pro DIR
# capacity: python -m sglang_dsv4.inspect DIR --gpu-mem 140 --mem-fraction 0.88 --max-running-requests 128 --tp TP
# capacity: TP 8: weights 105.58 GiB a rank, pools 17.12, tokens 2394624
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case " $* " in
    "  " | *" -h "* | *" --help "*) sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
bash launch/setup.sh run
exec "${VENV:-.venv}/bin/python" -m sglang_dsv4.launch_server --model-path "$1" \
    --tp-size 8 \
    --mem-fraction-static 0.88 --context-length 1048576 --chunked-prefill-size 8192 \
    --max-running-requests 128 --cuda-graph-max-bs-decode 128 "${@:2}"
