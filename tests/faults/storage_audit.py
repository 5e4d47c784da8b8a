"""Compares what the shim saw of a workload with what strace saw: no call may reach the disk past it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from power_cut import Call, Op

from robot_rl.core.errors import ConfigError

_CALLS = {
    Op.OPEN: ("open", "openat", "openat2", "creat"),
    Op.WRITE: ("write", "pwrite64", "writev", "pwritev", "pwritev2", "sendfile", "copy_file_range", "splice"),
    Op.TRUNCATE: ("ftruncate", "truncate", "fallocate"),
    Op.SYNC: ("fsync", "fdatasync", "sync_file_range", "msync", "sync", "syncfs"),
    Op.RENAME: ("rename", "renameat", "renameat2"),
    Op.UNLINK: ("unlink", "unlinkat"),
    Op.LINK: ("link", "linkat", "symlink", "symlinkat"),
    Op.MKDIR: ("mkdir", "mkdirat"),
    Op.RMDIR: ("rmdir",),
}
_LINE = re.compile(r"^(?:\d+ +)?(\w+)\(")
_ATTACH_S = 20.0


def traced(child: int, log: Path) -> subprocess.Popen[bytes]:
    """Attaches strace to a process that has stopped itself, and lets it go on.

    Raises:
        ConfigError: strace is missing, or may not attach.
    """
    if shutil.which("strace") is None:
        raise ConfigError("--audit: strace is missing. Install it: apt-get install strace.")
    names = ",".join(name for of in _CALLS.values() for name in of)
    words = ["strace", "-f", "-y", "-s", "0", "-e", f"trace={names}", "-o", str(log), "-p", str(child)]
    tracer = subprocess.Popen(words, stderr=subprocess.PIPE)
    deadline = time.monotonic() + _ATTACH_S
    while "TracerPid:\t0\n" in Path(f"/proc/{child}/status").read_text():
        if time.monotonic() > deadline or tracer.poll() is not None:
            os.kill(child, signal.SIGKILL)
            raise ConfigError("--audit: strace cannot attach. See /proc/sys/kernel/yama/ptrace_scope.")
        time.sleep(0.01)
    os.kill(child, signal.SIGCONT)
    return tracer


def unseen(calls: Sequence[Call], log: Path, folder: Path, site: Callable[[Call], str]) -> list[str]:
    """Returns what strace saw below a folder more often than the shim, which keeps syncs to itself."""
    by_shim = [call for call in calls if call.ordinal and call.op not in (Op.SYNC, Op.MAP)]
    by_kernel: list[Call] = []
    for line in log.read_text(errors="replace").splitlines():
        found = _LINE.match(line)
        path = re.search(rf'[<"]{re.escape(str(folder))}/?([^>"]*)[>"]', line)
        if found is None or path is None:
            continue
        op = next(op for op, names in _CALLS.items() if found[1] in names)
        if op == Op.UNLINK and "AT_REMOVEDIR" in line:
            op = Op.RMDIR
        by_kernel.append(Call(op, 0, -1, 0, 0, 0, path[1] or ".", "", b""))
    found_by, noted = Counter(call.op for call in by_kernel), Counter(call.op for call in by_shim)
    sites = Counter(map(site, by_kernel)) - Counter(map(site, by_shim))
    return [
        f"{op.name.lower()}: {count} by strace, {noted[op]} by the shim; such as "
        + ", ".join(name for name in sites if name.startswith(op.name.lower()))
        for op, count in found_by.items()
        if count > noted[op]
    ]
