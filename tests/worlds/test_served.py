"""Models of others behind the dynamics of imagined episodes, in a process of their own."""

import os
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import robot_rl
from robot_rl.core.errors import CheckpointError, ConfigError, ModelError, RobotRLError, StorageError
from robot_rl.hal.conformance import check_vector_env
from robot_rl.sim.config import EnvConfig
from robot_rl.worlds.build import RealEnv, adopted
from robot_rl.worlds.config import ServedConfig, TrustConfig, WorldSettings
from robot_rl.worlds.env import WorldEnv
from robot_rl.worlds.history import AUDIT, History, Window, Windows
from robot_rl.worlds.saved import World, load_world
from robot_rl.worlds.served import Served
from tests.worlds.conftest import META, SPEED, STEPS

REAL = RealEnv(EnvConfig(task="reach"), META, STEPS)


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process finds modules in the working folder."""
    shutil.copy(Path(__file__).with_name("foreign_models.py"), tmp_path)
    monkeypatch.chdir(tmp_path)


def served(name: str = "point", *, timeout_s: float = 60.0, rows: int = 256, **settings: Any) -> Served:
    config = ServedConfig(id=f"foreign_models:{name}", settings=settings, timeout_s=timeout_s, rows=rows)
    return Served(config, META)


def asked(count: int) -> tuple[Window, Any, Any]:
    """Returns moments at the origin, with action 1 along x, and 1 to 4 control steps in turn."""
    state = np.tile(np.array([0.0, 0.0, 0.3, -0.3], np.float32), (count, 1))
    past = np.zeros((count, 4, 2), np.float32)
    window = Window(state=state, past_state=state, past_action=past, has_past=np.zeros(count, bool))
    actions = np.tile(np.array([1.0, 0.0], np.float32), (count, 4, 1))
    return window, actions, np.arange(count) % 4 + 1


@pytest.mark.parametrize("rows", [256, 3])
def test_a_prediction_of_another_process_by_hand(rows: int, history: History, tmp_path: Path) -> None:
    with closing(served("pid_of", path=str(tmp_path / "pid"), rows=rows)) as model:
        assert int((tmp_path / "pid").read_text()) != os.getpid()
        model.fit_scales(history, np.arange(20))
        found = model.predict(*asked(8))
        # m steps of 0.05, times 1, 1.01 and 1.02 for the members, of which the deviation is 0.01.
        m = np.array([1, 2, 3, 4, 1, 2, 3, 4])
        for member in range(3):
            assert found.mean[member, :, 0].numpy() == pytest.approx(
                SPEED * m * (1 + 0.01 * member), rel=1e-4
            )
        assert found.mean[:, :, 2:].numpy() == pytest.approx(np.full((3, 8, 2), [0.3, -0.3]))
        spread = SPEED * m * 0.01 / float(model.scale[0])
        assert found.spread[:, 0].numpy() == pytest.approx(spread, rel=1e-3)
        assert found.uncertainty.numpy() == pytest.approx(spread / np.sqrt(2.0), rel=1e-3)
        assert found.std[0, 0].numpy() == pytest.approx([0.001, 0.001, 0.0, 0.0])  # the goal is copied


def test_a_model_of_others_is_measured_saved_and_imagines(
    history: History, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("robot_rl.worlds.build.outcome_of", lambda *_, **__: world.outcome)
    config = ServedConfig(id="foreign_models:point")
    world, _ = adopted(history, REAL, WorldSettings(trust=TrustConfig(min_rank=-1.0)), config, seed=0)
    # The members' errors are 0, 1 and 2 % of the movement; of the change in a stride that is:
    windows = Windows(history, history.split(AUDIT), stride=4)
    moved = windows.states(windows.rows, 4) - history.state[windows.rows]
    scale = np.asarray(world.model.scale)
    size = np.sqrt(((moved / scale)[:, :2] ** 2).mean() * np.mean([0.0, 0.01**2, 0.02**2]))
    assert world.report.depths[0]["error"] == pytest.approx(size, rel=0.02)
    assert world.report.depths[1]["error"] > 1.2 * size
    assert world.report.false_success is not None
    world.save(tmp_path / "point")
    again = load_world(tmp_path / "point")
    assert again.report == world.report
    check_vector_env(lambda n: WorldEnv(again, n, settings={"strides": 4, "gate": False}))


def test_our_model_in_another_process_imagines_the_same_episodes(world: World, tmp_path: Path) -> None:
    world.save(tmp_path / "ours")
    root = str(Path(robot_rl.__file__).parents[1])
    config = ServedConfig(
        id="foreign_models:Saved",
        python=sys.executable,
        settings={"folder": str(tmp_path / "ours"), "root": root},
    )
    other = Served(config, META)
    other.load_state_dict(  # the scales
        {name: value for name, value in world.model.state_dict().items() if name in other.state_dict()}
    )
    actions = np.random.default_rng(0).uniform(-1, 1, (40, 24, 2)).astype(np.float32)
    seen = []
    for one in (world, replace(world, model=other)):
        env = WorldEnv(one, 40, settings={"noise": 0.5})
        env.reset(seed=2)
        done = [env.step(actions[:, t]) for t in range(24)]
        seen.append([(obs["state"], *rest, infos["uncertainty"]) for obs, *rest, infos in done])
    for ours, theirs in zip(*seen, strict=True):
        for a, b in zip(ours[:-1], theirs[:-1], strict=True):
            assert np.array_equal(a, b)
        assert theirs[-1] == pytest.approx(ours[-1], rel=1e-3, abs=1e-5)  # from states, not from changes
    other.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "dies",
            r"served.id foreign_models:point: a process ended with code 3\. It printed last: out of memory",
        ),
        ("sleeps", r"did not answer within 0\.5 s \(served\.timeout_s\)"),
        ("raises", r"it raised ValueError: no such scene"),
        ("flat", r"mean is of shape \(2, 4\), allowed: \(3, 2, 4\)"),
        ("nan", r"predict: mean is not finite"),
        ("below", r"predict: a deviation is below 0"),
    ],
)
def test_a_process_that_fails_is_one_clear_error(fault: str, words: str) -> None:
    model = served(fault=fault, timeout_s=0.5 if fault == "sleeps" else 60.0)
    with pytest.raises(ModelError, match=words):
        model.predict(*asked(2))
    if fault not in ("nan", "below"):
        with pytest.raises(ModelError, match="its process has ended"):
            model.predict(*asked(2))
    model.close()


def test_an_interrupted_question_has_no_later_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between a question and its answer, which the next question would have taken for its own."""

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with closing(served()) as model:
        with monkeypatch.context() as patch:
            patch.setattr("robot_rl.worlds.channel.Worker.answers", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.predict(*asked(2))
        with pytest.raises(ModelError, match="its process has ended"):
            model.predict(*asked(3))


def test_arrays_that_the_shared_memory_has_no_room_for_are_refused() -> None:
    with pytest.raises(
        StorageError, match=r"served\.rows=1000000000000 take \d+ MB .* Give a smaller served"
    ):
        served(rows=10**12)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("nothing", {}, r"returns a object without members, stride"),
        ("absent", {}, r"foreign_models has no function 'absent'\. Give module:function"),
        ("point", {"state_names": ["x"]}, r"its state_names are \['x'\], the episodes have \['x', 'y'"),
        ("point", {"action_names": ["v"]}, r"its action_names are \['v'\]"),
        ("point", {"members": 1}, r"it says 1 members .* allowed: 2 or more"),
        ("point", {"stride": 40}, r"strides of 40, allowed"),
        ("Point", {"colour": 1}, r"it raised TypeError: .*colour"),
    ],
)
def test_a_model_of_something_else_is_refused_at_hello(
    name: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(RobotRLError, match=words):
        served(name, **settings)


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robot_rl.worlds.serving.PROTOCOL", 3)
    with pytest.raises(ConfigError, match="protocol 3, this program has 2"):
        served()


def test_another_version_than_that_which_was_measured_is_refused(world: World, tmp_path: Path) -> None:
    with closing(served()) as model:
        replace(world, model=model).save(tmp_path / "point")
    load_world(tmp_path / "point")
    module = tmp_path / "foreign_models.py"
    module.write_text(module.read_text().replace('version="1"', 'version="2.0"'))
    with pytest.raises(CheckpointError, match=r"the model says version '2\.0', but '1' was measured\. Serve"):
        load_world(tmp_path / "point")


def test_the_model_of_the_documentation_is_one(tmp_path: Path) -> None:
    page = (Path(robot_rl.__file__).parents[1] / "docs" / "worlds.md").read_text()
    (tmp_path / "my_model.py").write_text(page.split("# my_model.py")[1].split("```")[0].partition("\n")[2])
    point = replace(META, state_names=("x", "y"))
    with closing(Served(ServedConfig(id="my_model:load", settings={"folder": "w"}), point)) as model:
        window, actions, steps = asked(4)
        origin = np.zeros((4, 2), np.float32)
        found = model.predict(replace(window, state=origin, past_state=origin), actions, steps)
    assert found.mean[0, :, 0].numpy() == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert found.mean[1, :, 0].numpy() == pytest.approx([0.052, 0.104, 0.156, 0.208])


def test_settings_of_models_of_others_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"served.id: got 'model', allowed: module:function"):
        ServedConfig(id="model")
    with pytest.raises(ConfigError, match=r"served.python: '/no/python' is no program"):
        Served(ServedConfig(id="a:b", python="/no/python"), META)
