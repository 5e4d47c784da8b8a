"""Cameras that do not show what the state leaves out are refused; nothing is drawn for it."""

from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest

from robot_rl.config import build
from robot_rl.core.errors import ConfigError
from robot_rl.sim import scene
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.sight import check_sight
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from tests.runs import TINY

OWN = ("joint", "finger", "tool.pos", "tool.xaxis")
TASKS = ("reach", "push_cube", "pick_cube", "open_drawer", "stack_cube", "pick_red_cube")


@pytest.mark.parametrize("task", TASKS)
def test_the_recipes_cameras_show_every_task(task: str) -> None:
    check_sight(EnvConfig(task=task, state=OWN, cameras=("left", "right", "wrist"), image_size=(64, 64)))


def test_a_wrist_alone_does_not_show_where_to_reach() -> None:
    message = (
        r"env\.cameras: got wrist, which show 'goal' at \d+% of 64 starts, and env\.state leaves it out; "
        r"allowed: 50% or more\. Add one that shows it: front, side, overhead, left, right\."
    )
    with pytest.raises(ConfigError, match=message):
        check_sight(EnvConfig(task="reach", state=OWN, cameras=("wrist",)))


def test_what_the_state_has_need_not_be_shown() -> None:
    check_sight(EnvConfig(task="reach", cameras=("wrist",)))


def test_a_camera_that_looks_away_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    added = scene.add_camera

    def away(spec: mujoco.MjSpec, name: str, *, position_m: Any, target_m: Any, **how: Any) -> None:
        if name == "left":  # turned by half a turn
            target_m = 2 * np.asarray(position_m) - np.asarray(target_m)
        added(spec, name, position_m=position_m, target_m=target_m, **how)

    monkeypatch.setattr(scene, "add_camera", away)
    with pytest.raises(ConfigError, match=r"got left, which show 'cube' at 0% of 64 starts.*Add .*: front,"):
        check_sight(EnvConfig(task="pick_cube", state=OWN, cameras=("left",)))
    check_sight(EnvConfig(task="pick_cube", state=OWN, cameras=("left", "right")))


def test_a_narrow_picture_shows_less_to_both_sides() -> None:
    wide, narrow = ((16, 64), (64, 16))
    check_sight(EnvConfig(task="push_cube", state=OWN, cameras=("left",), image_size=wide))
    with pytest.raises(ConfigError, match="got left, which show"):
        check_sight(EnvConfig(task="push_cube", state=OWN, cameras=("left",), image_size=narrow))


def test_a_run_is_refused_before_it_has_a_folder(tmp_path: Path) -> None:
    env = {**TINY["env"], "state": list(OWN), "cameras": ["wrist"], "image_size": [8, 8]}
    with pytest.raises(ConfigError, match=r"env\.cameras: got wrist"):
        phases.run(build(RunConfig, {**TINY, "env": env, "out": str(tmp_path)}))
    assert not list(tmp_path.iterdir())


def test_a_run_with_cameras_may_see_its_past() -> None:
    state = ["joint", "finger", "tool", "last_action", "tool.pos.0.change_2"]
    env = {**TINY["env"], "state": state, "cameras": ["left", "right"], "image_size": [8, 8]}
    phases._look_at_envs(build(RunConfig, {**TINY, "env": env}))
    with pytest.raises(ConfigError, match=r"got wrist, which show 'goal' at"):
        phases._look_at_envs(build(RunConfig, {**TINY, "env": {**env, "cameras": ["wrist"]}}))
