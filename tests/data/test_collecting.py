"""What a collection says of itself is what was written, or refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.collecting import COLLECTED, collecting, is_published
from robot_rl.data.episode import Episode
from robot_rl.data.keep import Facts
from robot_rl.data.lerobot.damage import check
from tests.data.lerobot.conftest import make_episode

SETTINGS = {"task": "pick_cube", "seed": 3}


def collected(out: Path, make: Callable[..., Episode] = make_episode) -> Path:
    facts = Facts(success=np.ones(2, bool), steps=np.array([5, 6]), roughness=np.zeros(2))
    with collecting(out, SETTINGS) as into:
        into.add(facts, [make(steps, seed=steps, cameras=()) for steps in (5, 6)])
        into.publish([0, 1], {"settings": SETTINGS})
    return out


def test_how_episodes_were_collected_has_a_checksum(tmp_path: Path) -> None:
    """The seed is another one after a bit has turned: 3 is 0x33, 2 is 0x32."""
    out = collected(tmp_path / "set")
    assert check(out, thorough=True) == []
    path = out / COLLECTED
    path.write_text(path.read_text().replace('"seed": 3', '"seed": 2'))
    assert [COLLECTED in problem.message for problem in check(out, thorough=True)] == [True]
    (tmp_path / ".collecting-set").mkdir()  # as after a kill: `collect` looks at what is in its place
    (tmp_path / ".collecting-set/settings.json").write_text("{}")
    with pytest.raises(DatasetError, match=r"collected.json: damaged: it does not match its 'checksum'"):
        is_published(out, SETTINGS)
