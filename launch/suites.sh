# Sourced by test.sh and test_gpu.sh with $bin, the environment's programs: runs of pytest, all of
# which are made before the verdict in $status. $logs/NAME is the output of each.
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
status=0

# An empty selection (exit status 5) is a failure too: a suite that has lost its tests is not green.
suite() {
    local name=$1
    shift
    echo "== pytest: $name"
    "$bin/python" -m pytest "$@" 2>&1 | tee "$logs/$name" || status=1
}
