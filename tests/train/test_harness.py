"""vla-eval's own client plays episodes against a served policy: the same actions as `robot-rl evaluate`."""

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.core.language import decode_text
from robot_rl.data.lerobot.pictures import resize_pictures
from robot_rl.policies.checkpoint import PolicyMeta, save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.linear import LinearPolicy
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy
from robot_rl.rollout.envs import make_env
from robot_rl.rollout.evaluate import EvalResult, evaluate_in
from robot_rl.sim.vector import EnvConfig

pytest.importorskip("vla_eval", reason="the extra harness is not installed: pip install -e '.[harness]'")

from vla_eval.api import run
from vla_eval.specs import GRIPPER_CLOSE_POS, POSITION_DELTA, check_specs

from robot_rl.train.harness import HarnessServer, seed_of
from tests.train import harness_suites
from tests.train.harness_suites import OurTask, Pictures

ENV: dict[str, Any] = {"task": "reach", "horizon_s": 0.7, "num_threads": 1}
SEEDS = list(range(5, 11))
META = PolicyMeta(
    task="noise",
    robot="panda",
    control_hz=20.0,
    state_names=("a", "b", "c"),
    action_names=("x", "y"),
    instruction="put it away",
    n_exec=2,
)
SEEN = EnvConfig(cameras=("front",), image_size=(32, 32))
_COMMAND = "import sys; from robot_rl.cli.main import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def played() -> Iterator[list[np.ndarray]]:
    """The actions that suites got."""
    harness_suites.played.clear()
    yield harness_suites.played
    harness_suites.played.clear()


def asked(url: str, suite: type, **params: Any) -> dict[str, Any]:
    """Returns what vla-eval says of one episode of every task of a suite."""
    name = f"tests.train.harness_suites:{suite.__name__}"
    config = {
        "server": {"url": url},
        "benchmarks": [{"benchmark": name, "episodes_per_task": 1, "params": params}],
    }
    return run(config, no_save=True, docker=False)[0]


def episodes_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [episode for task in result["tasks"] for episode in task["episodes"]]


def meta_of(env: Any) -> PolicyMeta:
    names = ("task", "robot", "control_hz", "state_names", "action_names", "instruction")
    return PolicyMeta(**{name: getattr(env, name) for name in names}, n_exec=4)


def towards(names: tuple[str, ...]) -> LinearPolicy:
    """Moves the tool towards the goal, by 10 times the distance in metres."""
    weight = torch.zeros(len(names), 8, 4)
    for axis in range(3):
        weight[names.index(f"goal.pos.{axis}"), :, axis] = 10.0
        weight[names.index(f"tool.pos.{axis}"), :, axis] = -10.0
    return LinearPolicy(weight, torch.zeros(8, 4))


def residual(state_dim: int, action_dim: int, cameras: tuple[str, ...] = ()) -> ResidualPolicy:
    """A flow, whose noise shows which seed it got, and a head that corrects every action."""
    generator = torch.Generator().manual_seed(0)
    config = ChunkPolicyConfig(horizon=8, width=16, depth=1, time_dim=4, cameras=cameras, random_shift_px=0)
    flow = FlowPolicy(config, state_dim=state_dim, action_dim=action_dim, generator=generator)
    policy = ResidualPolicy(flow, ResidualHeadConfig(width=16), scale=0.5, generator=generator)
    torch.nn.init.normal_(dict(policy.head.named_parameters())["trunk.out.weight"], generator=generator)
    return policy.eval()


def at_home(policy: Any) -> EvalResult:
    with closing(make_env(EnvConfig(**ENV), 1, autoreset="disabled")) as env:
        return evaluate_in(env, policy, seeds=np.array(SEEDS, np.uint64), n_exec=4)


def digest(actions: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(action.astype("<f4").tobytes() for action in actions)).hexdigest()


