"""Suites of vla-eval for tests: one of our tasks, and one that only shows pictures."""

from typing import Any

import numpy as np
from vla_eval.benchmarks.base import StepBenchmark, StepResult
from vla_eval.specs import IMAGE_RGB, LANGUAGE, DimSpec

from robot_rl.rollout.envs import make_env
from robot_rl.sim.vector import EnvConfig

played: list[np.ndarray] = []
"""The actions that arrived since the test began, in order."""


class OurTask(StepBenchmark):
    """An episode of a task of ours for each seed."""

    def __init__(self, env: dict[str, Any], seeds: list[int], send_state: bool = False) -> None:
        super().__init__()
        self.config, self.seeds, self.sends_state = EnvConfig(**env), seeds, send_state
        self.env: Any = make_env(self.config, 1, autoreset="disabled")
        self.is_solved = False

    def get_tasks(self) -> list[dict[str, Any]]:
        return [{"name": f"{self.config.task} {seed}", "seed": seed} for seed in self.seeds]

    def reset(self, task: dict[str, Any]) -> Any:
        obs, infos = self.env.reset(seed=[task["seed"]])
        self.is_solved = bool(infos["success"][0]) if "success" in infos else False
        return obs

    def step(self, action: dict[str, Any]) -> StepResult:
        played.append(action["actions"])
        obs, reward, terminated, truncated, infos = self.env.step(action["actions"][None])
        self.is_solved |= bool(infos["success"][0])
        return StepResult(obs, float(reward[0]), bool(terminated[0] | truncated[0]), {})

    def make_obs(self, raw_obs: Any, task: dict[str, Any]) -> dict[str, Any]:
        images = {
            name.removesuffix(".rgb"): rows[0] for name, rows in raw_obs.items() if name.endswith(".rgb")
        }
        shown: dict[str, Any] = {"images": images, "task_description": self.env.instruction}
        if self.sends_state:
            shown |= {"states": raw_obs["state"][0], "state_names": list(self.env.state_names)}
        return shown

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        return {"success": self.is_solved}

    def get_metadata(self) -> dict[str, Any]:
        return {"max_steps": self.env.horizon}

    def cleanup(self) -> None:
        self.env.close()


class Pictures(StepBenchmark):
    """Shows noise by a camera, for five steps."""

    def __init__(self, height: int = 32, camera: str = "agentview", send_state: bool = False) -> None:
        super().__init__()
        self.height, self.camera, self.sends_state, self.count = height, camera, send_state, 0

    def get_tasks(self) -> list[dict[str, Any]]:
        return [{"name": "noise"}]

    def reset(self, task: dict[str, Any]) -> int:
        self.count = 0
        return 0

    def step(self, action: dict[str, Any]) -> StepResult:
        played.append(action["actions"])
        self.count += 1
        return StepResult(self.count, 0.0, self.count == 5, {})

    def make_obs(self, raw_obs: int, task: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(raw_obs)
        picture = rng.integers(0, 256, (self.height, 32, 3), dtype=np.uint8)
        state = {"states": rng.normal(size=3).astype(np.float32)} if self.sends_state else {}
        return {"images": {self.camera: picture}, "task_description": "put it away", **state}

    def get_step_result(self, step_result: StepResult) -> dict[str, Any]:
        return {"success": True}

    def get_observation_spec(self) -> dict[str, DimSpec]:
        return {self.camera: IMAGE_RGB, "language": LANGUAGE, "state": DimSpec("state", 3, "a b c")}
