"""The conformance suite of envs and devices names the rule that a broken fake breaks."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from robot_rl.hal.conformance import ConformanceError, check_device, check_vector_env
from robot_rl.hal.device import Fence, LeaseLike
from robot_rl.hal.health import Health
from robot_rl.hal.leased import LeasedEnv
from robot_rl.hal.vector import Array, ChunkStep, Obs, VectorEnv
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from robot_rl.testing.devices import FakeEnv, FakeRobot

Step = tuple[Obs, Array, Array, Array, dict[str, Any]]


# What keeps the rules


@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
@pytest.mark.parametrize("lengths", [(None, 7), (5, 7), (1, None), (7, 7)])
def test_the_fake_env_conforms(autoreset: Any, lengths: tuple[int | None, int | None]) -> None:
    terminate, truncate = lengths
    check_vector_env(
        lambda n: FakeEnv(n, terminate_after=terminate, truncate_after=truncate, autoreset=autoreset)
    )


# What breaks a rule


class Broken(FakeEnv):
    """A fake env whose steps pass through `spoil`, which each of its children overrides."""

    def step_masked(self, actions: Array, active: Array | None) -> Step:
        return self.spoil(super().step_masked(actions, active), active)

    def spoil(self, step: Step, active: Array | None) -> Step:
        return step


class WrongType(Broken):
    def spoil(self, step: Step, active: Array | None) -> Step:
        return ({"state": step[0]["state"].astype(np.float64)}, *step[1:])


class NanObservation(Broken):
    def spoil(self, step: Step, active: Array | None) -> Step:
        step[0]["state"][0, -1] = np.nan
        return step


class ExtraKey(Broken):
    def spoil(self, step: Step, active: Array | None) -> Step:
        return ({**step[0], "secret": np.zeros(self.num_envs)}, *step[1:])


class IntegerReward(Broken):
    def spoil(self, step: Step, active: Array | None) -> Step:
        return (step[0], step[1].astype(int), *step[2:])


class FlagAsFloat(Broken):
    def spoil(self, step: Step, active: Array | None) -> Step:
        return (step[0], step[1], step[2].astype(float), *step[3:])


class NoSuccess(Broken):
    def spoil(self, step: Step, active: Array | None) -> Step:
        del step[4]["success"]
        return step


class CommandedOutside(Broken):
    def spoil(self, step: Step, active: Array | None) -> Step:
        step[4]["commanded_action"] = step[4]["commanded_action"] + 5.0
        return step


class NoFinalObs(Broken):
    def spoil(self, step: Step, active: Array | None) -> Step:
        step[4].pop("final_obs", None)
        return step


class FinalObsOfOthers(Broken):
    def spoil(self, step: Step, active: Array | None) -> Step:
        if "_final_obs" in step[4]:
            step[4]["_final_obs"] = np.ones(self.num_envs, bool)
        return step


class NoAutoreset(Broken):
    def spoil(self, step: Step, active: Array | None) -> Step:
        return (step[4].get("final_obs", step[0]), *step[1:])


class SharedNoise(Broken):
    """Rows that depend on how many there are."""

    def spoil(self, step: Step, active: Array | None) -> Step:
        return (step[0], step[1] + self.num_envs, *step[2:])


class Unseeded(Broken):
    def spoil(self, step: Step, active: Array | None) -> Step:
        return (step[0], step[1] + np.random.default_rng().random(), *step[2:])


class StepsWhileWaiting(Broken):
    """Rows that wait for the others are moved all the same."""

    def step_masked(self, actions: Array, active: Array | None) -> Step:
        return super().step_masked(actions, None)


class OneStepChunks(Broken):
    def step_chunk(self, actions: Array, n_exec: int, active: Array | None = None) -> ChunkStep:
        done = super().step_chunk(actions, n_exec, active)
        done.reward[:, 1:] = 0.0
        return done


class ReusedBuffer(Broken):
    """Returns the same array at every step."""

    def spoil(self, step: Step, active: Array | None) -> Step:
        buffer = self.__dict__.setdefault("buffer", np.zeros_like(step[0]["state"]))
        buffer[:] = step[0]["state"]
        return ({"state": buffer}, *step[1:])


class SwallowsNan(Broken):
    def step_masked(self, actions: Array, active: Array | None) -> Step:
        bad = np.isnan(actions).any()
        step = super().step_masked(np.nan_to_num(actions), active)
        if bad:
            step[0]["state"][:] = np.nan
        return step


class ForgetsEpisode(Broken):
    """A state dict without the seeds."""

    def load_state_dict(self, state: dict[str, Any]) -> Obs:
        return self.set_state(state["state"])


class LiveState(Broken):
    """State rows that go on changing."""

    def get_state(self) -> Array:
        rows = super().get_state()
        self.__dict__["rows"] = rows
        return rows

    def spoil(self, step: Step, active: Array | None) -> Step:
        if "rows" in self.__dict__:
            self.__dict__["rows"][:] = super().get_state()
        return step


class SetsEverybody(Broken):
    def set_state(self, rows: Array, mask: Array | None = None) -> Obs:
        return super().set_state(rows, None)


class Chatty(Broken):
    """Claims a cap that does not exist."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.caps = frozenset({"fly"})