@pytest.fixture(scope="module")
def reach() -> Iterator[Any]:
    with closing(make_env(EnvConfig(**ENV), 1, autoreset="disabled")) as env:
        yield env


@pytest.mark.parametrize("kind", ["linear", "residual"])
def test_a_suite_gets_the_actions_of_an_evaluation(kind: str, reach: Any, played: list[np.ndarray]) -> None:
    names = reach.state_names
    policy: Any = towards(names) if kind == "linear" else residual(len(names), len(reach.action_names))
    home = at_home(policy)
    server = HarnessServer(policy, meta_of(reach), EnvConfig(**ENV))
    with server.listen("127.0.0.1", 0) as handle:
        result = asked(handle.url, OurTask, env=ENV, seeds=SEEDS)
    episodes = episodes_of(result)
    assert [episode["metrics"]["success"] for episode in episodes] == home.success.tolist()
    assert [episode["steps"] for episode in episodes] == home.steps.tolist()
    assert digest(played) == home.action_digest
    assert 0 < home.rate < 1 or kind == "residual"
    assert (server.counts.episodes, server.counts.errors) == (len(SEEDS), 0)
    assert server.counts.actions == home.steps.sum() == len(played)
    assert not server._executors


@pytest.mark.slow
def test_the_command_serves_what_evaluate_evaluates(
    tmp_path: Path, reach: Any, played: list[np.ndarray]
) -> None:
    policy = towards(reach.state_names)
    save_policy(tmp_path / "policy", policy, meta=meta_of(reach))  # as `robot-rl finetune` does
    words = ["serve-policy", f"run={tmp_path}", "protocol=vla-eval", "port=0", "device=cpu", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        address, _, what = process.stderr.readline().partition(": ")
        assert address.startswith("ws://127.0.0.1:")
        assert what == f"{tmp_path / 'policy'} for panda, reach, on cpu\n"
        result = asked(address, OurTask, env=ENV, seeds=SEEDS)
    finally:
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=20)[0].splitlines()
    home = at_home(policy)
    assert result["mean_success"] == round(home.rate, 4)  # as vla-eval rounds it
    assert digest(played) == home.action_digest
    assert said[0] == f"6 episodes, {home.steps.sum()} actions, 0 errors"
    assert json.loads(said[1])["actions"] == home.steps.sum()
    assert process.returncode == 0


def test_a_camera_of_another_name_is_the_policys(played: list[np.ndarray]) -> None:
    policy = residual(3, 2, ("front",))
    server = HarnessServer(policy, META, SEEN, cameras={"front": "agentview"})
    with server.listen("127.0.0.1", 0) as handle:
        result = asked(handle.url, Pictures)  # the server asks for the state by itself
    assert [episode["steps"] for episode in episodes_of(result)] == [5]
    executor, suite = ChunkExecutor(policy, 1, n_exec=2), Pictures(send_state=True)
    executor.reset(seeds=np.array([seed_of({"name": "noise", "episode_idx": 0})], np.uint64))
    for step, action in enumerate(played):
        shown = suite.make_obs(step, {})
        obs = {"state": shown["states"][None], "front.rgb": shown["images"]["agentview"][None]}
        np.testing.assert_array_equal(action, executor.act(obs).action[0])
    assert len(played) == 5


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"camera": "side"}, "images: got side; the policy reads 'agentview'. If the suite has that "
         "camera by another name, give cameras.front=<its name>."),
        ({"height": 24}, "images: agentview: got 'uint8 (24, 32, 3)', allowed: uint8 (32, 32, 3), or larger: "
         "resized as in training"),
        ({"send_state": False}, "state: got NoneType, allowed: an array (3,): a, b, c"),
    ],
)  # fmt: skip
def test_a_suite_gets_to_know_what_does_not_fit(
    params: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = HarnessServer(residual(3, 2, ("front",)), META, SEEN, cameras={"front": "agentview"})
    with server.listen("127.0.0.1", 0) as handle:
        episode = episodes_of(asked(handle.url, Pictures, **params))[0]
    assert episode["failure_reason"] == "model_act"
    assert f"observation: {words}" in episode["failure_detail"]
    assert (server.counts.actions, server.counts.errors) == (0, 1)
    said = [record for record in caplog.records if record.name.endswith("serve")]
    assert [f": observation: {words}" in record.getMessage() for record in said] == [True]
    assert said[0].exc_info is None


def test_larger_pictures_are_resized_as_those_of_datasets_are() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (1, 64, 48, 3), dtype=np.uint8)
    server = HarnessServer(residual(3, 2, ("front",)), META, SEEN)
    read = server._read({"states": np.zeros(3), "images": {"front": rows[0]}})
    np.testing.assert_array_equal(read["front.rgb"], resize_pictures(rows, (32, 32)))
    assert decode_text(read["instruction"]) == ["put it away"]


