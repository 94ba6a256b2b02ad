#!/usr/bin/env bash
# Serves a full-NVFP4 DeepSeek-V4-Pro on eight B200s. NOT RUN: no Blackwell GPU was there, and tensor
# parallelism was never run (TP above 1); the numbers below are computed.
# usage: bash launch/serve_pro_b200.sh MODEL_DIR [options of sglang serve]
#
# Four B200s cannot hold the weights, and sixteen ranks would cut a tile of an expert (3072 is 24
# tiles of 128), so it is eight. Each rank has 16 query heads.
# Attention is FlashInfer's cake reader, but for HCA layers of a context above 180224 tokens, whose
# lists it refuses: our own kernel serves these, and all HCA decode where --context-length is larger
# than that, since CUDA graphs have the lists' full width.
# The model is split by --tp-size alone: --ep-size and --attn-dp-size above 1 are refused at start.
# Prefill runs eagerly; CUDA graphs are captured for decode batches of up to 256.
#
# capacity: python -m sglang_dsv4.bench.header_only pro DIR
# capacity: python -m sglang_dsv4.inspect DIR --gpu-mem 179 --mem-fraction 0.88 --max-running-requests 256 --tp TP
# capacity: TP 8: weights 105.58 GiB a rank, pools 51.44, tokens 7518720
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case " $* " in
    "  " | *" -h "* | *" --help "*) sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
bash launch/setup.sh run
exec "${VENV:-.venv}/bin/python" -m sglang_dsv4.launch_server --model-path "$1" \
    --tp-size 8 \
    --mem-fraction-static 0.88 --context-length 1048576 --chunked-prefill-size 8192 \
    --max-running-requests 256 --cuda-graph-max-bs-decode 256 "${@:2}"