class NextStep(Broken):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}


class Nameless(Broken):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.state_names = self.state_names[:-1]


class SeedsEverybody(Broken):
    """Takes None in a list of seeds for a seed."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        if isinstance(seed, list):
            seed = [one or 0 for one in seed]
        return super().reset(seed=seed, options=options)


class ResetsEverybody(FakeEnv):
    """Ignores the reset mask."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, truncate_after=6, autoreset="disabled")

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        return super().reset(seed=seed)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (WrongType, r"step: state: got \(3, 5\) float64, need \(3, 5\) float32"),
        (NanObservation, "step: state: got NaN or infinity, need finite numbers"),
        (ExtraKey, r"step: observation keys: got \['secret', 'state'\], need \['state'\]"),
        (IntegerReward, r"step: reward: got \(3,\) int64, need \(3,\) floats"),
        (FlagAsFloat, r"step: terminated: got .* need \(3,\) bool"),
        (NoSuccess, r"step: infos\['success'\]: got None, need \(3,\) bool"),
        (CommandedOutside, r"step: infos\['commanded_action'\]"),
        (NoFinalObs, r"SAME_STEP: infos\['final_obs'\]: got <class 'NoneType'>"),
        (NoAutoreset, "observation of env 0 after its end: got final_obs again"),
        (SharedNoise, "env 0 of 3, and alone with its seed: step 0: 'reward' differs"),
        (Unseeded, "the same seed twice: step 0: 'reward' differs"),
        (SeedsEverybody, r"reset\(seed=\[1007, None, None\]\): env 1: 'state' differs"),
        (StepsWhileWaiting, "step_chunk and repeated step: env 0"),
        (OneStepChunks, "step_chunk and repeated step: env 0, chunk 0: 'reward' differs"),
        (ReusedBuffer, "an observation returned by step changed in the next step"),
        (SwallowsNan, "step with a NaN action: state: got NaN"),
        (ForgetsEpisode, "load_state_dict: observation: state"),
        (LiveState, "get_state: rows after the next step: got a change, need a copy"),
        (SetsEverybody, "set_state with a mask: the other envs: got a change, need none"),
        (Chatty, r"caps: got \['fly'\], need some of"),
        (NextStep, r"metadata\['autoreset_mode'\]: got AutoresetMode.NEXT_STEP"),
        (Nameless, r"state_names: got 4 names, need one each of \(3, 5\)"),
    ],
)
def test_a_broken_rule_is_named(broken: Callable[[int], VectorEnv], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_vector_env(broken)


def unequal(kind: type[FakeEnv], **options: Any) -> Callable[[int], VectorEnv]:
    """Returns a maker of envs whose first row ends first, so that the others go on."""
    return lambda n: kind(n, truncate_after=[3, *[9] * (n - 1)], **options)


def test_final_obs_of_rows_that_go_on_is_named() -> None:
    with pytest.raises(
        ConformanceError, match=r"_final_obs.*need terminated \| truncated = \[True, False, False\]"
    ):
        check_vector_env(unequal(FinalObsOfOthers))


def test_a_reset_mask_that_is_ignored_is_named() -> None:
    with pytest.raises(ConformanceError, match="reset with a mask: state of the other envs: got a change"):
        check_vector_env(ResetsEverybody)


def test_an_endless_env_is_named() -> None:
    with pytest.raises(
        ConformanceError, match="no episode ended in 50 steps: give make_env a shorter horizon"
    ):
        check_vector_env(lambda n: FakeEnv(n, truncate_after=None), max_steps=50)


class ExecutesWhatWasAsked(SimVectorEnv):
    """Says that the asked targets were executed, whatever safety did to them."""

    def step_masked(self, actions: Array, active: Array | None) -> Step:
        asked_rad = self.controller.targets(np.clip(actions, -1, 1), self.controller.joint_positions())
        step = super().step_masked(actions, active)
        step[4]["executed_target_rad"] = asked_rad
        return step


class ForgetsItsTargets(SimVectorEnv):
    def step_masked(self, actions: Array, active: Array | None) -> Step:
        step = super().step_masked(actions, active)
        del step[4]["executed_target_rad"]
        return step


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ExecutesWhatWasAsked, r"executed_target_rad'\]: change within a control step: got .* need at most"),
        (ForgetsItsTargets, r"executed_target_rad'\]: got \(0,\), need \(2, 7\), a target for each joint"),
    ],
)
def test_an_arm_that_hides_what_safety_did_is_named(kind: type[SimVectorEnv], message: str) -> None:
    config = EnvConfig(task="pick_cube", horizon_s=0.5, num_threads=1)
    with pytest.raises(ConformanceError, match=message):
        check_vector_env(lambda n: kind(config, n), num_envs=2)


