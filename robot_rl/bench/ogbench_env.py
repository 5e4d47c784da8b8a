"""OGBench's cube tasks (Park et al. 2025) in their own virtual environment: their pins exclude our MuJoCo.

    env.kind=gym env.id=robot_rl.bench.ogbench_env:ogbench/cube-single-v0

A program there answers each line of JSON with a line of JSON. Its scripted oracle collects play data with
random targets, which go through a file. The reward is that of the single tasks: minus the number of cubes
that are not at their goal; at 0 the episode ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from robot_rl.bench.peers import environment
from robot_rl.core.errors import RobotRLError

Array = NDArray[Any]

PACKAGES = ("ogbench==1.2.1", "mujoco==3.3.7")
NUM_ACTIONS = 5
"""Along x, y and z, about z, gripper."""
TASKS = {"cube-single": (28, 200), "cube-double": (37, 500)}
"""Name -> elements of the state, control steps of an episode."""

_PROGRAM = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever the libraries print is no answer
import gymnasium, numpy as np
import ogbench
from ogbench.manipspace import lie
from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle
from ogbench.relabel_utils import relabel_dataset

name, plays = sys.argv[1], sys.argv[2] == "oracle"
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

expert = ob = None

def reset(seed):
    global expert, ob
    np.random.seed(seed)
    ob = task.reset(seed=seed)[0]
    expert = Expert()
    return {"obs": ob.tolist()}

def step(action):
    global ob
    ob, reward, terminated, truncated, info = task.step(expert.act(ob) if plays else np.array(action))
    return {"obs": ob.tolist(), "reward": float(reward), "terminated": bool(terminated),
            "truncated": bool(truncated), "success": bool(info["success"])}

does = {"collect": collect, "reset": reset, "step": step}
for line in sys.stdin:
    question = json.loads(line)
    answers.write(json.dumps(does[question.pop("do")](**question)))
    answers.write("\\n")
    answers.flush()
"""


class Program:
    """A process of OGBench."""

    def __init__(self, task: str, *, oracle: bool = False) -> None:
        """Starts the process; with `oracle` OGBench's oracle acts and ignores the actions.

        Raises:
            RobotRLError: OGBench cannot be installed.
        """
        python, self._task = environment("ogbench", PACKAGES, at="bench ogbench"), task
        self._log, name = tempfile.mkstemp()
        os.unlink(name)
        self._process = subprocess.Popen(
            [python, "-c", _PROGRAM, task, "oracle" if oracle else "policy"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """Returns the answer to a question.

        Raises:
            RobotRLError: the process failed; the message has the end of its output.
        """
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
            output = os.pread(self._log, 2**20, 0).decode(errors="replace")[-800:]
            raise RobotRLError(f"bench ogbench: {self._task} failed:\n{output}")
        return json.loads(answer)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        os.close(self._log)


class Cubes(gymnasium.Env[Array, Array]):
    """A task of OGBench; its process starts with the first episode."""

    def __init__(self, task: str, *, oracle: bool = False) -> None:
        """Args: task: of `TASKS`. oracle: OGBench's oracle acts, which knows more than the observation."""
        self.dt = 0.05
        self.metadata = {"repeats": True}  # its seed decides: making it starts no process
        self.observation_space = Box(-np.inf, np.inf, (TASKS[task][0],), np.float32)
        self.action_space = Box(-1.0, 1.0, (NUM_ACTIONS,), np.float32)
        self._task, self._oracle = task, oracle
        self._program: Program | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begins the episode of a seed, modulo 2^31."""
        super().reset(seed=seed)
        if self._program is None:
            self._program = Program(self._task, oracle=self._oracle)
        number = int(self.np_random.integers(2**31)) if seed is None else seed % 2**31
        return np.array(self._program.ask(do="reset", seed=number)["obs"], np.float32), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        assert self._program is not None, "step before the first reset"
        found = self._program.ask(do="step", action=[float(value) for value in action])
        obs = np.array(found["obs"], np.float32)
        return obs, found["reward"], found["terminated"], found["truncated"], {"success": found["success"]}

    def close(self) -> None:
        if self._program is not None:
            self._program.close()


def env_id(task: str) -> str:
    """Returns the name for `env.id` and `gymnasium.make`."""
    return f"{__name__}:ogbench/{task}-v0"


for _task, (_, _steps) in TASKS.items():
    gymnasium.register(
        f"ogbench/{_task}-v0", f"{__name__}:Cubes", max_episode_steps=_steps, kwargs={"task": _task}
    )
