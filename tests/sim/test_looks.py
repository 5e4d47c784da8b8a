"""How a scene looks: other pictures of the same episode, within a range or beyond it."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.core.registry import resolve
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.config import Looks
from robot_rl.sim.domain_config import DomainConfig
from robot_rl.sim.looks import Look, scene_and_looks
from robot_rl.sim.randomize import Vary
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

TASKS = (
    "reach", "push_cube", "pick_cube", "pick_red_cube",
    "stack_cube", "peg_insert", "open_drawer", "gantry_peg",
)  # fmt: skip


def make(looks: Looks, num_envs: int = 4, **options: Any) -> SimVectorEnv:
    settings: dict[str, Any] = {"task": "pick_cube", "num_threads": 1, "looks": looks, **options}
    return SimVectorEnv(EnvConfig(**settings), num_envs)


def played(env: SimVectorEnv) -> NDArray[Any]:
    obs, _ = env.reset(seed=5)
    rows, rng = [obs["state"]], np.random.default_rng(0)
    for _ in range(20):
        action = rng.uniform(-1, 1, (env.num_envs, 5)).astype(np.float32)
        rows.append(env.step(action)[0]["state"])
    return np.stack(rows)


def test_episodes_are_the_same_however_they_look() -> None:
    plain = played(make("fixed", randomize=True))
    for looks in ("varied", "held_out"):
        np.testing.assert_array_equal(played(make(looks, randomize=True)), plain)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("looks", ["varied", "held_out"])
def test_changes_lie_within_their_range_or_beyond_it(task: str, looks: Looks) -> None:
    env = make(looks, 32, task=task)
    env.reset(seed=0)
    described = resolve("task", task)()
    _, terms = scene_and_looks(described, load_robot(described.default_robot), looks)
    assert {term.field for term in terms} >= {"light_pos", "light_diffuse", "cam_pos", "cam_quat", "mat_rgba"}
    for term in terms:
        row, nominal = env.backend.locate(term.field, term.element)
        found = env.backend.expand(term.field).reshape(32, -1, len(nominal))[:, row]
        if term.how == "turn":
            np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0)
            # The product with the inverse has the scalar part cos(|a| / 2), of a turn by the angles a.
            angle = 2.0 * np.arccos(np.clip(found @ nominal, -1.0, 1.0))
            low, high = np.linalg.norm(term.most) * np.array([0.0, 1.0] if looks == "varied" else [1.0, 2.0])
            assert low - 1e-4 < angle.min() < angle.max() < high + 1e-4
            continue
        change = found - nominal if term.how == "add" else found / np.where(nominal, nominal, 1.0) - 1.0
        moves = np.array(term.most) > 0
        np.testing.assert_array_equal(found[:, ~moves], np.broadcast_to(nominal, found.shape)[:, ~moves])
        moves &= nominal != 0 if term.how == "scale" else True
        share = np.abs(change[:, moves]) / np.array(term.most)[moves]
        low, high = (0.0, 1.0) if looks == "varied" else (1.0, 2.0)
        assert share.min() >= low - 1e-9
        assert share.max() <= high + 1e-9
        assert share.max() - share.min() > 0.5


def test_what_is_drawn_differs_between_simulations_and_episodes() -> None:
    env = make("varied", cameras=("left", "wrist"), image_size=(32, 32))
    first, _ = env.reset(seed=[7, 7, 8, 9])
    for camera in ("left.rgb", "wrist.rgb"):
        np.testing.assert_array_equal(first[camera][0], first[camera][1])  # the same seed: the same looks
        assert not np.array_equal(first[camera][0], first[camera][2])
    fixed, _ = make("fixed", cameras=("left",), image_size=(32, 32)).reset(seed=[7, 7, 8, 9])
    assert np.abs(first["left.rgb"].astype(float) - fixed["left.rgb"]).mean() > 5


def test_a_state_dict_brings_the_looks_back() -> None:
    env, other = (make("varied", cameras=("left",), image_size=(32, 32)) for _ in range(2))
    env.reset(seed=3)
    other.reset(seed=4)
    kept = other.load_state_dict(env.state_dict())
    np.testing.assert_array_equal(kept["left.rgb"], env.set_state(env.get_state())["left.rgb"])


def test_a_change_by_hand() -> None:
    rng = EpisodeRng([1, 2], [0, 0])
    unit = EpisodeRng([1, 2], [0, 0]).uniform(-1.0, 1.0, size=2)
    term = Look(field="light_pos", element="x", most=(0.5, 0.0), beyond=True)
    # u in [-1, 1) becomes u + sign(u): between once and twice the most.
    expected = np.array([3.0, 4.0]) + (unit + np.sign(unit)) * [0.5, 0.0]
    np.testing.assert_allclose(term.draw(np.array([3.0, 4.0]), rng), expected)


def test_a_share_of_a_drawn_number_by_hand() -> None:
    """Half of the way from a mass of 4 to the drawn 6 is 5; from a friction of 0.5 to 0.9, 0.7."""
    rng = EpisodeRng([1, 2], [0, 0])
    scaled = Vary(field="body_mass", element="x", low=1.5, high=1.5)
    np.testing.assert_allclose(scaled.draw(np.array([4.0]), rng, 0.5), [[5.0], [5.0]])
    given = Vary(field="geom_friction", element="x", low=0.9, high=0.9, how="set")
    np.testing.assert_allclose(given.draw(np.array([0.5]), rng, 0.5), [[0.7], [0.7]])


def test_a_curriculum_widens_what_is_seen() -> None:
    """At a scale of 0 the scene looks as it is, at 0.5 lights and cameras are half as far off as at 1."""

    def drawn(**domain: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        config = EnvConfig(task="pick_cube", num_threads=1, looks="varied", domain=DomainConfig(**domain))
        env = SimVectorEnv(config, 4, autoreset="same_step")
        env.reset(seed=3)
        parts, models = list[NDArray[Any]](), list[NDArray[Any]]()
        for field, element in (("light_pos", "light_0"), ("cam_pos", "left"), ("geom_rgba", "cube")):
            row, nominal = env.backend.locate(field, element)
            found = env.backend.expand(field).reshape(4, -1, len(nominal))[:, row]
            parts.append(found)
            models.append(np.broadcast_to(nominal, found.shape))
        return np.concatenate(parts, axis=1), np.concatenate(models, axis=1)

    full, model = drawn()
    assert np.abs(full - model).max() > 0.05
    for scale in (0.0, 0.5, 1.0):
        np.testing.assert_allclose(drawn(curriculum=True, scale=scale)[0], model + scale * (full - model))