@pytest.mark.parametrize(
    ("obs", "words"),
    [
        ({"states": np.zeros(8)}, "observation: states: shape: got (8,), allowed: an array (3,): a, b, c"),
        ({"state": np.zeros(3), "state_names": ["a", "c", "b"]},
         "observation: state_names: got a, c, b, allowed: an array (3,): a, b, c"),
        ({"state": {"arm": np.zeros(3)}}, "observation: state: got dict, allowed: an array (3,): a, b, c"),
    ],
)  # fmt: skip
def test_a_state_of_another_layout_is_refused(obs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        HarnessServer(residual(3, 2), META, EnvConfig())._read(obs)
    assert str(refused.value) == words


@pytest.mark.parametrize(
    ("shown", "how", "words"),
    [
        (SEEN, {"cameras": {"wrist": "agentview"}}, "cameras: got 'wrist', allowed: front"),
        (SEEN, {"n_exec": 9}, "n_exec: got 9, allowed: 1 to the policy's 8"),
        (replace(SEEN, environment_state=("goal",)), {},
         "run: environment_state: got ('goal',), allowed: none, since the harness's suites do not send it"),
    ],
)  # fmt: skip
def test_what_no_suite_can_ask_is_refused_at_once(shown: EnvConfig, how: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        HarnessServer(residual(3, 2, ("front",)), META, shown, **how)
    assert str(refused.value) == words


def test_the_harness_is_told_what_actions_and_states_mean(reach: Any) -> None:
    server = HarnessServer(towards(reach.state_names), meta_of(reach), EnvConfig(**ENV))
    action, seen = server.get_action_spec(), server.get_observation_spec()
    assert action["position"] == POSITION_DELTA
    theirs = {"position": POSITION_DELTA, "gripper": GRIPPER_CLOSE_POS}
    assert check_specs(action, theirs, seen, seen) == [
        "action [gripper]: gripper: binary_close_negative vs binary_close_positive"
    ]
    assert (seen["state"].dims, seen["state"].format) == (24, " ".join(reach.state_names))
    others = HarnessServer(residual(3, 2, ("front",)), META, SEEN, cameras={"front": "agentview"})
    assert list(others.get_observation_spec()) == ["agentview", "state"]
    assert [spec.format for spec in others.get_action_spec().values()] == ["x y"]


def test_the_noise_of_an_episode_depends_on_its_task_alone() -> None:
    assert seed_of({"name": "a", "seed": 7}) == 7
    one, other = seed_of({"name": "a", "episode_idx": 0}), seed_of({"episode_idx": 0, "name": "a"})
    assert one == other != seed_of({"name": "a", "episode_idx": 1})


def test_a_port_that_is_taken(reach: Any) -> None:
    server = HarnessServer(towards(reach.state_names), meta_of(reach), EnvConfig(**ENV))
    with server.listen("127.0.0.1", 0) as handle, pytest.raises(DeviceError, match="cannot listen at"):
        server.listen("127.0.0.1", handle.port)
