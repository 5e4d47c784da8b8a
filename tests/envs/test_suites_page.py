"""What docs/suites.md has people write, with doubles of the suites: none of these is installed here."""

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from robot_rl.envs import gym
from robot_rl.envs.gym import GymVectorEnv

PAGE = Path(__file__).resolve().parents[2] / "docs/suites.md"


class Suite(gymnasium.Env[Any, Any]):
    """As the suites do, it ignores the seed of a reset, and draws from a generator of its own."""

    observation_space = Box(-1.0, 1.0, (1,))
    action_space = Box(-1.0, 1.0, (1,))

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self._look(), 0.3, False, False, {"success": float(self._check_success())}

    def _check_success(self) -> bool:
        return self.count == 3

    def _look(self) -> Any:
        return self.rng.uniform(size=1).astype(np.float32)


class Seeded(Suite):
    """As ManiSkill's: the seed of a reset decides."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.seed(seed)
        return super().reset()


def _pick(**how: Any) -> Any:
    assert (how["obs_mode"], how["render_backend"], how["num_envs"]) == ("state", "none", 1)
    return Seeded()


class ActorBuilder:
    """Of SAPIEN: without a Vulkan device the second fails."""

    def add_box_collision(self) -> str:
        return "hard"

    def add_box_visual(self, pose: Any) -> Any:
        raise RuntimeError("failed to find a rendering device")


def _sapien() -> dict[str, ModuleType]:
    """Returns doubles of SAPIEN's and ManiSkill's modules by their names."""
    names = (
        "sapien",
        "sapien.wrapper",
        "mani_skill",
        "mani_skill.envs",
        "mani_skill.utils.wrappers.gymnasium",
    )
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    for parent in ("mani_skill.utils", "mani_skill.utils.wrappers"):
        modules[parent] = ModuleType(parent)
    modules["sapien"].render = SimpleNamespace(RenderMaterial=None)
    builder = type("ActorBuilder", (), dict(vars(ActorBuilder)))  # the page changes it
    modules["sapien.wrapper"].actor_builder = SimpleNamespace(ActorBuilder=builder)
    modules["sapien.wrapper"].urdf_loader = SimpleNamespace(RenderMaterial=None)
    modules["mani_skill.utils.wrappers.gymnasium"].CPUGymWrapper = lambda env: env
    return modules


def _reach(**how: Any) -> Any:
    assert how == {"env_name": "reach-v3", "seed": 42}
    return Suite()


@pytest.fixture
def my_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Writes the page's module into the working folder, with doubles of what it imports."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_suites.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    suite = Suite()
    robosuite: Any = ModuleType("robosuite")
    robosuite.make = lambda *names, **how: suite
    wrappers: Any = ModuleType("robosuite.wrappers")
    wrappers.GymWrapper = lambda env, **how: env
    for name, module in {"robosuite": robosuite, "robosuite.wrappers": wrappers, **_sapien()}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "metaworld", ModuleType("metaworld"))
    monkeypatch.delitem(sys.modules, "my_suites", raising=False)
    return runpy.run_path(str(tmp_path / "my_suites.py"))


@pytest.mark.usefixtures("my_suites")
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("suite", ["lift", "meta_world", "mani_skill"])
def test_suites_are_adapted(suite: str, sparse: bool, caplog: pytest.LogCaptureFixture) -> None:
    gym._warn_about_seeds.cache_clear()
    gymnasium.register("Meta-World/MT1", entry_point=_reach, max_episode_steps=500)
    gymnasium.register("PickCube-v1", entry_point=_pick)
    names = {"meta_world": {"name": "reach-v3"}, "mani_skill": {"name": "PickCube-v1"}}
    settings = {"sparse": sparse, "max_episode_steps": 4, **names.get(suite, {})}
    try:
        env = GymVectorEnv(f"my_suites:{suite}", settings=settings, autoreset="disabled")
    finally:
        del gymnasium.registry["Meta-World/MT1"], gymnasium.registry["PickCube-v1"]
    assert not caplog.messages  # the seed decides the episode
    env.reset(seed=4)
    steps = [env.step(np.zeros((1, 1))) for _ in range(3)]
    assert [bool(step[4]["success"][0]) for step in steps] == [False, False, True]
    assert [float(step[1][0]) for step in steps] == ([0.0, 0.0, 1.0] if sparse else [0.3, 0.3, 0.3])
    assert [bool(step[2][0]) for step in steps] == [False, False, sparse]


def test_the_expert_of_lift_goes_above_then_down_then_closes_then_lifts(my_suites: dict[str, Any]) -> None:
    level = np.array([0.0, 0.0, 0.0, 1.0])
    turned = np.array([0.0, 0.0, np.sin(0.2), np.cos(0.2)])  # 0.4 rad about the vertical

    def act(gap: Any, cube: Any = level, width: float = 0.08) -> Any:
        return my_suites["lifts"](
            {
                "gripper_to_cube_pos": np.array(gap),
                "robot0_gripper_qpos": [width / 2, -width / 2],
                "cube_quat": cube,
                "robot0_eef_quat": level,
            }
        )

    # 2 cm beside and 6 cm + 1 cm above: 0.02 / 0.05 along x, (-0.07 + 0.06) / 0.05 down, fingers open
    np.testing.assert_allclose(act([0.02, 0.0, -0.07]), [0.4, 0, -0.2, 0, 0, 0, -1], atol=1e-9)
    np.testing.assert_allclose(act([0.0, 0.0, -0.06], turned), [0, 0, 0, 0, 0, 0.8, -1], atol=1e-9)
    np.testing.assert_allclose(act([0.0, 0.0, -0.04]), [0, 0, -0.8, 0, 0, 0, -1], atol=1e-9)
    np.testing.assert_allclose(act([0.0, 0.0, 0.0]), [0, 0, 0, 0, 0, 0, 1], atol=1e-9)
    np.testing.assert_allclose(act([0.0, 0.0, 0.0], width=0.05), [0, 0, 1, 0, 0, 0, 1], atol=1e-9)


def test_maniskill_is_built_where_nothing_can_be_drawn(my_suites: dict[str, Any]) -> None:
    my_suites["without_looks"]()
    sapien: Any = sys.modules["sapien"]
    wrapper: Any = sys.modules["sapien.wrapper"]
    builder = wrapper.actor_builder.ActorBuilder()
    assert builder.add_box_visual("here") is builder
    assert builder.add_box_collision() == "hard"
    for place in (sapien.render, wrapper.urdf_loader):
        assert place.RenderMaterial(base_color=(1, 0, 0, 1)) is not None


def test_the_expert_of_pick_cube_goes_above_then_down_then_closes_then_to_the_goal(
    my_suites: dict[str, Any],
) -> None:
    def act(gap: Any, held: float = 0.0) -> Any:
        return my_suites["picks"](np.array([*[9.0] * 18, held, *[9.0] * 17, *gap, 0.05, 0.0, -0.2]))

    # 2 cm to the side: 0.02 / 0.1 along x, (-0.07 + 0.06) / 0.1 down, fingers open
    np.testing.assert_allclose(act([0.02, 0.0, -0.07]), [0.2, 0, -0.1, 1], atol=1e-9)
    np.testing.assert_allclose(act([0.0, 0.01, -0.04]), [0, 0.1, -0.4, 1], atol=1e-9)
    np.testing.assert_allclose(act([0.0, 0.0, -0.005]), [0, 0, -0.05, -1], atol=1e-9)
    np.testing.assert_allclose(act([0.0, 0.0, 0.0], held=1.0), [0.5, 0, -1, -1], atol=1e-9)
