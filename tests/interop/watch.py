"""Shows the topics that a command announces on DDS, as Wireshark's RTPS dissector sees them, not we.

    python tests/interop/watch.py --seconds 15 robot-rl serve-sim-arm

The command runs in a network namespace of its own, on loopback alone, while tshark listens there. The
last line is one JSON object, topic -> type, by their names on the wire. Needs tshark, ip and unshare.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time

TSHARK = [
    "tshark", "-i", "lo", "-l", "-f", "udp", "-Y", "rtps.param.topicName", "-T", "fields",
    "-e", "rtps.param.topicName", "-e", "rtps.param.typeName",
]  # fmt: skip
ENTER = 'ip link set lo up; exec "$@"'
OTHER = """
import sys
from robot_rl.real.ros2.node import DdsNode
node = DdsNode("watch")
print("ready", flush=True)
sys.stdin.read()
"""
END_S = 20.0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Shows the topics that a command announces on DDS.")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long the command runs")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(words)
    missing = [name for name in ("tshark", "ip", "unshare") if shutil.which(name) is None]
    if missing or not chosen.command:
        needs = f"needs {', '.join(missing)}" if missing else "no command to watch"
        print(f"watch: {needs}. Debian: apt-get install tshark iproute2 util-linux", file=sys.stderr)
        return 2
    if not chosen.inside:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        again = [sys.executable, __file__, "--inside", *words]
        os.execvp("unshare", ["unshare", *user, "--net", "sh", "-euc", ENTER, "sh", *again])
    seen = watch(chosen.command, chosen.seconds)
    for topic, kind in sorted(seen.items()):
        print(f"{topic:<60} {kind}")
    print(json.dumps(seen, sort_keys=True))
    return 0 if seen else 1


def watch(command: list[str], seconds: float) -> dict[str, str]:
    """Returns topic -> type of all that was announced while the command ran."""
    listener = subprocess.Popen(TSHARK, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert listener.stderr is not None
    for line in listener.stderr:
        if line.startswith("Capturing"):
            break
    local = os.environ | {"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
    # Endpoints are announced to somebody: a second participant.
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=local
    )
    assert other.stdout is not None
    other.stdout.readline()
    watched = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=local)
    time.sleep(seconds)
    for process in (watched, other):
        process.terminate()
        process.wait(END_S)
    time.sleep(1.0)  # tshark is behind by a moment
    listener.terminate()
    fields = [line.rstrip("\n").split("\t") for line in listener.communicate()[0].splitlines()]
    return {
        topic: kind
        for topics, kinds in (row for row in fields if len(row) == 2)
        for topic, kind in zip(topics.split(","), kinds.split(","), strict=False)
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
