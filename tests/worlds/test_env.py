"""Imagined episodes as an env, a device, and a leased thing."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.cli.main import main
from robot_rl.core.errors import CheckpointError, ConfigError, DeviceError
from robot_rl.core.seeding import EpisodeRng, Stream
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.hal.conformance import check_device, check_vector_env
from robot_rl.hal.leased import EnvDevice
from robot_rl.rollout.envs import make_env, simulation
from robot_rl.sched.leases import LeaseStore
from robot_rl.sched.opened import opened
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.dynamics import Prediction
from robot_rl.worlds.env import ImaginedConfig, WorldEnv
from robot_rl.worlds.history import Array, Window
from robot_rl.worlds.inventory import enter, specs, world_spec
from robot_rl.worlds.saved import World, load_world
from tests.worlds.conftest import META, STEPS


@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_imagined_episodes_keep_the_rules_of_envs(world: World, autoreset: Any, noise: float) -> None:
    check_vector_env(
        lambda n: WorldEnv(world, n, autoreset=autoreset, settings={"strides": 4, "noise": noise})
    )


def test_a_world_model_is_a_device(world: World, tmp_path: Path) -> None:
    world.save(tmp_path / "point")
    spec = world_spec(tmp_path / "point")
    check_device(lambda: EnvDevice(spec, lambda _: WorldEnv(world, 3, settings={"strides": 4})))


@pytest.mark.gpu
def test_on_a_gpu_imagined_episodes_keep_the_rules_and_are_the_same(world: World, tmp_path: Path) -> None:
    world.save(tmp_path / "point")
    envs = [WorldEnv(str(tmp_path / "point"), 8, settings={"device": name}) for name in ("cpu", "cuda")]
    assert [env.world.model.centre.device.type for env in envs] == ["cpu", "cuda"]
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 8, 4, 2)).astype(np.float32)
    for env in envs:
        env.reset(seed=0)
    for chunk in actions:
        here, there = (env.step_chunk(chunk, 4).obs["state"] for env in envs)
        np.testing.assert_allclose(there, here, atol=1e-4)
    check_vector_env(lambda n: WorldEnv(envs[1].world, n, settings={"strides": 4}))


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    message = (
        f"env.settings.device: got '{device}', allowed on this machine: cpu.*Use env.settings.device=cpu"
    )
    with pytest.raises(ConfigError, match=message):
        ImaginedConfig.of({"device": device})


def test_a_cut_is_no_end_of_the_task(world: World) -> None:
    world.calibration = replace(world.calibration, gate=world.calibration.gate * 0.0)
    env = WorldEnv(world, 8)
    env.reset(seed=0)
    done = env.step_chunk(np.zeros((8, 4, 2), np.float32), 4)
    assert done.truncated.all()
    assert not done.terminated.any()
    assert done.infos["cut"].all()
    assert not done.infos["success"].any()
    assert not done.reward.any()
    assert done.infos["final_obs"]["state"].shape == (8, 4)


def test_two_samples_of_a_member_are_a_gate_of_their_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that stays where it is, and states deviations of twice and half the scale."""
    deviation = torch.tensor([2.0, 0.5, 0.0, 0.0]) * world.model.scale

    def stays(window: Window, actions: Array, steps: Array) -> Prediction:
        state = torch.from_numpy(np.repeat(window.state[None], 3, axis=0))
        nothing = torch.zeros(len(steps), 4)
        return Prediction(state, deviation.expand_as(state), nothing, nothing[:, 0])

    monkeypatch.setattr(world.model, "predict", stays)
    sizes = {"depths": np.array([1.0, 2.0]), "gate": np.ones(2)}
    world.calibration = replace(world.calibration, **sizes, samples=np.array([2.0, 1e-9]))
    world.report = replace(world.report, depths=[{"depth": 1.0, "rank_samples": 1.0}])
    start = np.zeros((40, 4), np.float32)
    start[:, 2] = 9.0  # the goal is far
    env = WorldEnv(world, 40, autoreset="disabled", settings={"gate": "samples", "strides": 2})
    env.reset(seed=list(range(40)), options={"observed": start})
    # The first stride of each episode: two samples of x, and of y, whose deviations are 2 and 0.5.
    drawn = EpisodeRng(np.arange(40), np.zeros(40), stream=Stream.SAMPLES).normal(4)
    apart = np.hypot(2.0 * (drawn[:, 0] - drawn[:, 2]), 0.5 * (drawn[:, 1] - drawn[:, 3])) / 2.0
    done = env.step_chunk(np.zeros((40, 4, 2), np.float32), 4)
    assert done.infos["uncertainty"] == pytest.approx(apart, rel=1e-5)
    assert np.array_equal(done.infos["cut"], apart > 2.0)
    assert 3 < done.truncated.sum() < 37
    assert not done.terminated.any()
    done = env.step_chunk(np.zeros((40, 4, 2), np.float32), 4, ~done.truncated)
    assert done.infos["cut"][done.valid.any(axis=1)].all()  # the limit of the second stride is nothing
    members = WorldEnv(world, 40, autoreset="disabled", settings={"strides": 2})
    members.reset(seed=0, options={"observed": start})
    assert not members.step_chunk(np.zeros((40, 4, 2), np.float32), 4).infos["cut"].any()


