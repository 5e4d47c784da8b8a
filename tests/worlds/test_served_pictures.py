"""Pictures of models of others: a process of its own draws the frames of imagined episodes."""

import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import robot_rl
from robot_rl.core.errors import CheckpointError, ConfigError, DatasetError, ModelError, RobotRLError
from robot_rl.core.policy import ChunkSample, Encoded
from robot_rl.hal.conformance import check_vector_env
from robot_rl.rollout.evaluate import evaluate_in
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.audit import replayed
from robot_rl.worlds.build import RealEnv, adopted
from robot_rl.worlds.channel import Channel
from robot_rl.worlds.config import ImagesConfig, ServedConfig, TrustConfig, WorldSettings
from robot_rl.worlds.env import WorldEnv, begun_as
from robot_rl.worlds.history import AUDIT, TRAIN, Array, History
from robot_rl.worlds.images.pictures import Moments, units_of
from robot_rl.worlds.images.served import ServedImages
from robot_rl.worlds.outcome import ClassifierOutcome
from robot_rl.worlds.saved import World, load_world
from robot_rl.worlds.served import Served
from tests.worlds import foreign_videos
from tests.worlds.conftest import META, RADIUS, SPEED, STEPS, point_history
from tests.worlds.foreign_videos import PIXELS, drawn

HIDDEN = replace(META, state_names=META.state_names[:2])
REAL = RealEnv(EnvConfig(task="reach"), HIDDEN, STEPS)
CAMERAS = ("top", "side")


class Near:
    """Success is where the red square of the first camera is near the green one: only pictures tell."""

    kind = "near"

    def judge(self, states: Array, codes: Array | None = None) -> tuple[Array, Array]:
        assert codes is not None
        success = np.linalg.norm(middle(codes[:, 0]) - middle(codes[:, 1]), axis=1) < RADIUS
        return success, np.zeros_like(success)


def middle(shades: Array) -> Array:
    """Returns where the lightest cells of shades (n, PIXELS, PIXELS) are, (n, 2), in metres."""
    light = (shades == shades.max(axis=(1, 2), keepdims=True)).astype(float)
    at = (np.arange(PIXELS) + 0.5) / PIXELS * 2 - 1
    total = light.sum(axis=(1, 2))
    x, y = light.sum(axis=1) @ at, light.sum(axis=2) @ at
    return np.stack([x, y], axis=1) / total[:, None]


@pytest.fixture(scope="module")
def seen() -> History:
    """Episodes with pictures of two cameras; the goal is in the pictures alone."""
    history = point_history(80)
    places, goals = history.state[:, :2], history.state[:, 2:]
    pictures = {camera: drawn(camera, places, goals) for camera in CAMERAS}
    return replace(history, pictures=pictures, state=places, meta=HIDDEN)


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(tmp_path, monkeypatch)


