"""The cost of recording for a control loop, and the time to open a large store.

The loop runs at 100 Hz and records 32 floats at each step, and two new 640x480 pictures 30 times a second.
The robot waits only for `append`; compression and the disk have their own thread.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.store.reader import StoreReader
from robot_rl.data.store.writer import StoreWriter

CONTROL_HZ, CAMERA_HZ = 100.0, 30.0
STATE, ACTIONS = 32, 8
CAMERAS = ("front.rgb", "wrist.rgb")
SIZE = (480, 640, 3)


def run(*, seconds: float = 100.0, steps: int = 10_000_000) -> dict[str, Any]:
    """Measures both and returns rows.

    Args:
        seconds: time of recording.
        steps: size of the large store.
    """
    return {
        "title": f"Recording {STATE} floats at {CONTROL_HZ:g} Hz and 2 x 640x480 RGB at {CAMERA_HZ:g} Hz",
        "rows": [measure(seconds=seconds)],
        "a large store of numbers": [capacity(steps=steps)],
    }


def measure(*, seconds: float = 100.0, folder: str | Path | None = None) -> dict[str, Any]:
    """Records at the rate of a robot and returns the times of `append`, in one row.

    Args:
        seconds: time of recording.
        folder: for the store, which is removed again; the temporary folder if None.
    """
    with tempfile.TemporaryDirectory(prefix="robot-rl-bench-store-", dir=folder) as name:
        scratch = Path(name)
        meta, features = _layout(CONTROL_HZ)
        features |= {camera: Feature("uint8", SIZE) for camera in CAMERAS}
        writer = StoreWriter(scratch / "store", meta, features)
        cpu_began, began = time.process_time(), time.perf_counter()
        append_s, late_s = _record(writer, round(seconds * CONTROL_HZ))
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        writer.close()
        stats = writer.stats
        found = int(StoreReader(scratch / "store").lengths().sum())
    p50, p99, p999 = np.percentile(1e3 * append_s, [50, 99, 99.9])
    return {
        "seconds": took_s,
        "steps": stats.steps,
        "dropped_steps": len(append_s) - found,
        "pictures": stats.pictures,
        "dropped_pictures": stats.dropped_pictures,
        "waits": stats.waits,
        "append_p50_ms": float(p50),
        "append_p99_ms": float(p99),
        "append_p999_ms": float(p999),
        "append_max_ms": float(1e3 * append_s.max()),
        "late_p99_ms": float(np.percentile(1e3 * late_s, 99)),
        "cpu_share": cpu_s / took_s,
        "thread_cpu_share": stats.thread_cpu_s / took_s,
        "mb_per_s": stats.written_bytes / 1e6 / took_s,
    }


def capacity(*, steps: int = 10_000_000, folder: str | Path | None = None) -> dict[str, Any]:
    """Writes a large store of numbers and returns the time to open it and to read all of it.

    Args:
        steps: control steps of 100 lanes, in episodes of 1,000.
        folder: for the store (2.5 GB), which is removed again; the temporary folder if None.
    """
    lanes = np.arange(100)
    with tempfile.TemporaryDirectory(prefix="robot-rl-bench-store-", dir=folder) as name:
        scratch = Path(name)
        meta, features = _layout(50.0)
        state = np.random.default_rng(0).normal(size=(100, STATE)).astype(np.float32)
        began = time.perf_counter()
        with StoreWriter(scratch / "store", meta, features, when_behind="wait") as writer:
            for step in range(steps // len(lanes)):
                writer.append_lanes(
                    lanes,
                    obs={"state": state},
                    action=state[:, :ACTIONS],
                    truncated=step % 1000 == 999,
                    stamp_ns=step,
                )
        wrote_s, num_bytes = time.perf_counter() - began, writer.stats.written_bytes
        began = time.perf_counter()
        reader = StoreReader(scratch / "store")
        found = int(reader.lengths().sum())
        opened_s = time.perf_counter() - began
        began = time.perf_counter()
        reader.columns(["obs.state", "action", "reward", "terminated", "truncated"])
        read_s = time.perf_counter() - began
    return {
        "steps": found,
        "episodes": len(reader),
        "gb": num_bytes / 1e9,
        "write_steps_per_s": steps / wrote_s,
        "open_s": opened_s,
        "read_columns_s": read_s,
    }


def _layout(control_hz: float) -> tuple[EpisodesMeta, dict[str, Feature]]:
    meta = EpisodesMeta(
        task="bench",
        robot="bench",
        control_hz=control_hz,
        instruction="measure",
        state_names=tuple(f"q{i}" for i in range(STATE)),
        action_names=tuple(f"a{i}" for i in range(ACTIONS)),
    )
    return meta, {"state": Feature("float32", (STATE,))}


def _record(writer: StoreWriter, steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Runs the control loop; returns the time of every `append`, and how late every step began."""
    rng = np.random.default_rng(0)
    state = rng.normal(size=(steps, STATE)).astype(np.float32)
    action = np.zeros(ACTIONS, np.float32)
    pictures = _pictures(rng)
    append_s, late_s = np.empty(steps), np.empty(steps)
    began, taken = time.perf_counter(), -1
    for step in range(steps):
        due = began + step / CONTROL_HZ
        time.sleep(max(0.0, due - time.perf_counter()))
        start = time.perf_counter()
        obs: dict[str, Any] = {"state": state[step]}
        if int(step * CAMERA_HZ / CONTROL_HZ) > taken:
            taken = int(step * CAMERA_HZ / CONTROL_HZ)
            obs |= {camera: pictures[(taken + i) % len(pictures)] for i, camera in enumerate(CAMERAS)}
        writer.append(obs=obs, action=action, reward=0.1)
        append_s[step] = time.perf_counter() - start
        late_s[step] = start - due
    return append_s, late_s


def _pictures(rng: np.random.Generator) -> list[NDArray[np.uint8]]:
    """Returns pictures with the noise of a camera, which makes a JPEG of about 55 kB."""
    ramp = np.linspace(0, 155, SIZE[1])[None, :, None] + np.linspace(0, 100, SIZE[0])[:, None, None]
    noisy = (ramp + rng.normal(0, 6, SIZE)).clip(0, 255).astype(np.uint8)
    return [np.roll(noisy, 40 * i, axis=1) for i in range(8)]
