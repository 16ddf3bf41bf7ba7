#!/bin/sh
# Plain ssh: one rank per GPU on each host. Hosts share the folder of this command, and `ottava` is in their PATH.
#   HOSTS="node1 node2" GPUS=8 configs/launch/ssh.sh run.toml
# The first host of HOSTS has rank 0. A signal to this script goes to rank 0, and from there to all ranks, which save a checkpoint.
set -eu
: "${HOSTS:?set HOSTS to the names of the hosts}" "${GPUS:?set GPUS to the number of GPUs of a host}"
set -- "$@" --resume=auto
first=${HOSTS%% *}
world=$(($(echo "$HOSTS" | wc -w) * GPUS))
OTTAVA_SECRET=${OTTAVA_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}

quote() {
    for word in "$@"; do
        printf " '%s'" "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")"
    done
}

ranks=
process=.ottava-rank-0.$$
signalled=
# A signal during the start goes to rank 0 after the start.
trap 'signalled=1' TERM INT
trap 'rm -f "$process"' EXIT
rank=0
for host in $HOSTS; do
    local=0
    while [ "$local" -lt "$GPUS" ]; do
        # The secret is read from standard input, since arguments are visible to all users of a host.
        note=
        [ "$rank" -gt 0 ] || note="echo \$\$ > $process &&"
        printf '%s\n' "$OTTAVA_SECRET" | ssh "$host" "cd$(quote "$PWD") && read -r OTTAVA_SECRET && export OTTAVA_SECRET && $note
            RANK=$rank WORLD_SIZE=$world LOCAL_RANK=$local MASTER_ADDR=$first MASTER_PORT=${MASTER_PORT:-29400} exec ottava train$(quote "$@")" &
        ranks="$ranks $!"
        rank=$((rank + 1)) local=$((local + 1))
    done
done
# Rank 0 writes its process into a file on the shared folder. The file may come a minute later.
stop_ranks() {
    signalled=1 seconds=0
    while [ ! -s "$process" ] && [ "$seconds" -lt 60 ]; do
        sleep 1
        seconds=$((seconds + 1))
    done
    ssh "$first" "kill -TERM $(cat "$process")" </dev/null || echo "ssh.sh: rank 0 got no signal" >&2
}
trap stop_ranks TERM INT
[ -z "$signalled" ] || stop_ranks
code=0
for rank in $ranks; do
    # A signal ends a wait early, and the rank saves a checkpoint.
    while signalled=; wait "$rank"; result=$?; [ -n "$signalled" ]; do :; done
    [ "$code" -ne 0 ] || code=$result
done
exit "$code"
