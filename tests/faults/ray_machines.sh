# Two machines of a Ray cluster: network namespaces of this one. To be sourced; needs root and iproute2.
#
#   begin_machines LOG      both, with a Ray node each: 10.77.0.1 (label machine=one) and 10.77.0.2 (two)
#   on N WORDS...           runs a command on machine N
#   join N LOG WORDS...     begins a Ray node there
#   end_machine N           kills all that runs there
bin=$(cd "$(dirname "$0")/../../.venv/bin" && pwd)
ray_address=10.77.0.1:6379

on() {
    n=$1
    shift
    ip netns exec "rrl$n" "$@"
}

join() {
    n=$1 log=$2
    shift 2
    RAY_AUTH_MODE=token on "$n" "$bin/ray" start --node-ip-address="10.77.0.$n" --num-cpus=1 --temp-dir="$(mktemp -d)" \
        --disable-usage-stats "$@" >>"$log" 2>&1
}

end_machine() {
    for pid in $(ip netns pids "rrl$1" 2>/dev/null); do kill -KILL "$pid" 2>/dev/null || true; done
}

end_machines() {
    for n in 1 2; do
        end_machine "$n"
        ip netns del "rrl$n" 2>/dev/null || true
    done
}

begin_machines() {
    trap end_machines EXIT
    end_machines
    ip netns add rrl1
    ip netns add rrl2
    ip link add rrlv1 netns rrl1 type veth peer name rrlv2 netns rrl2
    for n in 1 2; do
        on "$n" ip addr add "10.77.0.$n/24" dev "rrlv$n"
        on "$n" ip link set lo up
        on "$n" ip link set "rrlv$n" up
    done
    join 1 "$1" --head --port=6379 --include-dashboard=false --labels=machine=one
    join 2 "$1" --address="$ray_address" --labels=machine=two
}
