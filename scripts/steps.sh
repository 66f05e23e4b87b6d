# Sourced by demo.sh and gpu_loop.sh, which set $run: the folder of the run, where seconds.txt keeps each step's time.
step() { # step NAME COMMAND...: announce, run, keep the time
    echo "── $1" >&2
    local began=$SECONDS
    "${@:2}"
    echo "$1 $((SECONDS - began))" >>"$run/seconds.txt"
}
