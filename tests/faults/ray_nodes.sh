#!/bin/sh
# One run over two machines of a Ray cluster, of which one dies in the middle and joins again. The machines are network
# namespaces of this one; needs root and iproute2. A minute and a half of two quiet cores:
#
#   tests/faults/ray_nodes.sh /tmp/ray-nodes
set -eu
out=${1:?a folder for the run}
. "$(dirname "$0")/ray_machines.sh"
mkdir -p "$out"
export ROBOT_RL_STATE="$out/state" OMP_NUM_THREADS=1
begin_machines "$out/nodes.log"

on 1 "$bin/robot-rl" train recipe=two_robots transport=ray ray.address="$ray_address" \
    sources.panda.env_steps=3000 sources.gantry.env_steps=3000 demos.episodes=40 bc.updates=500 \
    evaluate.episodes=40 evaluate.every_env_steps=0 video.episodes=0 video.failures=0 out="$out" \
    >"$out/train.log" 2>&1 &
run=$!
until grep -q 'residual  *[1-9][0-9]*%' "$out/train.log"; do kill -0 $run; sleep 1; done
echo "kills node 2"
end_machine 2
sleep 3
echo "node 2 joins again"
join 2 "$out/nodes.log" --address="$ray_address"
wait $run
grep 'is begun again' "$out/train.log"
tail -n 1 "$out/train.log"
