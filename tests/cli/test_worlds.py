"""`robot-rl worlds`: a model of recorded episodes, a run in it, and mistakes in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from robot_rl.cli.main import main
from robot_rl.core.errors import DatasetError
from robot_rl.data.demos import open_demonstrations
from robot_rl.worlds import build, curve
from robot_rl.worlds.curve import Needed
from tests.worlds import foreign_videos

Run = Callable[..., dict[str, Any]]
TINY = ("model.members=2", "model.width=16", "model.depth=1", "fit.updates=40", "fit.batch=16", "fit.ahead=2")
RUN = (
    *("num_envs=4", "n_exec=4", "policy.width=16", "policy.depth=1", "policy.steps=2", "bc.updates=10"),
    *("bc.batch=16", "evaluate.episodes=4", "evaluate.num_envs=4", "evaluate.every_env_steps=0"),
    *("evaluate.quick_episodes=4", "video.episodes=0", "video.failures=0"),
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))


@pytest.fixture
def robot_rl(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str) -> dict[str, Any]:
        assert main([*words, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.slow
def test_a_model_from_recorded_episodes_to_a_run_in_it(
    robot_rl: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    robot_rl("collect", "task=reach", "episodes=250", "bias_m=0.01", "out=demos")
    found = robot_rl("worlds", "fit", "data=demos", "out=point", *TINY)
    assert found["outcome"] == "predicate"
    assert found["episodes"] == 250
    assert found["real_steps"] > 250
    assert (tmp_path / "point" / "calibration.png").stat().st_size > 10_000
    listed = robot_rl("devices")["devices"]
    (world,) = [one for one in listed if one["kind"] == "world"]
    assert world["name"] == found["device"]
    assert world["labels"]["task"] == "reach"
    # A model of a few updates is not to be believed; no run gets a lease of it.
    inside = ("env.task=reach", "env.kind=world", "env.id=point", "demos.path=demos")
    trained = ("train", "recipe=reinflow", *inside, "method.env_steps=160", "method.decisions=5", *RUN)
    head = tmp_path / "point" / "world.json"
    assert any("intervals hold" in reason for reason in found["reasons"])
    assert main(list(trained)) == 2
    assert "quarantined" in capsys.readouterr().err
    content = json.loads(head.read_text())
    content["report"]["reasons"] = []
    content.pop("checksum")
    head.write_text(json.dumps(content))
    summary = robot_rl(*trained)
    assert summary["control_steps"] == {"demo": found["real_steps"], "world": 160}
    # Off-policy RL imagines its replay, and leaves nothing that could pass for experience.
    off_policy = ("train", "recipe=residual", *inside, f"bc.policy={summary['run']}/policy/base")
    again = robot_rl(*off_policy, "method.env_steps=160", "method.capacity=1000", "method.batch=16", *RUN)
    assert again["control_steps"]["world"] == 160
    assert not (Path(again["run"]) / "experience").exists()
    # A gate of offline steps asks the model, which costs no real step.
    gate = ("method.offline.gate.scorer=world", "method.offline.gate.world=point", "method.offline.batch=8")
    offline = (
        "method.offline.critic_updates=2",
        "method.offline.updates=2",
        "method.offline.gate.episodes=4",
    )
    judged = robot_rl(
        *("train", "recipe=rl100", "env.task=reach", "demos.path=demos", "demos.filter.updates=0", *gate),
        *(*offline, "method.env_steps=0", "method.distil.updates=0", *RUN),
    )
    assert judged["control_steps"]["world"] >= 2 * 4
    assert "sim" not in judged["control_steps"]
    # Episodes of a policy that looks ahead in it are real ones.
    ahead = (f"policy={summary['run']}", "search.world=point", "search.candidates=2", "keep.success=false")
    assert robot_rl("collect", *ahead, "episodes=4", "num_envs=4", "out=ahead")["episodes"] == 4
    assert robot_rl("replay", "info", "ahead")["episodes"] == 4
    both = robot_rl("worlds", "imagine", "world=point", f"policy={summary['run']}", "episodes=4", "video=1")
    assert both["real"]["episodes"] == both["imagined"]["episodes"] == 4
    assert both["real_success"] == both["real"]["success"]
    assert Path(both["films"][0]).stat().st_size > 1000
    reported = robot_rl("worlds", "report", "world=point")
    assert reported["imagined_success"] == both["imagined"]["success"]
    bias = both["imagined"]["success"] - both["real"]["success"]
    assert reported["agreement"] == {"bias": pytest.approx(bias)}
    assert (tmp_path / "point" / "agreement.png").stat().st_size > 5_000
    newer = robot_rl("worlds", "audit", "world=point", "data=demos")
    assert 0.3 < newer["shift"] < 3.0
    # The last audit judged it again: nobody searches in it either.
    assert main(["evaluate", f"policy={summary['run']}", "search.world=point", "episodes=4"]) == 2
    assert "quarantined" in capsys.readouterr().err
    # Another task's policy is not judged in it.
    other = robot_rl("train", "recipe=smoke", "stages=demos,clone,evaluate", "env.task=push_cube", *RUN)
    assert main(["worlds", "imagine", "world=point", f"policy={other['run']}"]) == 2
    assert "the world model is of something else" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_pictures_from_recorded_episodes_to_a_policy_that_sees(
    robot_rl: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = ("cameras=left", "image_size=32,32", "state=joint,tool")
    robot_rl("collect", "task=reach", "episodes=60", "bias_m=0.02", "noise_m=0.02", *seen, "out=demos")
    sizes = ("images.codec_width=8", "images.width=8", "images.codec_updates=20", "images.updates=20")
    found = robot_rl(
        *("worlds", "fit", "data=demos", "out=seen", "env.state=joint,tool", "images.cameras=left"),
        *(*sizes, *TINY),
    )
    assert found["outcome"] == "classifier"  # the goal is in the pictures alone
    assert found["pictures"][0]["mae_of_copying"] > 0
    assert Path("seen/pictures.png").stat().st_size > 5_000
    pixels = ("env.task=reach", "env.cameras=[left]", "env.image_size=[32,32]", "env.state=[joint,tool]")
    policy = ("policy.cameras=[left]", "policy.horizon=4", "n_exec=4", "demos.episodes=4", "demos.disturb=0")
    short = (word for word in RUN if not word.startswith("policy.steps"))
    trained = robot_rl(
        *("train", "recipe=pick_cube_pixels", "stages=demos,clone,evaluate", *pixels, *policy, *short)
    )
    both = robot_rl("worlds", "imagine", "world=seen", f"policy={trained['run']}", "episodes=4", "video=1")
    assert both["imagined"]["episodes"] == 4
    assert Path(both["films"][0]).stat().st_size > 1000
    # A model of others shows the same camera; this one repeats what it is given, coarsely.
    shutil.copy(foreign_videos.__file__, ".")
    _, meta = open_demonstrations("demos")
    parts = ("state_names", "action_names")
    names = (f"served.settings.{name}=[{','.join(getattr(meta, name))}]" for name in parts)
    served = (
        *("worlds", "fit", "data=demos", "out=video", "env.state=joint,tool", "images.cameras=left"),
        *("served.id=foreign_videos:Still", *names),
    )
    assert main([*served, "served.settings.cameras=[]"]) == 2
    assert "has no cameras. Leave images.cameras out" in capsys.readouterr().err
    assert not Path("video").exists()  # the same command without images.cameras= is no other fit
    found = robot_rl(*served, "served.settings.cameras=[left]")
    assert any("no better than the last real ones" in reason for reason in found["reasons"])
    assert Path("video/pictures.png").stat().st_size > 5_000
    both = robot_rl("worlds", "imagine", "world=video", f"policy={trained['run']}", "episodes=4", "video=1")
    assert both["imagined"]["episodes"] == 4
    assert Path(both["films"][0]).stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fit", "data=nowhere", "out=x"), "nowhere"),
        (("fit", "data=[]", "out=x"), "data: got []"),
        (("train",), "worlds: no sub-command 'train'"),
        (("audit", "world=nowhere"), "no world model (world.json) is there"),
        (("fit", "data=nowhere", "out=x", "model.members=1"), "one has no disagreement"),
        (
            ("fit", "data=nowhere", "out=x", "outcome=predicate", "outcome_vote=0.8"),
            "outcome_vote: got 0.8, allowed: left out with outcome=predicate",
        ),
        (("imagine", "world=nowhere", "policy=x", "episodes=0"), "episodes: got 0"),
        (("fit", "data=nowhere", "out=x", "images.members=1"), "images.members: got 1"),
        (("fit", "data=nowhere", "out=x", "device=gpu"), "device: got 'gpu', allowed on this machine: cpu"),
        (("audit", "world=nowhere", "device=gpu"), "device: got 'gpu', allowed on this machine: cpu"),
        (
            ("imagine", "world=nowhere", "policy=x", "settings.device=cpu"),
            "settings.device: got 'cpu', allowed: left out. Say device=cpu",
        ),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert main(["worlds", *words]) == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


FEW = ("collect", "task=reach", "episodes=8", "out=demos", "num_envs=4", "bias_m=0.02")


def test_too_few_episodes_say_how_many_are_enough(robot_rl: Run, capsys: pytest.CaptureFixture[str]) -> None:
    robot_rl(*FEW)
    assert main(["worlds", "fit", "data=demos", "out=point", *TINY]) == 2
    said = capsys.readouterr().err
    assert "got 8 episodes (6 to learn from, 2 for calibration, 0 to judge)" in said
    assert "curve=true draws the error" in said
    assert not Path("point").exists()  # other data may be given under its name


@pytest.mark.slow
def test_a_curve_of_too_few_episodes_says_how_many_an_error_needs(
    robot_rl: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    robot_rl(*FEW)
    assert main(["worlds", "fit", "data=demos", "out=point", *TINY, "curve=true", "curve_error=0.5"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "or more like these" in said
    found = json.loads(Path("point/curve.json").read_text())
    assert [row["episodes"] for row in found["rows"]] == [2, 3, 6]
    assert Needed(**found["needed"]).words() in said
    assert Path("point/curve.png").stat().st_size > 5_000


@pytest.mark.slow
def test_a_fit_that_was_killed_goes_on_behind_its_curve(
    robot_rl: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    robot_rl("collect", "task=reach", "episodes=250", "bias_m=0.01", "out=demos")
    fit, learned = ("worlds", "fit", "data=demos", "out=point", *TINY, "curve=true"), curve.learning_curve
    curves = list[int]()

    def counted(*how: Any, **more: Any) -> list[dict[str, float]]:
        curves.append(1)
        return learned(*how, **more)

    def killed(*how: Any, **more: Any) -> None:
        raise DatasetError("killed")

    monkeypatch.setattr(curve, "learning_curve", counted)
    with monkeypatch.context() as during:
        during.setattr(build, "fitted", killed)
        assert main(list(fit)) == 2
    before = json.loads(Path("point/fit.json").read_text())
    for name in ("outcome_vote", "curve_error", "checksum"):  # as an earlier version kept them
        before.pop(name)
    before["model"].pop("kind")
    Path("point/fit.json").write_text(json.dumps(before))
    assert main([*fit, "fit.updates=41", "model.width=17"]) == 2
    assert "other settings (fit.updates, model.width)" in capsys.readouterr().err
    found = robot_rl(*fit, "curve_error=0.25")
    assert (len(curves), found["needed"]["error"]) == (1, 0.25)
