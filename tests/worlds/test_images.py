"""Pictures in a world model, of a point that moves where it is pushed: a light square among darker ones."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.core.policy import Encoded
from robot_rl.data.episodes import Episodes
from robot_rl.hal.conformance import check_vector_env
from robot_rl.sim.config import EnvConfig
from robot_rl.train.search import SearchPolicy, check_pictures
from robot_rl.worlds.audit import measured
from robot_rl.worlds.build import pictures_fitted
from robot_rl.worlds.config import ImagesConfig, SearchConfig, TrustConfig, WorldSettings
from robot_rl.worlds.env import WorldEnv, begun_as
from robot_rl.worlds.fit import Fitter, new_model
from robot_rl.worlds.history import Array, History
from robot_rl.worlds.images.codec import BLOCK, in_blocks
from robot_rl.worlds.images.fit import ImageFitter, moments_at, new_images
from robot_rl.worlds.images.model import Images
from robot_rl.worlds.images.play import film_strip
from robot_rl.worlds.outcome import ClassifierOutcome, agreement
from robot_rl.worlds.saved import World, load_world
from robot_rl.worlds.trust import TrustReport, reasons_against
from tests.train.test_search import Wandering
from tests.worlds.conftest import FIT, META, SMALL, SPEED, STEPS, point_history

PIXELS = 32
IMAGES = ImagesConfig(
    cameras=("top",), channels=4, codec_width=16, width=16, codec_updates=200, updates=200, lr=3e-3
)
SETTINGS = WorldSettings(model=SMALL, images=IMAGES)


def drawn(states: Array) -> Array:
    """Returns pictures (n, 32, 32, 3) of a point, and its goal, in a field of 2 m."""
    pictures = np.full((len(states), PIXELS, PIXELS, 3), 60, np.uint8)
    for first, colour in ((2, (20, 160, 60)), (0, (240, 230, 220))):
        corners = ((states[:, first : first + 2] + 1.0) * PIXELS / 2).round().astype(int) - 3
        for picture, (x, y) in zip(pictures, corners.clip(0, PIXELS - 6), strict=True):
            picture[y : y + 6, x : x + 6] = colour
    return pictures


@pytest.fixture(scope="module")
def seen() -> History:
    """Episodes with pictures; the state has where the point is, and the goal is in the pictures alone."""
    history = point_history(80)
    hidden = replace(META, state_names=META.state_names[:2])
    return replace(history, pictures={"top": drawn(history.state)}, state=history.state[:, :2], meta=hidden)


@pytest.fixture(scope="module")
def learned(seen: History) -> Images:
    torch.set_num_threads(1)
    return pictures_fitted(seen, SETTINGS, seed=0)


@pytest.fixture(scope="module")
def made_seen(seen: History, learned: Images) -> World:
    model = new_model(SMALL, seen, seed=0)
    Fitter(model, seen, replace(FIT, updates=200), seed=0).run()
    judge = ClassifierOutcome(2, IMAGES.channels)
    judge.fit(seen, learned.codes, updates=150)
    how: dict[str, Any] = {"env": EnvConfig(task="reach"), "horizon": STEPS, "version": 1, "images": learned}
    return measured(model, judge, seen, limits=TrustConfig(), **how)[0]


def env_of(world: World, num_envs: int, **settings: Any) -> WorldEnv:
    return WorldEnv(world, num_envs, autoreset="disabled", settings={"gate": False, **settings})


def test_pictures_are_predicted_better_than_by_copying(made_seen: World) -> None:
    rows = made_seen.report.pictures
    assert [row["depth"] for row in rows] == [1, 2]  # deeper ones have too few windows
    for row in rows:
        assert row["psnr"] > row["psnr_of_copying"] + 1.0, row
    assert not any("no better" in reason for reason in made_seen.report.reasons)


def test_pictures_no_better_than_the_last_ones_are_not_believed() -> None:
    row = {"depth": 1.0, "psnr": 20.0, "psnr_of_copying": 20.5, "rank_disagreement": 0.5}
    report = TrustReport(version=1, episodes=9, real_steps=90, pictures=[row])
    reasons = reasons_against(report, TrustConfig())
    assert (
        "its pictures at depth 1 are no better than the last real ones: 20.0 dB, copying has 20.5" in reasons
    )
    blind = replace(report, pictures=[{**row, "psnr": 21.0, "rank_disagreement": 0.1}])
    assert "disagreement about pictures does not rank errors" in reasons_against(blind, TrustConfig())[-1]


def test_success_that_only_pictures_show_is_seen_wherever_it_is() -> None:
    history, rng = point_history(40, noise=0.1), np.random.default_rng(0)
    codes = 0.1 * rng.standard_normal((len(history.state), 2, 4, 4)).astype(np.float16)
    rows = np.flatnonzero(history.success)
    codes[rows, 1, rng.integers(0, 4, len(rows)), rng.integers(0, 4, len(rows))] += 2.0
    blank = replace(history, state=np.zeros_like(history.state))
    judge = ClassifierOutcome(4, channels=2)
    judge.fit(blank, codes, updates=150)
    assert agreement(judge, blank, codes=codes)["accuracy"] > 0.98


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_imagined_pictures_keep_the_rules_of_envs(made_seen: World, noise: float) -> None:
    # Within the rule on states no episode may end: the next one would be another. None ends before its clock.
    whole = {"strides": 4, "hold": 9, "starts": {"initial": 1.0, "keyframe": 0.0, "replay": 0.0}}
    check_vector_env(lambda n: WorldEnv(made_seen, n, settings={**whole, "noise": noise}))


def test_an_observation_has_the_pictures_of_its_state(made_seen: World) -> None:
    env = env_of(made_seen, 6)
    first, _ = env.reset(seed=1)
    assert env.observation_space.contains(first)
    right = np.tile(np.array([1.0, 0.0], np.float32), (6, 4, 1))
    obs = [env.step_chunk(right, 4).obs for _ in range(3)][-1]
    begun, shown = (drawn_point(part["top.rgb"])[:, 0] for part in (first, obs))
    true = obs["state"][:, 0]
    assert np.abs(shown - true).mean() < 0.5 * np.abs(begun - true).mean()


def drawn_point(pictures: Array) -> Array:
    """Returns where the light square is, (n, 2): the mean of its reddest pixels."""
    light = np.clip(pictures[..., 0].astype(float) - 150.0, 0, None) + 1e-9
    x = (np.arange(PIXELS) + 0.5) / PIXELS * 2 - 1
    total = light.sum(axis=(1, 2))
    return (
        np.stack([(light * x).sum(axis=(1, 2)), (light * x[:, None]).sum(axis=(1, 2))], axis=1)
        / total[:, None]
    )


def test_one_seed_has_the_same_pictures_and_another_noise_has_others(made_seen: World) -> None:
    env = env_of(made_seen, 3, noise=1.0, member=0)
    first, _ = env.reset(seed=[5, 5, 6])
    options = {"observed": np.repeat(first["state"][:1], 3, axis=0)}
    assert made_seen.images is not None
    codes = made_seen.images.encode({"top": np.repeat(first["top.rgb"][:1], 3, axis=0)})
    env.reset(seed=[5, 5, 6], options={**options, "codes": codes})
    shown = env.step_chunk(np.full((3, 4, 2), 0.5, np.float32), 4).obs["top.rgb"]
    assert np.array_equal(shown[0], shown[1])
    assert not np.array_equal(shown[0], shown[2])


def test_an_imagined_episode_begins_in_what_was_observed(made_seen: World) -> None:
    state = np.array([[0.5, -0.4], [-0.3, 0.2]], np.float32)
    pictures = drawn(np.concatenate([state, np.zeros((2, 2), np.float32)], axis=1))
    env = env_of(made_seen, 2)
    options = begun_as(made_seen, {"state": state, "top.rgb": pictures})
    obs, _ = env.reset(seed=0, options=options)
    assert drawn_point(obs["top.rgb"]) == pytest.approx(drawn_point(pictures), abs=0.1)
    with pytest.raises(ConfigError, match="`codes` missing"):
        env.reset(seed=0, options={"observed": state})


def test_a_model_on_the_disk_shows_the_same_pictures(made_seen: World, tmp_path: Path) -> None:
    made_seen.save(tmp_path)
    again = load_world(tmp_path)
    assert again.history.pictures == {}
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 6, 2)).astype(np.float32)
    shown = list[Array]()
    for world in (made_seen, again):
        env = env_of(world, 4)
        env.reset(seed=2)
        shown.append(env.step_chunk(actions, 6).obs["top.rgb"])  # in the middle of a stride
    assert np.array_equal(shown[0], shown[1])
    assert again.report == made_seen.report


def test_a_fit_goes_on_exactly(seen: History) -> None:
    config = replace(IMAGES, codec_updates=3, updates=3)
    whole = ImageFitter(new_images(config, seen, stride=4, seed=0), seen, seed=0)
    losses = [whole.update() for _ in range(6)]
    for split in (2, 4):  # within the codec's updates, and within those of the networks
        first = ImageFitter(new_images(config, seen, stride=4, seed=0), seen, seed=0)
        for _ in range(split):
            first.update()
        second = ImageFitter(new_images(config, seen, stride=4, seed=1), seen, seed=1)
        second.load_state_dict(first.state_dict())
        assert [second.update() for _ in range(6 - split)] == losses[split:]


def searching(world: World, rows: int, candidates: int) -> SearchPolicy:
    env = env_of(world, rows * candidates, member=0, strides=1)
    return SearchPolicy(Wandering(), env, SearchConfig(world="x", candidates=candidates), n_exec=4)


def test_a_search_looks_ahead_in_pictures(made_seen: World) -> None:
    """The pictures alone tell where the goal is; a chunk moves the point by up to 0.2."""
    angle = np.arange(8) * (2 * np.pi / 8)
    goal = 0.32 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    states = np.concatenate([np.zeros((8, 2)), goal], axis=1).astype(np.float32)
    policy = searching(made_seen, 8, 24)
    z = torch.randn((8, 4, 2), generator=torch.Generator().manual_seed(0))
    obs = {"state": torch.from_numpy(states[:, :2]), "top.rgb": torch.from_numpy(drawn(states))}
    chosen = policy.sample(policy.encode(obs), z=z).actions.numpy()
    plain = Wandering().sample(cast("Encoded", {}), z=z).actions.numpy()
    away, plainly = (np.linalg.norm(goal - SPEED * each.sum(axis=1), axis=1) for each in (chosen, plain))
    is_other = (chosen != plain).any(axis=(1, 2))  # the rest sees no success ahead
    assert is_other.sum() >= 3, (away, plainly)
    assert away[is_other].mean() < 0.5 * plainly[is_other].mean(), (away, plainly)
    gone = {name: value[:2] for name, value in policy.encode(obs).items()}
    assert np.array_equal(policy.sample(cast("Encoded", gone), z=z[:2]).actions, chosen[:2])


@pytest.mark.parametrize(
    ("cameras", "observed", "words"),
    [
        (("top", "side"), {"top": 32, "side": 32}, "got 'no pictures of side'"),
        (("top",), {"top": 64}, "got 'pictures of top 32 x 32, not 64 x 64'"),
        ((), {}, "got 'pictures of top 32 x 32, not observed'"),
    ],
)
def test_a_search_refuses_a_model_of_other_pictures(
    made_seen: World, cameras: tuple[str, ...], observed: dict[str, int], words: str
) -> None:
    def real(sizes: dict[str, int]) -> Any:
        pictures = {f"{name}.rgb": SimpleNamespace(shape=(size, size, 3)) for name, size in sizes.items()}
        return SimpleNamespace(single_observation_space={"state": SimpleNamespace(shape=(2,)), **pictures})

    model = env_of(made_seen, 1)
    with pytest.raises(ConfigError, match=f"search.world: {words}"):
        check_pictures(SimpleNamespace(config=SimpleNamespace(cameras=cameras)), model, real(observed))
    check_pictures(Wandering(), model, real({"top": 32, "side": 64}))  # what nobody reads may be there


def test_a_strip_shows_real_pictures_and_predicted_ones(made_seen: World) -> None:
    images, history = made_seen.images, made_seen.history
    assert images is not None
    depths, strips = film_strip(images, made_seen.model, history, history.first[:2])
    assert depths == [1, 2, 4]
    assert strips.shape == (2 * 2 * PIXELS, 4 * PIXELS, 3)
    assert np.array_equal(strips[:PIXELS, :PIXELS], history.pictures["top"][history.first[0]])
    assert np.array_equal(strips[:PIXELS, -PIXELS:], history.pictures["top"][history.first[0] + 16])


def test_networks_see_blocks_of_one_size() -> None:
    sizes = list[int]()

    def doubled(rows: Array) -> Array:
        sizes.append(len(rows))
        return 2 * rows

    assert in_blocks(doubled, BLOCK + 1).tolist() == [2 * i for i in range(BLOCK + 1)]
    assert sizes == [BLOCK, BLOCK]


def test_what_is_known_at_a_row_is_of_its_episode(seen: History, learned: Images) -> None:
    row = int(seen.first[3])
    at = moments_at(learned, seen, np.array([row, row + 6]), np.array([4, 2]), after=seen.state[:2])
    assert np.array_equal(at.past, learned.codes[[row, row + 2]].astype(np.float32))
    assert np.array_equal(at.reference, learned.codes[[row, row]].astype(np.float32))
    facts = learned.context(at).facts.numpy()
    assert facts[:, -4:].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert not facts[1, 4 + 2 * 2 : 4 + 4 * 2].any()  # actions that are not executed


@pytest.mark.parametrize(
    ("size", "message"),
    [((60, 64), "got pictures of 60 x 64 pixels"), ((16, 16), "multiples of 16 from 32 up")],
)
def test_a_size_that_the_model_lacks_is_refused(seen: History, size: tuple[int, int], message: str) -> None:
    other = replace(seen, pictures={"top": np.zeros((len(seen.state), *size, 3), np.uint8)})
    with pytest.raises(ConfigError, match=message):
        new_images(IMAGES, other, stride=4, seed=0)


def test_pictures_of_128_pixels_have_codes_of_16_cells() -> None:
    history = point_history(60)
    pictures = np.zeros((len(history.state), 128, 128, 3), np.uint8)
    pictures[..., 0] = np.arange(len(history.state))[:, None, None] % 200
    shown = replace(history, pictures={"top": pictures})
    config = replace(IMAGES, codec_width=8, width=8, codec_updates=1, updates=1, batch=2)
    fitter = ImageFitter(new_images(config, shown, stride=4, seed=0), shown, seed=0)
    assert all(np.isfinite(fitter.update()) for _ in range(2))
    images = fitter.images
    assert images.codes.shape == (len(history.state), 4, 16, 16)
    assert images.decode(images.codes[:3])["top"].shape == (3, 128, 128, 3)


def test_cameras_of_two_sizes_are_refused(seen: History) -> None:
    other = replace(
        seen, pictures={**seen.pictures, "side": np.zeros((len(seen.state), 64, 64, 3), np.uint8)}
    )
    with pytest.raises(DatasetError, match="top 32 x 32, side 64 x 64, allowed: one size"):
        new_images(replace(IMAGES, cameras=("top", "side")), other, stride=4, seed=0)


def test_a_camera_that_was_not_recorded_is_refused() -> None:
    episodes = Episodes(
        meta=META,
        obs={"state": np.zeros((2, 4), np.float32), "top.rgb": np.zeros((2, 32, 32, 3), np.uint8)},
        action=np.zeros((2, 2), np.float32),
        reward=np.zeros(2),
        terminated=np.zeros(2, bool),
        truncated=np.array([False, True]),
        success=np.zeros(2, bool),
        episode_index=np.zeros(2, int),
        final_obs={"state": np.zeros((1, 4), np.float32), "top.rgb": np.ones((1, 32, 32, 3), np.uint8)},
    )
    assert History.of(episodes, cameras=("top",)).pictures["top"][:, 0, 0, 0].tolist() == [0, 0, 1]
    with pytest.raises(DatasetError, match="got 'side', the episodes have pictures of: top"):
        History.of(episodes, cameras=("side",))
