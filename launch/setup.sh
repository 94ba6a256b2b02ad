#!/usr/bin/env bash
# Makes the virtual environment with this project installed in it, or does nothing when it is there.
# usage: bash launch/setup.sh [run|test]     run: the server alone; test: its tools and tests too
# PYTHON chooses the interpreter (default python3), VENV the folder (default .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

purpose=${1:-run}
venv=${VENV:-.venv}
case "$purpose" in
    run) extra="" ;;
    test) extra="[test]" ;;
    *) echo "launch/setup.sh takes 'run' or 'test', found '$purpose'." >&2; exit 2 ;;
esac

python=${PYTHON:-}
for candidate in python3 python3.13 python3.12 python3.11; do
    [ -n "$python" ] && break
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
        2>/dev/null; then
        python=$candidate
    fi
done
if [ -z "$python" ]; then
    found=$(python3 --version 2>&1) || found="no python3"
    echo "Python 3.11 or newer with its venv module is needed, found $found:" \
        "install one or name it with PYTHON=/path/to/python3." >&2
    exit 2
fi

# The environment is complete when the stamp of this purpose (or of 'test', which holds more)
# was written for the pyproject.toml and the folder that are here now.
wanted=$( (pwd; cat pyproject.toml) | sha256sum | cut -d' ' -f1)
for done_for in "$purpose" test; do
    stamp="$venv/sglang_dsv4-$done_for.stamp"
    if [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        exit 0
    fi
done

# pip unpacks wheels beside what it has installed: 12.5 GB at the peak, 10.8 in the end (measured).
mkdir -p "$venv"
needed_kib=13000000
held_kib=$(du -sk "$venv" | cut -f1)
free_kib=$(df -Pk "$venv" | awk 'NR == 2 { print $4 }')
if [ $((free_kib + held_kib)) -lt "$needed_kib" ]; then
    echo "The disk of $venv has $(((free_kib + 500000) / 1000000)) GB free, wanted" \
        "$(((needed_kib - held_kib + 999999) / 1000000)):" \
        "free some, or name a folder on another disk with VENV=/path/to/folder." >&2
    exit 2
fi

if [ ! -x "$venv/bin/python" ]; then
    echo "Making $venv with $("$python" --version 2>&1)."
    "$python" -m venv "$venv"
fi
echo "Installing SGLang, torch and this project into $venv (11 GB, some minutes)."
if ! "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --progress-bar on \
    --editable ".$extra"; then
    echo "The installation into $venv failed for the reason that pip gives above:" \
        "correct it and start again." >&2
    exit 1
fi
echo "$wanted" > "$venv/sglang_dsv4-$purpose.stamp"
