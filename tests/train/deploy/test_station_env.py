"""The env of a station: equal to simulation where nothing is late, plans with tails, latency, faults."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import (
    ConfigError,
    DeviceError,
    DriverGoneError,
    SafetyStopError,
    StaleObservationError,
)
from robot_rl.real.messages import DRIVER_GONE, Answer, Frame, Status
from robot_rl.real.station import CameraConfig, load_station
from robot_rl.real.teleop.intent import NoTeleop
from robot_rl.rollout.envs import make_expert
from robot_rl.rollout.stepping import lockstep
from robot_rl.sched.leases import LeaseStore
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from robot_rl.train.deploy.config import DeployConfig
from robot_rl.train.deploy.human import Intervening
from robot_rl.train.deploy.reward import TaskJudge
from robot_rl.train.deploy.run import station_device

CONFIG = EnvConfig(task="pick_cube", num_threads=1)
PICTURE_NS = 70_000_000
EXPERT: dict[str, Any] = {"bias_m": 0.0, "noise_m": 0.005, "noise_seed": 1}


def play(env: Any, seed: int) -> tuple[bool, int, list[np.ndarray]]:
    """Returns success, steps and the observations of an episode of the expert."""
    expert, steps, seen = make_expert(env, **EXPERT), 0, []
    success = False
    for moment in lockstep(env, np.array([seed], np.uint64), lambda *_: None, lambda _: expert.act()):
        seen.append(moment.obs["state"][0])
        steps += 1
        success |= bool(moment.infos["success"][0])
    return success, steps, seen


@pytest.mark.parametrize("gripper_steps", [False, True])
def test_without_latency_an_episode_is_that_of_the_simulation(station_env, gripper_steps: bool) -> None:
    config = replace(CONFIG, gripper_steps=gripper_steps)
    env, _, _ = station_env(config=config)
    direct = SimVectorEnv(config, 1, autoreset="disabled")
    for seed in (3, 4):
        success, steps, seen = play(env, seed)
        wanted, wanted_steps, truth = play(direct, seed)
        assert (success, steps) == (wanted, wanted_steps) == (True, steps)
        # One opening stands for two fingers, which differ by less than a millimetre in contact.
        assert np.abs(np.array(seen) - np.array(truth)).max() < 2e-3
        assert env.late == 0


def test_the_reward_of_a_tracked_scene_is_the_dense_one_of_simulation(station_env) -> None:
    dense = replace(CONFIG, reward="dense")
    env, _, _ = station_env(config=dense)
    direct = SimVectorEnv(dense, 1, autoreset="disabled")
    beside = Intervening(env, NoTeleop(), TaskJudge(), reward="dense")
    beside.reset(seed=3)
    direct.reset(seed=3)
    action = np.full((1, len(env.action_names)), 0.5, np.float32)
    for _ in range(4):
        reward, truth = beside.step(action)[1][0], direct.step(action)[1][0]
        assert reward == pytest.approx(truth, abs=1e-3)
        assert 0 < reward < 0.5


def test_what_was_executed_is_what_the_supervisor_sent(station_env) -> None:
    env, arm, _ = station_env()
    env.reset(seed=3)
    rng, differing = np.random.default_rng(0), 0
    for _ in range(20):
        action = np.sign(rng.uniform(-1, 1, (1, len(env.action_names)))).astype(np.float32)
        infos = env.step(action)[4]
        np.testing.assert_array_equal(infos["commanded_action"], action)
        np.testing.assert_array_equal(infos["executed_target_rad"][0], arm.sent_rad)
        differing += bool((arm.sent_rad != env.target_rad).any())
    assert differing > 10  # what was asked is beyond what this arm may do


def test_an_arm_that_was_sent_nothing_yet_is_held_where_it_is(station_env) -> None:
    env, arm, _ = station_env(lag_s=10.0)  # no plan arrives
    env.reset(seed=3)
    arm.sent_rad = np.full(7, np.nan)
    infos = env.step(np.zeros((1, len(env.action_names)), np.float32))[4]
    np.testing.assert_array_equal(infos["executed_target_rad"][0], arm.status.state.position_rad)


def test_an_episode_is_reset_started_paused(station_env) -> None:
    env, arm, _ = station_env(config=replace(CONFIG, horizon_s=0.1))
    env.reset(seed=7)
    zero = np.zeros((1, len(env.action_names)), np.float32)
    assert not env.step(zero)[3][0]
    assert env.step(zero)[3][0]
    first = [("pause", 0), ("reset", 7), ("start", 0), ("pause", 0)]
    assert arm.orders == first
    env.reset()
    again = arm.orders[-1]
    assert again[0] == "reset"
    assert again[1] not in (7, 0)
    env.close()
    assert [name for name, _ in arm.orders[-3:]] == ["pause", "close", "close"]  # arm and sensors


def test_a_moving_arm_rests_before_its_scene_is_put_back(station_env) -> None:
    env, arm, clock = station_env(station=load_station("sim_arm"))
    env.reset(seed=1)
    for _ in range(5):
        env.step(np.ones((1, len(env.action_names)), np.float32))
    still_rad_s = 0.02 * np.asarray(env.limits.velocity_rad_s)
    paused_s, moved_s = clock.now_s(), []
    wait, control = arm.wait, arm.control

    def watched(*args: Any) -> Status:
        status = wait(*args)
        if (np.abs(status.state.velocity_rad_s) >= still_rad_s).any():
            moved_s.append(clock.now_s())
        return status

    def put_back(operation: str, **how: Any) -> Answer:
        if operation == "reset":
            assert moved_s[-1] > paused_s
            assert clock.now_s() - moved_s[-1] == pytest.approx(0.2)  # two tries of a hold
        return control(operation, **how)

    arm.wait, arm.control = watched, put_back
    env.reset(seed=2)
    assert ("reset", 2) in arm.orders


def test_a_moving_arm_whose_driver_takes_orders_in_turn_is_put_back_at_once(station_env) -> None:
    env, arm, clock = station_env()
    env.reset(seed=1)
    for _ in range(5):
        env.step(np.ones((1, len(env.action_names)), np.float32))
    paused_s, control = clock.now_s(), arm.control

    def put_back(operation: str, **how: Any) -> Answer:
        if operation == "reset":
            assert clock.now_s() - paused_s < 0.02
        return control(operation, **how)

    arm.control = put_back
    env.reset(seed=2)
    assert ("reset", 2) in arm.orders


@pytest.mark.slow
@pytest.mark.alone
def test_an_arm_that_was_put_back_in_motion_stays_where_the_episode_begins(tmp_path: Path) -> None:
    """With the real processes: no hold of the episode before pulls it away."""
    station, config = load_station("sim_in_process"), EnvConfig(task="reach", num_threads=1)
    device = station_device(
        station, DeployConfig(run=str(tmp_path), station="sim_in_process"), config, tmp_path, None
    )
    shown = SimVectorEnv(config, 1, autoreset="disabled")
    joints = slice(0, 7)
    with LeaseStore(tmp_path / "leases.db").hold(device.spec, holder="test") as held:
        env = device.open(held.lease)
        try:
            env.reset(seed=0)
            for seed in range(1, 6):
                for _ in range(8):
                    env.step(np.full((1, len(env.action_names)), (-1.0) ** seed, np.float32))
                wanted = shown.reset(seed=seed)[0]["state"][0, joints]
                begun = env.reset(seed=seed)[0]["state"][0, joints]
                np.testing.assert_allclose(begun, wanted, atol=0.01)
                time.sleep(0.3)  # a hold is repeated every 0.1 s
                state = env._arm.wait().state
                np.testing.assert_allclose(state.position_rad, wanted, atol=0.01)
        finally:
            env.close()


def test_a_gap_in_what_is_heard_is_no_rest(station_env) -> None:
    env, arm, clock = station_env(station=load_station("sim_arm"))
    heard, wait = [], arm.wait

    def rarely(*args: Any) -> Status:
        arm.pass_time(0.25)  # the machine stands still
        status = wait(*args)
        speed = 1.0 if len(heard) < 3 else 0.0
        heard.append(clock.now_s())
        return replace(status, state=replace(status.state, velocity_rad_s=np.full(7, speed)))

    def put_back(operation: str, **how: Any) -> Answer:
        if operation == "reset":
            arm.wait = wait
            assert len(heard) == 4  # the first without motion is 0.25 s younger than the last with it
        return control(operation, **how)

    control, arm.wait, arm.control = arm.control, rarely, put_back
    env.reset(seed=2)
    assert ("reset", 2) in arm.orders


def test_an_arm_that_does_not_come_to_rest_is_waited_for_in_vain_for_five_seconds(station_env) -> None:
    env, arm, clock = station_env(station=load_station("sim_arm"))
    state = arm.status.state
    arm.frozen = replace(state, velocity_rad_s=np.ones(7))
    began_s, orders = clock.now_s(), arm.orders
    with pytest.raises(DeviceError, match="nothing of something new"):  # its state is frozen
        env.reset(seed=2)
    assert orders[-1] == ("reset", 2)
    assert clock.now_s() - began_s == pytest.approx(10.0, abs=0.1)


def test_plans_have_the_targets_of_now_and_a_foretold_tail(station_env) -> None:
    env, arm, _ = station_env()
    env.reset(seed=1)
    actions = np.zeros((4, len(env.action_names)), np.float32)
    actions[:, 0] = 0.5
    env.set_planned_actions(actions[1:])
    env.step(actions[:1])
    env.step(actions[:1])
    with_tail, alone = arm.plans
    assert with_tail.targets_rad.shape == (4, 7)
    assert alone.targets_rad.shape == (1, 7)  # what was foretold is of one step
    assert (with_tail.number, alone.number) == (0, 1)
    assert with_tail.period_ns == 50_000_000
    assert alone.start_ns - with_tail.start_ns == 50_000_000
    assert with_tail.gripper == pytest.approx([0.02] * 4)  # 0 is half open
    assert np.abs(np.diff(with_tail.targets_rad, axis=0)).max() > 0


def test_a_grip_stays_over_a_hold_in_the_middle_of_an_episode(station_env) -> None:
    """The command before the hold counts, not how far a held thing lets the fingers shut."""
    env, arm, _ = station_env(config=replace(CONFIG, gripper_steps=True))
    env.reset(seed=1)
    assert env.action_names[-1] == "gripper.step"
    close = np.zeros((1, len(env.action_names)), np.float32)
    close[0, -1] = -1.0
    env.step(close)  # 2 mm of 40
    env.step(close)
    arm.forget_plan()
    env.step(0 * close)
    assert arm.plans[-1].gripper[0] == pytest.approx(0.036)
    env.reset(seed=2)  # the next one begins with the opening that is measured
    env.step(0 * close)
    assert arm.plans[-1].gripper[0] == pytest.approx(0.04, abs=1e-4)


def test_what_is_late_is_counted_and_the_next_step_is_whole(station_env) -> None:
    env, arm, clock = station_env()
    env.reset(seed=1)
    zero = np.zeros((1, len(env.action_names)), np.float32)
    env.step(zero)
    for thinks_s, late in ((0.02, 0), (0.06, 1), (0.0, 1)):
        arm.pass_time(thinks_s)
        before_s = clock.now_s()
        env.step(zero)
        assert env.late == late
        if thinks_s == 0.06:
            assert clock.now_s() - before_s == pytest.approx(0.05)
    assert [timing.late for timing in env.timing] == [False, False, True, False]
    assert env.timing[2].act_s == pytest.approx(0.06)


def test_latency_is_measured_and_made_up_for(station_env) -> None:
    # The policy takes 20 ms, and a plan 20 ms to the arm. What the policy saw is nearer to where the arm
    # was when its plan arrived than what was measured 40 ms before.
    errors: dict[bool, float] = {}
    for compensate in (False, True):
        env, arm, _ = station_env(lag_s=0.02, compensate=compensate)
        env.reset(seed=5)
        expert = make_expert(env, **EXPERT)
        misses: list[float] = []
        for _ in range(20):
            action = expert.act()
            seen = env.mirror.env.backend.bind("qpos")[0][:7].copy()
            arm.pass_time(0.02)
            env.step(action)
            misses.append(float(np.abs(seen - arm.arrived_at).max()))
        errors[compensate] = float(np.mean(misses[5:]))
        latency = [timing.latency_s for timing in env.timing[5:]]
        assert np.median(latency) == pytest.approx(0.04, abs=0.001)
    assert errors[True] < 0.4 * errors[False]


def test_a_stale_state_holds_the_arm_and_says_how_old_it_is(station_env) -> None:
    env, arm, _ = station_env()
    env.reset(seed=1)
    zero = np.zeros((1, len(env.action_names)), np.float32)
    arm.frozen = arm.status.state
    for _ in range(5):
        env.step(zero)
    with pytest.raises(StaleObservationError, match=r"joint state is \d+ ms old, allowed is 300 ms"):
        env.step(zero)
    assert arm.orders[-1] == ("pause", 0)


def test_a_lost_object_is_named(station_env) -> None:
    env, arm, _ = station_env()
    arm.lost, arm.mistakes = {"goal"}, {"goal": "objects/goal/pose: no pose"}
    says = r"nothing of goal came in 5 s\. objects/goal/pose: no pose\. Start its camera or tracker"
    with pytest.raises(DeviceError, match=says):
        env.reset(seed=1)


def camera(now_ns: int) -> dict[str, Frame]:
    """Takes a picture every 70 ms, and writes its number into it."""
    number = now_ns // PICTURE_NS
    picture = np.full((2, 3, 3), number % 256, np.uint8)
    return {"front.rgb": Frame(name="front.rgb", stamp_ns=number * PICTURE_NS, array=picture)}


@pytest.fixture
def seeing(station_env) -> tuple[Any, Any]:
    """Returns an env that sees with one camera, and its arm."""
    plain = load_station("sim_in_process")
    station = replace(plain, cameras={"front.rgb": CameraConfig(max_age_s=0.2)})
    env, arm, _ = station_env(config=replace(CONFIG, cameras=("front",), image_size=(2, 3)), station=station)
    arm.cameras = camera
    return env, arm


def test_a_step_says_when_the_pictures_that_it_began_with_were_taken(seeing) -> None:
    env, arm = seeing
    obs, _ = env.reset(seed=1)
    zero = np.zeros((1, len(env.action_names)), np.float32)
    arm.pass_time(0.1)  # the first plan takes long: there is a newer picture before the first step
    for _ in range(5):
        shown = int(obs["front.rgb"][0, 0, 0, 0])
        obs, *_, infos = env.step(zero)
        taken_ns = infos["picture_stamp_ns"]["front.rgb"]
        assert taken_ns // PICTURE_NS % 256 == shown
        assert taken_ns <= infos["stamp_ns"]


def test_a_camera_that_the_robot_lacks_is_black_and_the_station_needs_none(station_env) -> None:
    station = replace(load_station("sim_in_process"), cameras={"front.rgb": CameraConfig(max_age_s=0.2)})
    seen: dict[str, Any] = {
        "cameras": ("front", "wrist"),
        "missing_cameras": ("wrist",),
        "image_size": (2, 3),
    }
    env, arm, _ = station_env(config=replace(CONFIG, **seen), station=station)
    arm.cameras = camera
    obs, _ = env.reset(seed=1)
    for _ in range(3):
        assert obs["front.rgb"].any()
        assert obs["wrist.rgb"].shape == (1, 2, 3, 3)
        assert not obs["wrist.rgb"].any()
        obs, *_, infos = env.step(np.zeros((1, len(env.action_names)), np.float32))
        assert infos["picture_stamp_ns"].keys() == {"front.rgb"}


def test_a_camera_that_freezes_or_is_missing_is_named(seeing) -> None:
    env, arm = seeing
    env.reset(seed=1)
    zero = np.zeros((1, len(env.action_names)), np.float32)
    last = arm.read()["front.rgb"]
    arm.cameras = lambda now_ns: {"front.rgb": last}
    # The picture is up to 70 ms old when the camera freezes, and a step takes 50 ms.
    env.step(zero)
    env.step(zero)

    def go_on() -> None:
        for _ in range(3):
            env.step(zero)

    with pytest.raises(StaleObservationError, match=r"front.rgb is 2\d\d ms old, allowed is 200 ms"):
        go_on()
    assert arm.orders[-1] == ("pause", 0)
    arm.cameras = lambda now_ns: {}
    with pytest.raises(DeviceError, match=r"nothing of front.rgb came in 5 s"):
        env.reset(seed=1)


def showing(picture: np.ndarray) -> Any:
    """Returns cameras that show this picture all the time."""
    return lambda now_ns: {"front.rgb": Frame(name="front.rgb", stamp_ns=now_ns, array=picture)}


@pytest.mark.parametrize(
    ("picture", "camera", "says"),
    [
        (
            np.zeros((480, 640), np.float32),
            CameraConfig(),
            r"front.rgb is float32 \(480, 640\), allowed: uint8 \(height, width, 3\) in the order red, "
            "green, blue. Look at what its topic or driver sends: depth, or channels first",
        ),
        (
            np.zeros((3, 48, 48), np.uint8),
            CameraConfig(),
            r"front.rgb is uint8 \(3, 48, 48\), allowed: uint8",
        ),
        (
            np.zeros((24, 48, 3), np.uint8),
            CameraConfig(),
            "front.rgb is 24 x 48 pixels, the policy sees 32 x 32: allowed are as many or more, .* crop less",
        ),
        (
            np.zeros((480, 640, 3), np.uint8),
            CameraConfig(),
            "front.rgb is 480 x 640 pixels, the policy sees 32 x 32: allowed are the same proportions. "
            r"Give this camera `crop: \[0, 80, 480, 480\]` in the station file, or `stretch: true`",
        ),
        (
            np.zeros((100, 40, 3), np.uint8),
            CameraConfig(crop=(10, 20, 100, 40)),
            r"`crop: \[40, 20, 40, 40\]`",  # of what the camera sends, not of what the crop left
        ),
    ],
)
def test_pictures_that_are_not_those_of_training_are_refused_at_rest(
    station_env, picture: np.ndarray, camera: CameraConfig, says: str
) -> None:
    station = replace(load_station("sim_in_process"), cameras={"front": camera})
    config = replace(CONFIG, cameras=("front",), image_size=(32, 32))
    env, arm, _ = station_env(config=config, station=station)
    arm.cameras = showing(picture)
    with pytest.raises(ConfigError, match=rf"station sim_in_process: .*{says}"):
        env.reset(seed=1)
    assert "start" not in [order for order, _ in arm.orders]
    assert arm.orders[-1] == ("pause", 0)


@pytest.mark.parametrize(
    ("shape", "stretch"), [((480, 480), False), ((480, 640), True), ((99, 100), False), ((32, 32), False)]
)
def test_larger_pictures_become_those_of_training(station_env, shape: tuple[int, int], stretch: bool) -> None:
    station = replace(load_station("sim_in_process"), cameras={"front": CameraConfig(stretch=stretch)})
    config = replace(CONFIG, cameras=("front",), image_size=(32, 32))
    env, arm, _ = station_env(config=config, station=station)
    left = np.zeros((*shape, 3), np.uint8)
    left[:, : shape[1] // 2] = 200
    arm.cameras = showing(left)
    picture = env.reset(seed=1)[0]["front.rgb"][0]
    assert (picture.shape, picture.dtype) == ((32, 32, 3), np.uint8)
    assert (picture[:, :15] == 200).all()
    assert (picture[:, 17:] == 0).all()


def test_pictures_are_found_by_their_names_whatever_their_order(station_env) -> None:
    cameras = {name: CameraConfig() for name in ("wrist", "left", "right", "front")}
    station = replace(load_station("sim_in_process"), cameras=cameras)
    config = replace(CONFIG, cameras=("left", "right", "wrist"), image_size=(8, 8))
    env, arm, _ = station_env(config=config, station=station)
    shades = {"right": 2, "front": 9, "wrist": 3, "left": 1}
    arm.cameras = lambda now_ns: {
        f"{name}.rgb": Frame(name=f"{name}.rgb", stamp_ns=now_ns, array=np.full((8, 8, 3), shade, np.uint8))
        for name, shade in shades.items()
    }
    obs, _ = env.reset(seed=1)
    seen = {name: int(picture.max()) for name, picture in obs.items() if name != "state"}
    assert seen == {"left.rgb": 1, "right.rgb": 2, "wrist.rgb": 3}


def test_the_age_of_the_oldest_picture_is_noted(station_env) -> None:
    station = replace(
        load_station("sim_in_process"), cameras={"left": CameraConfig(), "front": CameraConfig()}
    )
    config = replace(CONFIG, cameras=("left", "front"), image_size=(2, 3))
    env, arm, clock = station_env(config=config, station=station)
    young, old = np.zeros((2, 3, 3), np.uint8), 0.03
    began_ns = round(1e9 * clock.now_s())
    arm.cameras = lambda now_ns: {
        "left.rgb": Frame(name="left.rgb", stamp_ns=now_ns, array=young),
        "front.rgb": Frame(name="front.rgb", stamp_ns=max(now_ns - round(1e9 * old), began_ns), array=young),
    }
    env.reset(seed=1)
    for _ in range(3):
        env.step(np.zeros((1, len(env.action_names)), np.float32))
    assert [timing.picture_age_s for timing in env.timing] == pytest.approx([old] * 3)


def test_a_stopped_and_a_paused_arm_end_the_episode(station_env) -> None:
    env, arm, _ = station_env()
    zero = np.zeros((1, len(env.action_names)), np.float32)
    env.reset(seed=1)
    env.step(zero)
    arm.phase = "paused"
    with pytest.raises(DeviceError, match="somebody paused the arm"):
        env.step(zero)
    env.reset(seed=1)
    env.step(zero)
    env.safe_stop()
    with pytest.raises(SafetyStopError, match=r"stop by robot-rl.*robot-rl arm clear by=") as stop:
        env.step(zero)
    arm.reason = f"{DRIVER_GONE} (by the driver watchdog)"
    with pytest.raises(
        DriverGoneError, match=r"the driver is gone \(by.*at its driver\.log, then start again"
    ):
        env.step(zero)
    assert stop.type is SafetyStopError


def test_nan_never_leaves(station_env) -> None:
    env, arm, _ = station_env()
    env.reset(seed=1)
    poisoned = np.full((1, len(env.action_names)), np.nan, np.float32)
    with pytest.raises(SafetyStopError, match="the policy gave"):
        env.step(poisoned)
    assert arm.plans == []
    assert arm.orders[-1] == ("pause", 0)


def test_a_real_arm_goes_home_and_a_person_puts_the_scene_back(station_env) -> None:
    asked: list[str] = []
    station = replace(load_station("sim_in_process"), real=True)
    env, arm, _ = station_env(station=station, ask=asked.append)
    env.reset(seed=9)
    assert arm.orders == [("pause", 0), ("home", 0)]
    assert asked == ["Put the scene of pick_cube back, step away, and confirm: episode 9 begins."]


def test_states_cannot_be_set(station_env) -> None:
    env, _, _ = station_env()
    with pytest.raises(ConfigError, match="allowed: reset_mask"):
        env.reset(options={"states": np.zeros((1, 3))})


def test_a_station_is_parked_in_its_safe_pose(station_env) -> None:
    env, arm, _ = station_env()
    env.reset(seed=1)
    env.step(np.zeros((1, len(env.action_names)), np.float32))
    env.park()
    assert [order for order, _ in arm.orders][-2:] == ["pause", "park"]
