"""Cameras by hand: which numbers are places, and that what a picture does not show is not guessed."""

from typing import Any

import numpy as np
import pytest

from robot_rl.bench import cameras
from robot_rl.bench.cameras import learned, places_of
from robot_rl.core.errors import ConfigError
from robot_rl.core.names import PRIVILEGED
from robot_rl.data.episodes import Episodes, EpisodesMeta

FRAMES, PER_EPISODE, SIDE = 300, 6, 32


def test_places_are_those_that_the_tool_sees_or_else_all() -> None:
    names = ("tool.linvel.0", "cube.pos.0", "cube.pos.1", "cube_in_tool.pos.0", "cube_in_tool.xaxis.0")
    assert places_of(names) == {"cube_in_tool": [3]}
    assert places_of(names[:3]) == {"cube": [1, 2]}


def dots() -> Episodes:
    """Returns frames: `seeing` shows a red square where `privileged.state` says, `blind` nothing."""
    rng = np.random.default_rng(0)
    corner = rng.integers(2, SIDE - 6, (FRAMES, 2))
    seeing = np.full((FRAMES, SIDE, SIDE, 3), 90, np.uint8)
    for picture, (row, column) in zip(seeing, corner, strict=True):
        picture[row : row + 4, column : column + 4] = (220, 30, 30)
    places = np.concatenate([corner / SIDE, np.zeros((FRAMES, 1))], axis=1).astype(np.float32)
    last = np.arange(FRAMES) % PER_EPISODE == PER_EPISODE - 1
    meta: dict[str, Any] = {"task": "dots", "robot": "none", "control_hz": 10.0, "instruction": ""}
    return Episodes(
        meta=EpisodesMeta(**meta, state_names=("a",), action_names=("x",)),
        obs={
            "state": np.zeros((FRAMES, 1), np.float32),
            "seeing.rgb": seeing,
            "blind.rgb": np.full_like(seeing, 90),
            PRIVILEGED: places,
        },
        action=np.zeros((FRAMES, 1), np.float32),
        reward=np.zeros(FRAMES, np.float32),
        terminated=last,
        truncated=~last & last,
        success=last,
        episode_index=np.arange(FRAMES) // PER_EPISODE,
        final_obs={},
    )


def test_an_encoder_finds_what_a_camera_shows_and_not_what_none_shows() -> None:
    seen, places, told = dots(), {"dot": [0, 1, 2]}, list[int]()
    found = learned(seen, ("seeing",), places, 150, 0, told.append)["dot"]
    blind = learned(seen, ("blind",), places, 20, 0, lambda done: None)["dot"]
    assert told == list(range(1, 151))
    assert len(found) == FRAMES // 5  # every fifth episode
    # A picture is 1 m wide: the mean distance of two of its points is 0.4 m, a pixel 31 mm.
    assert np.median(blind) > 250
    assert np.median(found) < 31


def test_rows_say_which_set_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"left": 12.0, "left+right": 8.0}
    monkeypatch.setattr(
        cameras,
        "learned",
        lambda seen, used, places, *rest: {"goal_in_tool": np.full(4, errors["+".join(used)])},
    )
    result = cameras.run(tasks=("reach",), sets=tuple(errors), episodes=5, pixels=16, noise_m=0.0)
    assert [(row["cameras"], row["median_mm"], row["decides"]) for row in result["rows"]] == [
        ("left", 12.0, False),
        ("left+right", 8.0, True),
    ]


@pytest.mark.parametrize(("how", "key"), [({"episodes": 4}, "episodes"), ({"updates": 0}, "updates")])
def test_bad_input(how: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"bench cameras: {key}: got"):
        cameras.run(**how)
