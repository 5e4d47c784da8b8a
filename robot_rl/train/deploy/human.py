"""A person at the arm: takes over at any time, judges, puts the scene back.

    policy --wanted--> [person: lets pass | takes over] --sent--> env --> judge: success, failure

Both streams are kept: what the policy wanted (`policy_action`), what was sent (`action`), and who
sent it (`source`). One arm, so every array has one row; A action dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, SafetyStopError
from robot_rl.hal.vector import Obs, VectorEnv
from robot_rl.real.teleop.intent import Intent, Teleop, check_intent
from robot_rl.sim.vector import MOST_SHAPING
from robot_rl.train.deploy.reward import Judge

Array = NDArray[Any]
Reset = Literal["automatic", "assisted"]

_PUT_BACK = "Put the scene back for the next episode, step away, and confirm."


@runtime_checkable
class Repeatable(Protocol):
    """A `Teleop` that can be put back to where it was: a script."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Intervening(VectorEnv):
    """One arm whose person can take over; it shows SAME_STEP autoreset, as sources expect.

    `infos` adds to that of the env: `human` (1,) bool, `policy_action` (1, A), `source`, and the
    `instruction` that holds.
    """

    def __init__(
        self,
        env: VectorEnv,
        teleop: Teleop,
        judge: Judge,
        *,
        reset: Reset = "automatic",
        reward: Literal["sparse", "dense"] = "sparse",
        label: Literal["sim", "real"] = "sim",
        close: Callable[[], None] | None = None,
    ) -> None:
        """Wraps an env.

        Args:
            env: one row, autoreset DISABLED.
            teleop: the person's input.
            judge: decides when an episode has succeeded or failed.
            reset: `automatic`: the env goes home and puts its scene back; `assisted`: it goes home, a
                person puts the scene back and confirms.
            reward: `sparse`: 1 where the judge sees success, else 0; `dense`: the env's shaping too,
                while the judge sees no success.
            label: the source of steps that the policy makes.
            close: brings the env to rest and gives it back; its own `close` if None.
        """
        if env.num_envs != 1 or env.metadata["autoreset_mode"] is not AutoresetMode.DISABLED:
            raise ConfigError(
                f"human: got {env.num_envs} envs with autoreset {env.metadata['autoreset_mode'].value}, "
                "allowed: one env with autoreset disabled. A person watches one arm."
            )
        self.env, self._teleop, self._judge, self._reset, self._label = env, teleop, judge, reset, label
        self._is_dense = reward == "dense"
        self._close = close or env.close
        self.num_envs = 1
        self.task, self.robot, self.instruction = env.task, env.robot, env.instruction
        self.control_hz, self.caps = env.control_hz, env.caps - {"set_state", "fork"}
        self.limits = env.limits
        self.state_names, self.action_names = env.state_names, env.action_names
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Begins an episode; returns when the person has confirmed, if they assist."""
        obs, infos = self.env.reset(seed=seed, options=options)
        if self._reset == "assisted":
            self._teleop.ask(_PUT_BACK)
            obs, infos = self.env.reset(options=options)  # the observation before shows the old scene
        self._judge.begin()
        self._teleop.begin()
        return obs, infos

    def step_masked(
        self, actions: Array, active: Array | None
    ) -> tuple[Obs, Array, Array, Array, dict[str, Any]]:
        """Asks the person, executes theirs or the policy's action, judges; begins the next episode."""
        if active is not None and not np.all(active):
            raise ConfigError(f"{self.task}: an arm with a person cannot be masked; got {active}.")
        wanted = np.asarray(actions, np.float32)
        intent = self._teleop.read(wanted[0])
        self._follow(intent)
        sent = self._action(intent) if intent.takes_over else wanted
        obs, reward, terminated, truncated, infos = self.env.step(sent)
        success, failed = self._judge(obs, bool(infos["success"][0]), bool(terminated[0]), intent)
        ended = np.array([success or failed])
        truncated = truncated & ~ended
        infos |= {
            "success": np.array([success]),
            "human": np.array([intent.takes_over]),
            "policy_action": wanted,
            "source": "human" if intent.takes_over else self._label,
            "instruction": self.instruction,
        }
        if ended[0] or truncated[0]:
            infos["final_obs"], infos["_final_obs"] = obs, ended | truncated
            obs, _ = self.reset()
        return obs, np.array([self._rewarded(success, float(reward[0]))]), ended, truncated, infos

    def _rewarded(self, success: bool, reward: float) -> float:
        """Returns 1 for success, else the env's shaping, where that is asked for."""
        if success or not self._is_dense:
            return float(success)
        return min(reward, MOST_SHAPING)  # the judge decides, not the env

    def state_dict(self) -> dict[str, Any]:
        """Returns env and person, where both can be put back: a simulation, a script."""
        person = self._teleop.state_dict() if isinstance(self._teleop, Repeatable) else None
        return {"env": self.env.state_dict(), "person": person, "instruction": self.instruction}

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        """Restores `state_dict`."""
        if isinstance(self._teleop, Repeatable):
            self._teleop.load_state_dict(state["person"])
        self.instruction = str(state["instruction"])
        return self.env.load_state_dict(state["env"])

    def _follow(self, intent: Intent) -> None:
        """Stops if the person asks for it, and takes the instruction that they typed."""
        if intent.stop:
            self.env.safe_stop()
            raise SafetyStopError(
                f"{self.task}: the person stopped the arm. Clear the stop (a person does that), then resume."
            )
        if intent.instruction is not None:
            self.instruction = intent.instruction

    def _action(self, intent: Intent) -> Array:
        """Returns the person's action, (1, A)."""
        check_intent(intent, len(self.action_names))
        if intent.joints_rad is None:
            return np.asarray(intent.action, np.float32)[None]
        towards = getattr(self.env, "action_towards", None)
        if towards is None:
            raise ConfigError(
                f"human.input: {type(self.env).__name__} of {self.task!r} does not follow joint targets. "
                "Use keyboard or gamepad, or a task with joint_delta control."
            )
        gripper = 1.0 if intent.gripper is None else intent.gripper
        return towards(intent.joints_rad[None], np.array([gripper])).astype(np.float32)

    def close_extras(self, **kwargs: Any) -> None:
        """Gives back the input device and the env."""
        try:
            self._teleop.close()
        finally:
            self._close()
