#!/bin/sh
# Two jobs race for arms from two machines of a Ray cluster (network namespaces of this one, which share the arms'
# lease files); needs root and iproute2. The words are those of preempt_campaign.py:
#
#   tests/faults/ray_races.sh --races 10000
set -eu
. "$(dirname "$0")/ray_machines.sh"
folder=$(mktemp -d)
export ROBOT_RL_STATE="$folder" RAY_AUTH_MODE=token
begin_machines "$folder/nodes.log" || { cat "$folder/nodes.log"; exit 1; }
on 1 "$bin/python" "$(dirname "$0")/preempt_campaign.py" --ray "$ray_address" "$@"