def test_a_model_on_the_disk_keeps_the_classes_in_which_its_episodes_began(
    world: World, tmp_path: Path
) -> None:
    world.save(tmp_path / "plain")
    assert load_world(tmp_path / "plain").history.start is None
    kinds = np.where(np.arange(world.history.num_episodes) % 2, "grasped", "own")
    world.history = replace(world.history, start=kinds)
    world.save(tmp_path / "classed")
    assert (load_world(tmp_path / "classed").history.start == kinds).all()
    only = {"classes": {"grasped": 1.0}, "initial": 0.0, "keyframe": 0.0, "replay": 0.0}
    env = WorldEnv(str(tmp_path / "classed"), 8, settings={"starts": only})
    first = env.reset(seed=0)[0]["state"]
    known = world.history.state[world.history.first[kinds == "grasped"]]
    assert all((row == known).all(axis=1).any() for row in first)


def test_a_gate_that_was_not_calibrated_is_refused(world: World, tmp_path: Path) -> None:
    world.limits = replace(world.limits, min_rank=-1.0)
    world.save(tmp_path / "new")
    assert WorldEnv(str(tmp_path / "new"), 1, settings={"gate": "samples"}).config.measure == "samples"
    world.calibration = replace(world.calibration, samples=None)
    world.save(tmp_path / "old")
    assert WorldEnv(str(tmp_path / "old"), 1, settings={"gate": "disagreement"}).num_envs == 1
    with pytest.raises(ConfigError, match=r"env.settings.gate: got samples, .* robot-rl worlds fit again"):
        WorldEnv(str(tmp_path / "old"), 1, settings={"gate": "samples"})
    with pytest.raises(ConfigError, match=r"gate: got 'members'.*true, false, disagreement or samples"):
        ImaginedConfig.of({"gate": "members"})


def test_goals_are_bitwise_the_same_after_many_strides(world: World) -> None:
    env = WorldEnv(world, 16, autoreset="disabled", settings={"gate": False})
    first, _ = env.reset(seed=3)
    actions = np.random.default_rng(0).uniform(-1, 1, (16, STEPS, 2)).astype(np.float32)
    done = env.step_chunk(actions, STEPS)
    assert np.array_equal(done.obs["state"][:, 2:], first["state"][:, 2:])
    assert not np.array_equal(done.obs["state"][:, :2], first["state"][:, :2])


def test_one_seed_has_one_start_one_member_and_one_noise(world: World) -> None:
    env = WorldEnv(world, 4, autoreset="disabled", settings={"noise": 1.0, "gate": False})
    obs, _ = env.reset(seed=[5, 5, 5, 6])
    assert (obs["state"][0] == obs["state"][1]).all()
    done = env.step_chunk(np.full((4, 8, 2), 0.3, np.float32), 8)
    assert np.array_equal(done.obs["state"][0], done.obs["state"][2])
    members = [WorldEnv(world, 1, autoreset="disabled", settings={"member": m}) for m in (0, 1)]
    for one in members:
        one.reset(seed=5)
    seen = [one.step_chunk(np.full((1, 8, 2), 0.3, np.float32), 8).obs["state"] for one in members]
    assert not np.array_equal(seen[0], seen[1])


def test_success_needs_most_members_and_ends_the_episode(world: World) -> None:
    env = WorldEnv(world, 2, autoreset="disabled", settings={"gate": False})
    # Both begin 0.5 from their goals along x, at 0.05 a step: near enough after 6 steps; one goes away.
    start = np.array([[-0.25, 0, 0.25, 0], [-0.25, 0, 0.25, 0]], np.float32)
    env.reset(seed=0, options={"observed": start})
    push = np.zeros((2, 20, 2), np.float32)
    push[0, :, 0], push[1, :, 0] = 1.0, -0.5
    done = env.step_chunk(push, 20)
    assert done.terminated.tolist() == [True, False]
    assert done.infos["success"].tolist() == [True, False]
    assert done.reward.sum(axis=1).tolist() == [1.0, 0.0]
    assert done.valid[0].sum() in (8, 12)


class Votes:
    """An outcome whose members see success one after the other: one in three, two, then all."""

    kind = "votes"

    def __init__(self) -> None:
        self.strides = 0

    def judge(self, states: Array, codes: Array | None = None) -> tuple[Array, Array]:
        self.strides += 1
        return np.arange(3) < self.strides, np.zeros(3, bool)


