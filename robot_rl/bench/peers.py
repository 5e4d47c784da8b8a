"""Other projects' environments, each measured in its own virtual environment.

Their pins exclude our MuJoCo, so they cannot be imported here. The virtual environment is made on first use
in `$XDG_CACHE_HOME/robot_rl/peers`.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from robot_rl.core.errors import RobotRLError


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Packages to install, and the env to measure."""

    packages: tuple[str, ...]
    make_env: str
    """Python that defines `make()`, one single-process Gymnasium-like env with 4-tuple or 5-tuple steps."""
    num_envs: int = 2
    """Worker processes, one for each core."""


PEERS = {
    "robosuite_lift": Peer(
        packages=("robosuite==1.5.2", "mujoco==3.3.0"),
        make_env="""
import robosuite, logging
logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
def make():
    return robosuite.make("Lift", robots="Panda", has_renderer=False, has_offscreen_renderer=False,
                          use_camera_obs=False, control_freq=20, horizon=100)
def action(env, rng):
    low, high = env.action_spec
    return rng.uniform(low, high)
""",
    ),
    "gymnasium_robotics_fetch_pick_and_place": Peer(
        packages=("gymnasium-robotics==1.4.2", "mujoco==3.3.0"),
        make_env="""
import gymnasium, gymnasium_robotics
gymnasium.register_envs(gymnasium_robotics)
def make():
    return gymnasium.make("FetchPickAndPlace-v4")
def action(env, rng):
    return rng.uniform(-1.0, 1.0, 4)
""",
    ),
}

_WORKER = """
import json, multiprocessing, sys, time
import numpy as np
{make_env}
def work(seed):
    env, rng = make(), np.random.default_rng(seed)
    env.reset()
    steps, began = 0, None
    while began is None or time.perf_counter() - began < {seconds}:
        out = env.step(action(env, rng))
        if out[2] or (len(out) == 5 and out[3]):
            env.reset()
        steps += 1
        if began is None and steps == 20:
            steps, began = 0, time.perf_counter()
    return steps / (time.perf_counter() - began)
if __name__ == "__main__":
    with multiprocessing.Pool({num_envs}) as pool:
        print(json.dumps({{"steps_per_s": sum(pool.map(work, range({num_envs})))}}))
"""


def peer_steps_per_s(name: str, seconds: float = 6.0) -> float:
    """Returns control steps per second of a peer, over all worker processes.

    Each worker steps its env without coordination. This favours the peer: a vector env would be slower.

    Raises:
        RobotRLError: the peer cannot be installed, or its program fails.
    """
    peer = PEERS[name]
    python = environment(name, peer.packages, at="bench sim", remedy=" Use peers=false to leave peers out.")
    program = python.parent / "steps_per_s.py"
    program.write_text(_WORKER.format(make_env=peer.make_env, seconds=seconds, num_envs=peer.num_envs))
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, program], capture_output=True, text=True, env=variables, timeout=300)
    if done.returncode != 0:
        raise RobotRLError(f"bench sim: the peer {name} failed:\n{done.stderr[-800:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["steps_per_s"])


def cache_folder(*names: str) -> Path:
    """Returns a folder of the user's cache, where benchmarks keep what they need again."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")).joinpath("robot_rl", *names)


def environment(name: str, packages: tuple[str, ...], *, at: str, remedy: str = "") -> Path:
    """Returns the Python of a virtual environment with these packages, made on first use.

    Raises:
        RobotRLError: the packages cannot be installed; `at` begins the message, `remedy` ends it.
    """
    cache = cache_folder("peers", name)
    python, ready = cache / "bin" / "python", cache / "ready.json"
    if ready.exists() and json.loads(ready.read_text()) == list(packages):
        return python
    uv = Path(sys.prefix) / "bin" / "uv"
    for command in (
        [uv, "venv", "--clear", "--quiet", "--python", sys.executable, cache],
        [uv, "pip", "install", "--quiet", "--python", python, *packages],
    ):
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            raise RobotRLError(
                f"{at}: cannot install the peer {name} ({', '.join(packages)}): "
                f"{reason.strip()[-400:]}{remedy}"
            ) from error
    ready.write_text(json.dumps(list(packages)))
    return python