def settled(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes a folder the working one, in which the process finds modules; pictures tell success."""
    shutil.copy(foreign_videos.__file__, folder)
    patch.chdir(folder)
    patch.setattr("robot_rl.worlds.build.outcome_of", lambda *_, **__: Near())


def config_of(name: str = "Video", **settings: Any) -> ServedConfig:
    return ServedConfig(id=f"foreign_videos:{name}", settings=settings)


def made(seen: History, cameras: tuple[str, ...] = ("top",), **settings: Any) -> World:
    """Returns the world of a model of others with these cameras, measured on recorded episodes."""
    wanted = WorldSettings(images=ImagesConfig(cameras=cameras), trust=TrustConfig(min_rank=-1.0))
    return adopted(seen, REAL, wanted, config_of(cameras=cameras, **settings), seed=0)[0]


@pytest.fixture(scope="module")
def made_once(seen: History, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        settled(tmp_path_factory.mktemp("video"), patch)
        found = made(seen)
    yield found
    cast("Served", found.model).close()


@pytest.fixture
def world(made_once: World) -> World:
    """A copy: a test may change its limits."""
    return replace(made_once)


def env_of(world: World, num_envs: int, **settings: Any) -> WorldEnv:
    return WorldEnv(world, num_envs, autoreset="disabled", settings={"gate": False, "hold": 99, **settings})


def beginning(env: WorldEnv, places: Array, goals: Array) -> None:
    """Begins episodes in what cameras would see of points and goals (B, 2) each."""
    assert env.world.images is not None
    shown = {f"{name}.rgb": drawn(name, places, goals) for name in env.world.images.cameras}
    env.reset(seed=0, options=begun_as(env.world, {"state": places, **shown}))


def test_frames_of_another_process_pixel_by_pixel(world: World, seen: History) -> None:
    rng = np.random.default_rng(0)
    places, goals = (rng.uniform(-0.4, 0.4, (4, 2)).astype(np.float32) for _ in range(2))
    assert not np.array_equal(drawn("top", places, goals), drawn("side", places, goals))
    with closing(Served(config_of(cameras=CAMERAS), HIDDEN)) as model:
        model.load_state_dict(world.model.state_dict())
        images = ServedImages(model.channel, CAMERAS)
        images.read(seen)
        env = env_of(replace(world, model=model, images=images), 4, member=0)
        beginning(env, places, goals)
        for _ in range(2 * env.stride + 1):  # within strides, too
            action = rng.uniform(-1, 1, (4, 2)).astype(np.float32)
            places = places + SPEED * action
            obs = env.step(action)[0]
            assert obs["state"] == pytest.approx(places, abs=1e-5)
            for camera in CAMERAS:
                assert np.array_equal(obs[f"{camera}.rgb"], drawn(camera, obs["state"], goals))


def test_a_frame_by_hand(world: World) -> None:
    env = env_of(world, 1, member=1)
    beginning(env, np.zeros((1, 2), np.float32), np.array([[-0.5, 0.5]], np.float32))
    obs = env.step_chunk(np.array([[[1.0, 0.0]] * 4], np.float32), 4).obs
    # Member 1 of the state: 4 steps of 0.05, times 1.01. Member 1 of the pictures: half of that move further.
    # 0.303 is (1.303 * 16) = 20.8 pixels from the edge: the square begins in column 21 - 3, row 16 - 3.
    expected = np.zeros((PIXELS, PIXELS, 3), np.uint8)
    expected[..., :2] = 60
    expected[13:19, 18:24, 0] = 240
    expected[21:27, 5:11, 1] = 240  # the goal of the first picture: 8 - 3 and 24 - 3
    assert obs["state"][0] == pytest.approx([0.202, 0.0])
    assert np.array_equal(obs["top.rgb"][0], expected)


def test_episodes_begin_in_recorded_pictures(world: World, seen: History) -> None:
    obs, _ = env_of(world, 16).reset(seed=3)
    rows = [int(np.flatnonzero((seen.state == state).all(axis=1))[0]) for state in obs["state"]]
    assert len(set(rows)) > 10
    assert np.array_equal(obs["top.rgb"], seen.pictures["top"][rows])


def test_pictures_are_drawn_only_where_they_are_looked_at(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = env_of(world, 2)
    env.reset(seed=0)
    asked = methods_asked(monkeypatch)
    for _ in range(4):
        env.step_unseen(np.zeros((2, 2), np.float32), None)
    assert asked == ["predict", "predict_codes"]
    env.step(np.zeros((2, 2), np.float32))
    assert asked[2:] == ["predict", "predict_codes", "decode"]


def methods_asked(patch: pytest.MonkeyPatch) -> list[str]:
    """Returns the methods of which models of others are asked from now on."""
    ask, asked = Channel.ask, list[str]()

    def noted(self: Channel, method: str, *given: Any) -> list[Array]:
        asked.append(method)
        return ask(self, method, *given)

    patch.setattr(Channel, "ask", noted)
    return asked


def test_replays_need_no_pictures_where_states_tell_success(
    world: World, seen: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Right(Near):
        """Success is where x is above 0."""

        kind = "predicate"

        def judge(self, states: Array, codes: Array | None = None) -> tuple[Array, Array]:
            assert codes is None
            return states[:, 0] > 0, np.zeros(len(states), bool)

    world.outcome = Right()
    asked = methods_asked(monkeypatch)
    replayed(world, seen.split(AUDIT))
    assert set(asked) == {"predict"}


def test_served_pictures_are_compared_with_copying_the_last_real_ones(seen: History) -> None:
    world = made(seen, code_members=1)
    assert world.images is not None
    rows = world.report.pictures
    assert [row["depth"] for row in rows] == [1, 2]
    assert [row["mae"] for row in rows] == [0.0, 0.0]  # what it draws is what was recorded
    assert [row["psnr"] for row in rows] == [100.0, 100.0]
    assert 5.0 < rows[0]["psnr_of_copying"] < 30.0
    assert rows[1]["mae_of_copying"] > rows[0]["mae_of_copying"] > 1.0
    # One member: nothing disagrees, nothing is ranked, nothing is cut.
    assert "rank_disagreement" not in rows[0]
    assert np.isinf(world.images.limit(np.arange(1, 9))).all()
    world.calibration = replace(world.calibration, gate=world.calibration.gate * 100)  # states cut nothing
    env = env_of(world, 8, gate=True, strides=2)
    env.reset(seed=0)
    for _ in range(8):
        assert not env.step(np.ones((8, 2), np.float32))[-1]["cut"].any()
    assert world.report.is_trusted, world.report.reasons


def test_a_model_that_shows_the_last_real_picture_is_not_believed(seen: History) -> None:
    reasons = made(seen, code_members=2, fault="still").report.reasons
    assert any(
        "its pictures at depth 1 are no better than the last real ones" in reason for reason in reasons
    )


def test_members_that_disagree_about_pictures_cut_an_episode(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = world.images
    assert images is not None
    assert world.report.pictures[0]["rank_disagreement"] > 0.2  # who is further ahead is further off
    assert np.isfinite(images.gate).all()
    assert (images.gate > 0).all()
    world.calibration = replace(world.calibration, gate=world.calibration.gate * 100)  # states cut nothing

    def cut() -> list[bool]:
        env = env_of(world, 4, gate=True, member=0, strides=2)
        beginning(env, np.zeros((4, 2), np.float32), np.full((4, 2), 0.5, np.float32))
        speed = np.array([0.0, 0.1, 0.2, 1.0])[:, None, None] * np.ones((4, 4, 2))
        return np.asarray(env.step_chunk(speed.astype(np.float32), 4).infos["cut"]).tolist()

    limit = images.gate
    monkeypatch.setattr(images, "gate", 100 * limit)
    assert not any(cut())
    # The members draw the square 0, 0; then 0.32, 0.48 and 0.64; 0.64, 0.96 and 1.28; 3.2, 4.8 and 6.4 pixels
    # from where it was. In whole pixels they differ in the second, and in the last.
    monkeypatch.setattr(images, "gate", 1e-4 * limit)
    assert cut() == [False, True, False, True]


def test_units_of_channels_by_hand() -> None:
    # The second never varied: the root of (0.5 ** 2 + 2 ** 2) / 2 = 2.125.
    assert units_of(np.array([0.5, 0.0, 2.0])).tolist() == pytest.approx([0.5, 2.125**0.5, 2.0])
    assert units_of(np.array([0.0, 1e-6])).tolist() == [1.0, 1.0]


def test_members_that_differ_in_what_nothing_moves_do_not_drown_the_rest(world: World, seen: History) -> None:
    found, plain = made(seen, fault="grain").images, world.images
    assert found is not None
    assert plain is not None
    # A quarter of a level from member to member, in one channel of three, in the unit of the red one.
    grain = 0.25 / float(cast("Any", plain).spread[0] * plain.rest[0]) / 3**0.5
    assert found.gate == pytest.approx(np.hypot(plain.gate, grain), rel=0.01)


def test_a_channel_that_is_seldom_lit_is_kept(seen: History) -> None:
    """The scales come from some of the recorded moments, in which it may be dark."""
    shown = seen.pictures["top"].copy()
    rows = np.flatnonzero(np.isin(seen.episode, seen.split(TRAIN)))
    lit = rows[1 :: 2 * (len(rows) // 512)]
    shown[lit, :, :, 2] = 255
    seldom = replace(seen, pictures={"top": shown})
    with closing(Served(config_of(), HIDDEN)) as model:
        images = ServedImages(model.channel, ["top"])
        images.read(seldom)
        assert np.array_equal(images.decode(images.codes[lit])["top"], shown[lit])
    with (
        closing(Served(config_of(fault="glares"), HIDDEN)) as model,
        pytest.raises(ModelError, match=r"encode: some codes are over 65504 deviations .* Clip them"),
    ):
        ServedImages(model.channel, ["top"]).read(seldom)


def test_imagined_pictures_of_others_keep_the_rules_of_envs(world: World) -> None:
    whole = {"strides": 4, "hold": 9, "starts": {"initial": 1.0, "keyframe": 0.0, "replay": 0.0}}
    check_vector_env(lambda n: WorldEnv(world, n, settings={"gate": False, **whole, "noise": 0.5}))


class Seeker(nn.Module):
    """Goes from the red square to the green one, which it sees in the pictures."""

    horizon, action_dim, feature_dim, refines = 4, 2, 2, False

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        shown = obs["top.rgb"].cpu().numpy()
        return cast("Encoded", {"features": torch.from_numpy(middle(shown[..., 1]) - middle(shown[..., 0]))})

    def sample(self, encoded: Encoded, **_: Any) -> ChunkSample:
        away = cast("dict[str, Tensor]", encoded)["features"].float()
        return ChunkSample(actions=(away / (4 * SPEED)).clamp(-1, 1)[:, None].expand(-1, 4, -1))


class Blind(Seeker):
    """The same without pictures: it goes nowhere."""

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        return cast("Encoded", {"features": torch.zeros_like(obs["state"])})


def test_a_policy_that_sees_acts_in_a_served_model(world: World) -> None:
    starts = {"initial": 1.0, "keyframe": 0.0, "replay": 0.0}
    found = [
        evaluate_in(
            env_of(world, 20, hold=1, starts=starts),
            cast("Any", policy),
            seeds=np.arange(40, dtype=np.uint64),
            n_exec=4,
        ).rate
        for policy in (Seeker(), Blind())
    ]
    assert found[0] > 0.9
    assert found[1] < 0.5


def test_a_world_on_the_disk_shows_the_same_pictures(world: World, tmp_path: Path) -> None:
    world.outcome = ClassifierOutcome(2, 3)
    world.save(tmp_path / "video")
    again = load_world(tmp_path / "video")
    assert again.history.pictures == {}
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 6, 2)).astype(np.float32)
    shown = list[Array]()
    for one in (world, again):
        env = env_of(one, 4)
        env.reset(seed=2)
        shown.append(env.step_chunk(actions, 6).obs["top.rgb"])
    assert np.array_equal(shown[0], shown[1])
    module = tmp_path / "foreign_videos.py"
    # Of another length: within a second Python tells new source from its bytecode by that alone.
    module.write_text(module.read_text().replace("PIXELS, SPEED = 32", "PIXELS, SPEED = 2 * 32"))
    with pytest.raises(CheckpointError, match=r"says .*\[64, 64\].*, but .*\[32, 32\].* was measured"):
        load_world(tmp_path / "video")
    module.write_text(module.read_text().replace("= tuple(cameras), ", "= (), "))
    with pytest.raises(CheckpointError, match=r"says .*'cameras': \[\].*, but .*\['top'\].* was measured"):
        load_world(tmp_path / "video")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("code", r"encode: code is of shape \(2, 3\), allowed: \(2, 3, 32, 32\)"),
        ("flat", r"predict_codes: codes is of shape \(2, 3, 32, 32\), allowed: \(3, 2, 3, 32, 32\)"),
        ("nan", r"predict_codes: codes is not finite"),
        ("text", r"predict_codes: codes is of dtype <U\d+, allowed: real numbers"),
        ("float", r"decode: top\.rgb is of dtype float\d+, allowed: uint8"),
        ("size", r"decode: top\.rgb is of shape \(2, 31, 32, 3\), allowed: \(2, 32, 32, 3\)"),
        ("camera", r"decode: returns back, allowed: a dict of pictures of top"),
        ("list", r"decode: returns list, allowed: a dict of pictures of top"),
        ("dies", r"a process ended with code 3"),
    ],
)
def test_what_is_no_picture_is_refused_where_it_arrives(fault: str, words: str) -> None:
    with (
        closing(Served(config_of(fault=fault), HIDDEN)) as model,
        pytest.raises(ModelError, match=f"served.id foreign_videos:Video: {words}"),
    ):
        shown_next(ServedImages(model.channel, ["top"]), np.zeros((2, 2), np.float32))


@pytest.mark.parametrize(
    "pictures",
    [
        np.zeros((2, PIXELS, PIXELS, 1), np.uint8),
        np.zeros((2, PIXELS // 2, PIXELS, 3), np.uint8),
        np.zeros((2, PIXELS, PIXELS, 3), np.float32),
    ],
)
def test_pictures_of_another_shape_or_dtype_are_not_coded(pictures: Array) -> None:
    given = re.escape(
        f"encode: top.rgb is given as {pictures.dtype} of shape {pictures.shape}, allowed: uint8"
    )
    with (
        closing(Served(config_of(), HIDDEN)) as model,
        pytest.raises(ConfigError, match=given),
    ):
        ServedImages(model.channel, ["top"]).encode({"top": pictures})


def shown_next(images: ServedImages, state: Array, moved: float = 0.0) -> Array:
    """Returns what the first member shows after a stride in which points and goals (B, 2) moved along x."""
    code = images.encode({"top": drawn("top", state, state)})
    at = {"now": code, "past": code, "reference": code, "state": state}
    after = state + np.array([moved, 0.0], np.float32)
    actions, steps = np.zeros((len(state), 4, 2), np.float32), np.full(len(state), 4)
    codes, _ = images.means(Moments(**at, after=after, actions=actions, steps=steps))
    return images.decode(codes[0])["top"]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("blind", {}, r"images.cameras: got top, .* has no cameras\. Leave images\.cameras out"),
        ("Video", {"cameras": ["top", "side"]}, r"got top, .* has top, side\. Give images\.cameras=top,side"),
        ("halfway", {}, r"returns a Video with cameras, without code_members\."),
        ("misnamed", {}, r"its cameras are 'top', allowed: a tuple or list of names"),
        (
            "Video",
            {"cameras": ["top", "top"]},
            r"its cameras are \['top', 'top'\], allowed: names that differ",
        ),
        ("Video", {"image_size": 32}, r"its image_size is \[32\], allowed: height and width"),
        (
            "Video",
            {"image_size": [32, 32.5]},
            r"its image_size is \[32\.0, 32\.5\], allowed: .* whole numbers",
        ),
        ("Video", {"code_shape": [3, 0, 4]}, r"its code_shape is \[3, 0, 4\], allowed: channels, height"),
        ("Video", {"code_members": 0}, r"its code_members are 0, allowed: 1 or more"),
        ("Video", {"code_members": 1.5}, r"its code_members are 1\.5, allowed: 1 or more"),
    ],
)
def test_a_model_without_these_pictures_is_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with (
        pytest.raises(RobotRLError, match=words),
        closing(Served(config_of(name, **settings), HIDDEN)) as model,
    ):
        ServedImages(model.channel, ["top"])


def test_recorded_pictures_of_another_size_are_refused(seen: History) -> None:
    other = replace(seen, pictures={"top": seen.pictures["top"][:, ::2]})
    with pytest.raises(DatasetError, match=r"of top are 32 x 32, the episodes have 16 x 32\. Collect with"):
        made(other)


def test_a_model_with_cameras_predicts_states_alone_where_none_are_wanted(seen: History) -> None:
    blind = replace(seen, pictures={})
    settings = WorldSettings(trust=TrustConfig(min_rank=-1.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("robot_rl.worlds.build.outcome_of", lambda *_, **__: ClassifierOutcome(2))
        world, _ = adopted(blind, REAL, settings, config_of(), seed=0)
    assert world.images is None
    obs, _ = WorldEnv(world, 2).reset(seed=0)
    assert set(obs) == {"state"}


def test_codes_are_asked_for_as_the_model_has_them() -> None:
    with closing(Served(config_of("Echo"), HIDDEN)) as model:
        images = ServedImages(model.channel, ["top"])
        images.centre.fill_(1.0)
        images.spread.fill_(2.0)
        now, past, reference = (np.full((2, 1, 1, 1), value, np.float32) for value in (1.0, 2.0, 3.0))
        at = Moments(
            now=now,
            past=past,
            reference=reference,
            state=np.full((2, 2), 4.0, np.float32),
            after=np.full((2, 2), 5.0, np.float32),
            actions=np.full((2, 4, 2), 0.5, np.float32),
            steps=np.array([1, 3]),
        )
        codes, apart = images.means(at)
    # 2 c + 1 is a code as the model has it: 3 + 2 * 5 + 3 * 7 = 34; 4 + 50 + 50 = 104; 1000 m; then back.
    assert codes[0, :, 0, 0, 0].tolist() == [(138 + 1000 - 1) / 2, (138 + 3000 - 1) / 2]
    assert apart.tolist() == [0.0, 0.0]


def test_the_pictures_of_the_documentation_are_some(tmp_path: Path) -> None:
    page = (Path(robot_rl.__file__).parents[1] / "docs" / "worlds.md").read_text()
    for name in ("my_model.py", "my_video.py"):
        (tmp_path / name).write_text(page.split(f"# {name}")[1].split("```")[0].partition("\n")[2])
    with closing(Served(ServedConfig(id="my_video:load"), HIDDEN)) as model:
        images = ServedImages(model.channel, ["top"])
        moved = shown_next(images, np.zeros((1, 2), np.float32), moved=0.25)
    shown = drawn("top", np.zeros((1, 2)), np.zeros((1, 2)))
    assert np.array_equal(moved, np.roll(shown, 4, axis=2))  # 0.25 m of 2 m in 32 pixels
