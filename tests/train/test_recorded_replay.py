"""A replay that is restored from what its recorder kept: the same to the last bit, or a clear refusal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import CheckpointError, DatasetError, RobotRLError
from robot_rl.data.episode import Feature
from robot_rl.data.replay import ReplayBuffer
from robot_rl.data.store.journal import Kind, Segment, segment_path
from robot_rl.data.transitions import StepBatch
from robot_rl.train.checkpoint import read_state, write_state
from robot_rl.train.experience import OneForEach, ReplayExperience, SourceReplay
from robot_rl.train.recording import Recorder
from tests.train.test_recording import LANES, META

LATENT = 4
FEATURES = {
    "state": Feature("float32", (1,)),
    "cam.rgb": Feature("uint8", (6, 8, 3)),
    "cam.depth": Feature("float32", (6, 8)),
}
SHAPES = {key: (feature.shape, feature.dtype) for key, feature in FEATURES.items()}


def turn(number: int, *, begins: bool = False, source: str = "sim") -> StepBatch:
    """Control step `number`, all noise; env k ends every 4 + k steps, in turn by task and clock."""
    lanes = np.arange(LANES)
    ends = (number + 1) % (4 + lanes) == 0
    by_task = (number // (4 + lanes)) % 2 == 0

    def noise(name: int, at: int, *shape: int) -> Any:
        return np.random.default_rng([name, at]).normal(size=(LANES, *shape)).astype(np.float32)

    def seen(at: int) -> dict[str, Any]:
        pixels = np.random.default_rng([9, at]).integers(0, 256, (LANES, 6, 8, 3), np.uint8)
        return {"state": noise(0, at, 1), "cam.rgb": pixels, "cam.depth": noise(1, at, 6, 8)}

    after = number + 1 if not ends.any() else 1000 + number  # what ends leads somewhere else
    here, there, final = seen(number), seen(number + 1), seen(after)
    where = {key: ends.reshape(-1, *[1] * (value.ndim - 1)) for key, value in here.items()}
    return StepBatch(
        obs=here,
        action=noise(2, number, 2),
        base_action=noise(3, number, 2),
        reward=noise(4, number),
        terminated=ends & by_task,
        truncated=ends & ~by_task,
        next_obs={key: np.where(where[key], final[key], there[key]) for key in here},
        next_base_action=np.where(ends[:, None], noise(5, number, 2), noise(3, number + 1, 2)),
        success=ends & by_task,
        source=source,
        policy_version=number // 3,
        latent=noise(6, number // 2, LATENT),
        decides=np.full(LANES, number % 2 == 0),
        begins=begins,
    )


def kept(folder: Path, *, capacity: int, latent_dim: int = 0) -> tuple[SourceReplay, ReplayBuffer, Recorder]:
    replay = ReplayBuffer(capacity, LANES, SHAPES, 2, latent_dim=latent_dim)
    recorder = Recorder(folder, META, FEATURES, is_exact=True)
    return SourceReplay(replay, recorder=recorder), replay, recorder


def through_a_checkpoint(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    write_state(state, folder)
    return read_state(folder)


def reachable(replay: ReplayBuffer) -> dict[str, Any]:
    """Returns every number of a replay that a batch may show."""
    state, found = replay.state_dict(), dict[str, Any]()
    is_step = state["columns"]["kind"] == 1
    leads = np.roll(is_step, 1, axis=1)  # from the last frame to the first leads nothing: one of them is free
    for key, values in state["obs"].items():
        found[f"obs.{key}"] = values[is_step | leads]
    for name, values in state["columns"].items():
        found[name] = values if name == "kind" else values[is_step]
    found["base_action"] = state["columns"]["base_action"][is_step | leads]
    return found | {"head": state["head"]}


def require_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("latent_dim", [0, LATENT])
@pytest.mark.parametrize("turns", [0, 1, 4, 19, 40])
def test_a_replay_restored_from_its_record_is_the_same(tmp_path: Path, turns: int, latent_dim: int) -> None:
    """From 20 frames a lane on the oldest steps are overwritten; at turns 7 and 13 episodes are cut short."""
    keeper, replay, recorder = kept(tmp_path / "store", capacity=60, latent_dim=latent_dim)
    for number in range(turns):
        keeper.add(turn(number, begins=number in (7, 13), source="human" if number % 5 else "real"))
    state = through_a_checkpoint(keeper.state_dict(), tmp_path / "checkpoint")
    expected = reachable(replay)
    for number in range(turns, turns + 3):  # by a life that is killed: not in the replay twice
        keeper.add(turn(number))
    recorder.close()
    again, restored, recorder = kept(tmp_path / "store", capacity=60, latent_dim=latent_dim)
    again.load_state_dict(state)
    require_same(reachable(restored), expected)
    assert len(restored) == int(expected["kind"].sum())
    for number in range(turns, turns + 30):  # and it goes on as the unbroken one, through another checkpoint
        again.add(turn(number, begins=number == turns + 4))
    state = through_a_checkpoint(again.state_dict(), tmp_path / "second")
    recorder.close()
    last, third, recorder = kept(tmp_path / "store", capacity=60, latent_dim=latent_dim)
    last.load_state_dict(state)
    recorder.close()
    require_same(reachable(third), reachable(restored))
    unbroken = ReplayBuffer(60, LANES, SHAPES, 2, latent_dim=latent_dim)
    for number in range(turns):
        unbroken.add(turn(number, begins=number in (7, 13), source="human" if number % 5 else "real"))
    for number in range(turns, turns + 30):
        unbroken.add(turn(number, begins=number == turns + 4))
    require_same(reachable(third), reachable(unbroken))


def test_a_checkpoint_holds_no_picture_but_those_that_no_record_has(tmp_path: Path) -> None:
    keeper, _, recorder = kept(tmp_path / "store", capacity=600)
    for number in range(24):
        keeper.add(turn(number, begins=number == 13))
    state = keeper.state_dict()["unrecorded"]
    recorder.close()
    # Turn 23 ends the episodes of envs 0 and 2, which end every 4 and 6 steps; env 1 goes on. At turn 13 the
    # episodes of all three had gone on: turn 12 ended none of them (13 is no multiple of 4, 5 or 6).
    assert state["obs"]["cam.rgb"].shape == (4, 6, 8, 3)
    # Ends of episodes: 24 / 4, 24 // 5 and 24 / 6, three cut short, and where env 1 stands.
    assert len(state["after"]) == 6 + 4 + 4 + 3 + 1


def cut(store: Path) -> None:
    path = segment_path(store / "journal", 1)
    path.write_bytes(path.read_bytes()[:-100])


def lose(store: Path) -> None:
    segment_path(store / "journal", 1).unlink()


def flip(store: Path) -> None:
    segment = Segment(store / "journal", 1)
    record = next(found for found in segment.scan(0) if getattr(found, "kind", 0) == Kind.STEPS)
    path = segment_path(store / "journal", 1)
    content = bytearray(path.read_bytes())
    content[record.end - 1] ^= 1  # type: ignore[union-attr]
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (cut, DatasetError, r"000001.log: \d+ bytes, there were \d+ when .* sealed, repaired or cut since"),
        (lose, DatasetError, r"000001.log: 0 bytes, there were \d+ when the checkpoint was made"),
        (flip, CheckpointError, r"cannot be restored.*checksum of steps 0 to \d of episode 0.*bring it back"),
    ],
)
def test_a_record_that_is_not_as_it_was_is_refused(
    tmp_path: Path, change: Callable[[Path], Any], error: type[RobotRLError], message: str
) -> None:
    store = tmp_path / "store"
    keeper, _, recorder = kept(store, capacity=600)
    for number in range(12):
        keeper.add(turn(number))
        if number == 5:
            keeper.state_dict()  # ends the first segment
    state = keeper.state_dict()
    recorder.close()
    change(store)
    keeper, _, recorder = kept(store, capacity=600)
    with pytest.raises(error, match=message):
        keeper.load_state_dict(state)
    recorder.close()


@pytest.mark.parametrize("has_record", [False, True])
@pytest.mark.parametrize("sources", [1, 2])
def test_checkpoints_that_hold_the_whole_replay_stay_readable(
    tmp_path: Path, sources: int, has_record: bool
) -> None:
    """Their pictures may have lost bits in the record: such a run goes on with whole checkpoints."""
    mine = [ReplayBuffer(60, LANES, SHAPES, 2) for _ in range(sources)]
    recorders = [Recorder(tmp_path / str(i), META, FEATURES) for i in range(sources)]
    for number in range(9):
        for replay, recorder in zip(mine, recorders, strict=True):
            replay.add(turn(number))
            recorder.add(turn(number))
    replays, records = [r.state_dict() for r in mine], [r.state_dict() for r in recorders]
    state: dict[str, Any] = {"rng": np.random.default_rng(0).bit_generator.state}
    state["replay"] = {"sources": replays} if sources > 1 else replays[0]
    if has_record:
        state["recorder"] = {"sources": records} if sources > 1 else records[0]
    for recorder in recorders:
        recorder.close()
    for _ in range(2):
        again = [kept(tmp_path / str(i), capacity=60) for i in range(sources)]
        keepers = [keeper for keeper, *_ in again]
        experience = ReplayExperience(OneForEach(keepers) if sources > 1 else keepers[0])
        experience.load_state_dict(state)
        state = experience.state_dict()
        for (_, restored, recorder), replay in zip(again, mine, strict=True):
            require_same(reachable(restored), reachable(replay))
            recorder.close()
