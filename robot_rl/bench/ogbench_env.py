"""OGBench's cube tasks (Park et al. 2025) in an environment of their own: their pins exclude this MuJoCo.

A program there answers one line of JSON with another; play data, which its own scripted oracle collects
on targets of its choice, go through a file. The reward is the single-task one: minus the number of cubes
that are not at their goal, 0 and the end where all are.
T control steps, E episodes.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.bench.peers import cache_folder, environment
from robot_rl.core.errors import RobotRLError
from robot_rl.data.episodes import Episodes, EpisodesMeta

PACKAGES = ("ogbench==1.2.1", "mujoco==3.3.7")
ACTIONS = ("x", "y", "z", "yaw", "gripper")
CONTROL_HZ = 20.0

_PROGRAM = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever the libraries print is no answer
import gymnasium, numpy as np
import ogbench
from ogbench.manipspace import lie
from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle
from ogbench.relabel_utils import relabel_dataset

name = sys.argv[1]
task = gymnasium.make(f"{name}-singletask-v0", disable_env_checker=True)

def collect(steps, seed, path):
    env = gymnasium.make(f"{name}-v0", mode="data_collection", terminate_at_goal=False,
                         max_episode_steps=1000, disable_env_checker=True)
    oracle = CubePlanOracle(env=env)
    np.random.seed(seed)
    state, action, qpos, ends, final = [], [], [], [], []
    while len(state) < steps:
        ob, info = env.reset(seed=seed + len(final))
        oracle.reset(ob, info)
        done = False
        while not done:
            chosen = np.clip(oracle.select_action(ob, info), -1.0, 1.0)
            state.append(ob)
            action.append(chosen)
            qpos.append(env.unwrapped._data.qpos.copy())
            ob, _, terminated, truncated, info = env.step(chosen)
            done = terminated or truncated or len(state) == steps
            ends.append(done)
            if oracle.done and not done:
                ob, info = env.unwrapped.set_new_target()
                oracle.reset(ob, info)
        final.append(ob)
    found = {"qpos": np.array(qpos)}
    relabel_dataset(name, task, found)
    np.savez(path, state=np.array(state, np.float32), action=np.array(action, np.float32),
             ends=np.array(ends), final=np.array(final, np.float32),
             reward=found["rewards"], solved=found["masks"] == 0)
    return {}

class Expert:
    # Brings one cube after another to its goal, until all are there.
    def __init__(self):
        self.env, self.oracle = task.unwrapped, CubePlanOracle(env=task)
        self.cube = None

    def act(self, ob):
        if self.cube is None or self.oracle.done:
            away = [cube for cube in range(self.env._num_cubes) if not self.env._compute_successes()[cube]]
            self.cube = away[0] if away else 0
            self.oracle.reset(ob, self.info())
        return np.clip(self.oracle.select_action(ob, self.info()), -1.0, 1.0)

    def info(self):
        goal = self.env._cube_target_mocap_ids[self.cube]
        turned = lie.SO3(wxyz=self.env._data.mocap_quat[goal]).compute_yaw_radians()
        return {**self.env.compute_ob_info(), "privileged/target_block": self.cube,
                "privileged/target_block_pos": self.env._data.mocap_pos[goal].copy(),
                "privileged/target_block_yaw": np.array([turned])}

expert = None

def reset(seed):
    global expert
    np.random.seed(seed)
    ob = task.reset(seed=seed)[0]
    expert = Expert()
    return {"obs": ob.tolist()}

def oracle(obs):
    return {"action": expert.act(np.array(obs)).tolist()}

def step(action):
    ob, reward, terminated, truncated, info = task.step(np.array(action))
    return {"obs": ob.tolist(), "reward": float(reward), "terminated": bool(terminated),
            "truncated": bool(truncated), "success": bool(info["success"])}

does = {"collect": collect, "reset": reset, "step": step, "oracle": oracle}
for line in sys.stdin:
    question = json.loads(line)
    answers.write(json.dumps(does[question.pop("do")](**question)))
    answers.write("\\n")
    answers.flush()
"""


class Cubes:
    """One simulation of a task, in a process of its own; a context manager."""

    def __init__(self, task: str) -> None:
        """Starts the process.

        Raises:
            RobotRLError: OGBench cannot be installed.
        """
        python = environment("ogbench", PACKAGES, at="bench ogbench")
        program = python.parent / "cubes.py"
        program.write_text(_PROGRAM)
        self._task = task
        self._log = python.parent / f"cubes-{os.getpid()}.log"
        self._process = subprocess.Popen(
            [python, program, task],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        )

    def __enter__(self) -> Cubes:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.unlink(missing_ok=True)

    def reset(self, seed: int) -> NDArray[np.float32]:
        """Begins an episode and returns the observation."""
        return np.array(self._ask(do="reset", seed=seed)["obs"], np.float32)

    def step(self, action: NDArray[Any]) -> dict[str, Any]:
        """Takes a control step; returns obs, reward, terminated, truncated and success."""
        found = self._ask(do="step", action=[float(value) for value in action])
        return found | {"obs": np.array(found["obs"], np.float32)}

    def oracle(self, obs: NDArray[Any]) -> NDArray[np.float32]:
        """Returns what OGBench's own oracle would do now, which sees more than the observation."""
        return np.array(self._ask(do="oracle", obs=obs.tolist())["action"], np.float32)

    def play(self, steps: int, seed: int) -> Episodes:
        """Returns the oracle's play of that many control steps, collected once and then kept."""
        path = cache_folder("ogbench_play") / f"{self._task}-{steps}-seed{seed}.npz"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".writing-{os.getpid()}-{path.name}")
            self._ask(do="collect", steps=steps, seed=seed, path=str(unfinished))
            unfinished.rename(path)
        return episodes_of(self._task, dict(np.load(path)))

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            answer = ""
        else:
            answer = self._process.stdout.readline()
        if not answer:
            raise RobotRLError(f"bench ogbench: {self._task} failed:\n{_tail(self._log)}")
        return json.loads(answer)


def episodes_of(task: str, play: dict[str, NDArray[Any]]) -> Episodes:
    """Returns play data as episodes that end wherever the task would, and where the clock ended them.

    Args:
        task: its name.
        play: state (T, F), action (T, A), reward (T,), solved (T,) and ends (T,), and final (E, F), what
            each of the E recorded episodes led to. `solved` speaks of the state that a step begins in.
    """
    state, solved, ends = play["state"], play["solved"].astype(bool), play["ends"].astype(bool)
    over = solved | ends
    after = np.concatenate([state[1:], state[:1]])
    after[ends] = play["final"]
    return Episodes(
        meta=EpisodesMeta(
            task=task,
            robot="ur5e",
            control_hz=CONTROL_HZ,
            instruction=task,
            state_names=tuple(f"state_{i}" for i in range(state.shape[1])),
            action_names=ACTIONS,
        ),
        obs={"state": state},
        action=play["action"],
        reward=play["reward"],
        terminated=solved,
        truncated=ends & ~solved,
        success=solved,
        episode_index=np.concatenate([[0], np.cumsum(over)[:-1]]),
        final_obs={"state": after[over]},
    )


def _tail(path: Path) -> str:
    return path.read_text()[-800:] if path.exists() else ""