@pytest.mark.parametrize(
    ("settings", "ends_after"), [({}, 1), ({"hold": 2}, 4), ({"hold": 2, "vote": 1.0}, 5)]
)
def test_success_must_hold_for_strides_in_a_row(
    world: World, settings: dict[str, Any], ends_after: int
) -> None:
    # Members that see success after each stride; all three, one, two, then all: the second stride is a break.
    seen = iter([[1, 1, 1], [0, 0, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]])

    class Known:
        kind = "known"

        def judge(self, states: Array, codes: Array | None = None) -> tuple[Array, Array]:
            return np.array(next(seen), bool), np.zeros(3, bool)

    world.outcome = Known()
    env = WorldEnv(world, 1, autoreset="disabled", settings={"gate": False, "vote": 0.6, **settings})
    env.reset(seed=0, options={"observed": np.zeros((1, 4), np.float32)})
    done = env.step_chunk(np.zeros((1, 24, 2), np.float32), 24)
    assert done.terminated.all()
    assert done.valid.sum() == ends_after * 4
    assert done.reward.sum() == 1.0


def test_a_shaped_reward_says_where_success_is_near_and_keeps_the_return(world: World) -> None:
    world.outcome = Votes()
    smooth = {"gate": False, "vote": 1.0, "smooth": 0.5, "gamma_step": 0.9}
    env = WorldEnv(world, 1, autoreset="disabled", settings=smooth)
    env.reset(seed=0, options={"observed": np.zeros((1, 4), np.float32)})
    done = env.step_chunk(np.zeros((1, 12, 2), np.float32), 12)
    # The potential is 1/6 after the first stride of 4, 5/12 after the second, and 0 at the end.
    by_hand = [0, 0, 0, 0.15, *[-1 / 60] * 3, 0.375 - 1 / 6, *[-5 / 120] * 3, 1 - 5 / 12]
    assert done.reward[0] == pytest.approx(by_hand)
    assert done.terminated.all()
    assert (done.reward[0] * 0.9 ** np.arange(12)).sum() == pytest.approx(0.9**11)


def test_the_usual_horizon_is_that_of_real_episodes(world: World) -> None:
    env = WorldEnv(world, 3, autoreset="disabled", settings={"gate": False, "vote": 1.0, "hold": 100})
    env.reset(seed=0, options={"observed": np.zeros((3, 4), np.float32)})
    done = env.step_chunk(np.zeros((3, STEPS + 4, 2), np.float32), STEPS + 4)
    assert done.truncated.all()
    assert done.valid.sum(axis=1).tolist() == [STEPS] * 3


def test_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env.settings: got horizon, allowed: strides"):
        ImaginedConfig.of({"horizon": 3})
    with pytest.raises(ConfigError, match=r"env.settings.vote: got 0"):
        ImaginedConfig.of({"vote": 0})


def test_a_saved_model_is_the_same_model(world: World, tmp_path: Path) -> None:
    world.save(tmp_path / "point")
    again = load_world(tmp_path / "point")
    assert again.report == world.report
    seen = []
    for one in (world, again):
        env = WorldEnv(one, 4)
        env.reset(seed=1)
        seen.append(env.step_chunk(np.full((4, 8, 2), 0.2, np.float32), 8).obs["state"])
    assert np.array_equal(seen[0], seen[1])
    with pytest.raises(CheckpointError, match="no world model"):
        load_world(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"task 'point', not 'other'"):
        world.check(replace(META, task="other"), at="policy")
    longer: EpisodesMeta = replace(META, state_names=(*META.state_names, "z"))
    with pytest.raises(CheckpointError, match="it lacks z"):
        world.check(longer, at="policy")
    (tmp_path / "point" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="damaged"):
        load_world(tmp_path / "point")


def test_nobody_leases_a_model_that_is_not_believed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    folder = tmp_path / "point"
    world.report = replace(world.report, reasons=())
    world.save(folder)
    enter(folder)
    config = EnvConfig(kind="world", id=str(folder), task="reach")
    device = simulation(config, 2)
    with opened(device, holder="test") as env:
        env.reset(seed=0)
    assert [spec.labels["trust"] for spec in specs()] == ["ok"]
    world.save_report(folder, replace(world.report, reasons=("it dreams",)))
    assert specs()[0].labels["trust"] == "quarantined: it dreams"
    assert main(["devices"]) == 0
    assert "quarantined, its version 1 is not believed: it dreams." in capsys.readouterr().out
    with pytest.raises(DeviceError, match=r"quarantined, its version 1 is not believed: it dreams\."):
        LeaseStore().acquire(world_spec(folder), holder="test", slots=1)
    with pytest.raises(DeviceError, match="it dreams"), opened(device, holder="test"):
        pass
    world.save_report(folder, replace(world.report, reasons=()))
    with opened(device, holder="test"):
        pass


def test_a_run_in_a_model_is_judged_in_the_real_env(world: World, tmp_path: Path) -> None:
    world.save(tmp_path / "point")
    config = EnvConfig(kind="world", id=str(tmp_path / "point"), settings={"strides": 2})
    assert config.evaluated().kind == "sim"
    assert config.evaluated().task == "reach"
    with closing(make_env(config, 2)) as env:
        assert env.task == "point"
        assert env.caps == {"set_state", "fork", "batch"}
