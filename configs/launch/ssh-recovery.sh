#!/bin/sh
# Plain ssh, for a run.toml with the table [recovery]: one process per host, which is the keeper of its host, starts a rank per GPU, and goes on after the loss
# of a rank or a host. HOSTS has the hosts that train and recovery.spares spare hosts. Hosts share the folder of this command, and `ottava` is in their PATH.
#   HOSTS="node1 node2 node3" GPUS=8 configs/launch/ssh-recovery.sh run.toml
# A signal to this script goes to all keepers: the run saves a checkpoint. The exit code is the last host's code that is not 0 and not of a lost connection.
set -eu
: "${HOSTS:?set HOSTS to the names of the hosts}" "${GPUS:?set GPUS to the number of GPUs of a host}"
set -- "$@" --gpus "$GPUS" --resume=auto
first=${HOSTS%% *}
hosts=$(echo "$HOSTS" | wc -w)
OTTAVA_SECRET=${OTTAVA_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}

quote() {
    for word in "$@"; do
        printf " '%s'" "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")"
    done
}

keepers=
process=.ottava-keeper.$$
signalled=
# A signal during the start goes to the keepers after the start.
trap 'signalled=1' TERM INT
trap 'rm -f "$process".*' EXIT
rank=0
for host in $HOSTS; do
    # The secret is read from standard input, since arguments are visible to all users of a host.
    printf '%s\n' "$OTTAVA_SECRET" | ssh "$host" "cd$(quote "$PWD") && read -r OTTAVA_SECRET && export OTTAVA_SECRET && echo \$\$ > $process.$rank &&
        RANK=$rank WORLD_SIZE=$hosts MASTER_ADDR=$first MASTER_PORT=${MASTER_PORT:-29400} exec ottava train$(quote "$@")" &
    keepers="$keepers $!"
    rank=$((rank + 1))
done
# Each keeper writes its process into a file on the shared folder. The files may come a minute later.
stop_keepers() {
    signalled=1 seconds=0 rank=0
    for host in $HOSTS; do
        while [ ! -s "$process.$rank" ] && [ "$seconds" -lt 60 ]; do
            sleep 1
            seconds=$((seconds + 1))
        done
        ssh "$host" "kill -TERM $(cat "$process.$rank")" </dev/null || echo "ssh-recovery.sh: $host got no signal" >&2
        rank=$((rank + 1))
    done
}
trap stop_keepers TERM INT
[ -z "$signalled" ] || stop_keepers
code=0
for keeper in $keepers; do
    # A signal ends a wait early, and the run saves a checkpoint.
    while signalled=; wait "$keeper"; result=$?; [ -n "$signalled" ]; do :; done
    # ssh itself ends with 255 if it loses a host. The job goes on without the host.
    case $result in 0 | 255) ;; *) code=$result ;; esac
done
exit "$code"
