#!/bin/sh
# One run over two machines of a Ray cluster, of which one dies in the middle and joins again. The machines are network
# namespaces of this one; needs root and iproute2. A minute and a half of two quiet cores:
#
#   tests/faults/ray_nodes.sh /tmp/ray-nodes
set -eu
out=${1:?a folder for the run}
bin=$(cd "$(dirname "$0")/../../.venv/bin" && pwd)
mkdir -p "$out"
export ROBOT_RL_STATE="$out/state" OMP_NUM_THREADS=1

node() {  # node NUMBER FOLDER ray-start-words...
    n=$1 folder=$2
    shift 2
    RAY_AUTH_MODE=token ip netns exec "rrl$n" "$bin/ray" start --node-ip-address="10.77.0.$n" --num-cpus=1 --temp-dir="$folder" \
        --disable-usage-stats "$@" >>"$out/node$n.log" 2>&1
}

end() {
    for n in 1 2; do
        for pid in $(ip netns pids "rrl$n" 2>/dev/null); do kill -KILL "$pid" 2>/dev/null || true; done
        ip netns del "rrl$n" 2>/dev/null || true
    done
}
trap end EXIT
end
ip netns add rrl1
ip netns add rrl2
ip link add rrlv1 netns rrl1 type veth peer name rrlv2 netns rrl2
for n in 1 2; do
    ip netns exec "rrl$n" ip addr add "10.77.0.$n/24" dev "rrlv$n"
    ip netns exec "rrl$n" ip link set lo up
    ip netns exec "rrl$n" ip link set "rrlv$n" up
done
node 1 "$(mktemp -d)" --head --port=6379 --include-dashboard=false
node 2 "$(mktemp -d)" --address=10.77.0.1:6379

ip netns exec rrl1 "$bin/robot-rl" train recipe=two_robots transport=ray ray.address=10.77.0.1:6379 \
    sources.panda.env_steps=3000 sources.gantry.env_steps=3000 demos.episodes=40 bc.updates=500 \
    evaluate.episodes=40 evaluate.every_env_steps=0 video.episodes=0 video.failures=0 out="$out" \
    >"$out/train.log" 2>&1 &
run=$!
until grep -q 'residual  *[1-9][0-9]*%' "$out/train.log"; do kill -0 $run; sleep 1; done
echo "kills node 2"
for pid in $(ip netns pids rrl2); do kill -KILL "$pid"; done
sleep 3
echo "node 2 joins again"
node 2 "$(mktemp -d)" --address=10.77.0.1:6379
wait $run
grep 'is lost, another is begun' "$out/train.log"
tail -n 1 "$out/train.log"
