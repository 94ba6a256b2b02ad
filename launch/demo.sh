#!/usr/bin/env bash
# Installs into .venv if needed, then serves the embedded small model and asks it about a long text.
# usage: bash launch/demo.sh [--serve] [--port N] [--timeout SECONDS]
#   --serve leaves the server running. PYTHON and VENV are those of launch/setup.sh.
# exit status: 0 every answer right, 1 one wrong, 2 the server did not start, 130 after Ctrl-C
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case " $* " in
    *" -h "* | *" --help "*) sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
bash launch/setup.sh run
exec "${VENV:-.venv}/bin/python" -m sglang_dsv4.demo "$@"
