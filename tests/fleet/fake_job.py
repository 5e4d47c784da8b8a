"""What an agent runs in its tests in the place of a job: it puts small turns into the spool."""

import json
import signal
import sys
import time
from pathlib import Path

from robot_rl.rollout.spool import Spool


def main(folder: Path) -> int:
    over = list[int]()
    signal.signal(signal.SIGTERM, lambda *_: over.append(1))
    words = json.loads((folder / "config.yaml").read_text())
    spool = Spool(folder / "turns")
    sys.stdout.write("a package says hello\n")
    for line in words.get("logs", []):
        sys.stderr.write(line if line.startswith("half") else f"{line}\n")
        sys.stderr.flush()
        time.sleep(0.3)
    while not over:
        if spool.newest == words.get("dies_after"):
            return 3
        sys.stdout.write(json.dumps({"turn": spool.put(b"x" * words.get("size", 1))}) + "\n")
        sys.stdout.flush()
        time.sleep(0.01)
    if "logs" in words:
        sys.stderr.write("bye")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
