"""What the server of the page runs in its tests in the place of the program that looks at cameras.

`front` is new all the time, `frozen` was new a minute ago, `blurred` cannot be read.
"""

import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import msgpack


def send(message: tuple[str, int, bytes | str]) -> None:
    octets: Any = msgpack.packb(message)
    sys.stdout.buffer.write(octets)


def main(folder: Path) -> int:
    (folder / "pid").write_text(str(os.getpid()))
    if (folder / "fails").exists():
        send(("", 0, "the driver is gone"))
        return 1
    messages = [
        ("frozen", time.monotonic_ns() - 60_000_000_000, b"old"),
        ("blurred", 0, "no picture: 3 bytes"),
    ]
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        for message in [*messages, ("front", time.monotonic_ns(), b"picture")]:
            send(message)
        sys.stdout.flush()
        messages = []
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