# Devices that break a rule


class Unfenced(FakeRobot):
    def open(self, lease: LeaseLike) -> VectorEnv:
        inner = super().open(lease)
        assert isinstance(inner, LeasedEnv)
        return inner.env


class TakesAnyLease(FakeRobot):
    def open(self, lease: LeaseLike) -> VectorEnv:
        inner = super().open(Ticket(self.spec.name, lease.token))
        self._fence = Fence(self.spec.name)
        return inner


class Ticket:
    """A lease with the right name on it."""

    def __init__(self, device: str, token: int) -> None:
        self.device, self.token, self.slot_ids, self.holder = device, token, (0,), "test"


class KeepsMoving(FakeRobot):
    """Says that it stopped."""

    has_stopped = False

    def safe_stop(self) -> None:
        self.has_stopped = True

    def health(self) -> Health:
        health = super().health()
        return replace(health, state="quarantined") if self.has_stopped else health


class StopsInSilence(FakeRobot):
    def safe_stop(self) -> None:
        self.safety.trip("asked to")


class BornIll(FakeRobot):
    def __init__(self) -> None:
        super().__init__()
        self.monitor.stop("since birth")


class AcceptsNan(FakeRobot):
    def act(self, target_rad: Array) -> tuple[Array, Array]:
        return super().act(np.nan_to_num(target_rad))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Unfenced, "step under token 5 after token 6: got no error"),
        (TakesAnyLease, "open with a lease of another device: got no error"),
        (KeepsMoving, "step after safe_stop: got no error"),
        (StopsInSilence, "health after safe_stop: got usable"),
        (BornIll, "health of a fresh device"),
        (AcceptsNan, "step with a NaN action: got no error"),
    ],
)
def test_a_broken_device_is_named(broken: type[FakeRobot], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_device(broken)


# The page about devices


def test_the_snippets_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "devices.md"
    snippets = re.findall(
        r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    for snippet in snippets:
        exec(compile(snippet, str(page), "exec"), {"__name__": "snippet"})
    # Half an action is 0.05 rad; then 40 ms is over the allowed 30.
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "joint positions [0.05 0.05 0.05]"
    assert "40 ms old, allowed is 30 ms" in lines[1]
    assert lines[1].endswith("| health: suspect")
    assert lines[2] == "conforms"
