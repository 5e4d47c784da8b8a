"""Success classifiers: what they find, how often they are wrong, and when they may not be used."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from robot_rl.cli import reward as command
from robot_rl.core.errors import CheckpointError, ConfigError, DatasetError
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.store.seal import seal
from robot_rl.data.store.writer import StoreWriter
from robot_rl.real.teleop.intent import Intent
from robot_rl.train.deploy.classifier import (
    ClassifierConfig,
    Labelled,
    Report,
    SuccessClassifier,
    _network,
    _parts,
    _threshold,
    _unfit,
    train_classifier,
)
from robot_rl.train.deploy.labels import read_labelled
from robot_rl.train.deploy.reward import ClassifierJudge, TaskJudge, make_judge

QUICK = ClassifierConfig(updates=30, batch=16, folds=2)
NOTHING = Intent()


def picture(rng: np.random.Generator, success: bool) -> np.ndarray[Any, Any]:
    """Returns noise with a bright square: in the middle where it shows success, else in a corner."""
    frame = rng.integers(0, 80, (48, 48, 3), np.uint8)
    at = 18 if success else int(rng.choice([2, 34]))
    frame[at : at + 12, at : at + 12] = 230
    return frame


def labelled(episodes: int, *, per_episode: int = 8, seed: int = 0) -> Labelled:
    """Returns episodes of failures, every second of which ends in two frames of success."""
    rng = np.random.default_rng(seed)
    success = np.array(
        [[e % 2 == 0 and f >= per_episode - 2 for f in range(per_episode)] for e in range(episodes)]
    )
    frames = np.stack([picture(rng, bool(shows)) for shows in success.ravel()])
    return Labelled(frames, success.ravel(), np.repeat(np.arange(episodes), per_episode), "front.rgb")


def report(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "successes": 50,
        "failures": 500,
        "threshold": 0.9,
        "held_out_failures": 100,
        "false_positives": 0,
        "false_positive_rate": 0.0,
        "false_positive_ci": (0.0, 0.037),
        "held_out_successes": 10,
        "missed": 1,
        "missed_rate": 0.1,
        "missed_ci": (0.018, 0.404),
        "unfit": "",
    }
    return Report(**(fields | changes))


def test_it_tells_success_from_failure_on_episodes_it_never_saw(tmp_path: Path) -> None:
    classifier = train_classifier(labelled(40), QUICK)
    found = classifier.report
    assert (found.successes, found.failures) == (40, 280)
    # A fifth of the 20 episodes of either kind is held out: 4 with 6 failures, 4 with 8.
    assert (found.held_out_failures, found.held_out_successes) == (56, 8)
    assert found.false_positives == found.missed == 0
    assert found.false_positive_ci[1] == pytest.approx(0.0642, abs=1e-4)  # Wilson, 0 of 56
    assert found.unfit == ""
    classifier.save(tmp_path / "classifier")
    again = SuccessClassifier.load(tmp_path / "classifier")
    assert again.report == found
    new = labelled(4, seed=9)
    np.testing.assert_array_equal(again.score(new.frames), classifier.score(new.frames))
    seen = [again.says_success({"front.rgb": frame[None]}) for frame in new.frames]
    assert seen == new.success.tolist()
    with pytest.raises(DatasetError, match=r"looks at 'front.rgb', the observation has \['state'\]"):
        again.says_success({"state": np.zeros((1, 3))})


def test_no_episode_is_in_two_parts() -> None:
    data = labelled(40)
    parts = _parts(data, ClassifierConfig(), np.random.default_rng(0))
    assert set(parts) == {0, 1, 2, 3, 4}
    for episode in range(40):
        assert len(set(parts[data.episode == episode])) == 1


def test_the_threshold_lets_the_allowed_share_pass_and_no_more() -> None:
    scores = np.linspace(0.6, 0.9, 200)
    # 1 % of 200 are 2: the third highest is the highest that does not pass.
    threshold = _threshold(scores, 0.01)
    assert (scores >= threshold).sum() == 2
    assert _threshold(np.full(50, 0.7), 0.01) > 0.7, "ties do not pass together"
    assert _threshold(np.full(50, 0.1), 0.01) == 0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"successes": 19}, "it saw 19 successes and 500 failures, allowed: at least 20 and 100. Label more"),
        ({"failures": 99}, "it saw 50 successes and 99 failures"),
        # 8 of 100: the interval begins at 4.1 %, surely more than 1 %.
        ({"false_positives": 8, "false_positive_ci": (0.041, 0.15)}, "8 of 100 held-out failures pass"),
        ({"missed": 9, "missed_ci": (0.596, 0.982)}, "it misses 9 of 10 held-out successes"),
    ],
)
def test_when_it_may_not_be_used(changes: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    found = _unfit(report(**changes), 0.01)
    assert (words in found) if words else found == ""
    SuccessClassifier(_network(), "front.rgb", replace(report(), unfit=found)).save(tmp_path / "c")
    if not words:
        SuccessClassifier.load(tmp_path / "c")
        return
    with pytest.raises(CheckpointError, match="may not be used as a reward"):
        make_judge("classifier", str(tmp_path / "c"))


def test_too_few_episodes_cannot_be_held_out() -> None:
    with pytest.raises(DatasetError, match=r"4 episodes \(2 with success\) do not give held-out frames"):
        train_classifier(labelled(4), QUICK)


class Sure:
    """A classifier that answers what it is told."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)

    def says_success(self, obs: Any) -> bool:
        return self.answers.pop(0)


def test_a_classifier_has_to_be_sure_in_a_row_and_a_person_stands_above_it() -> None:
    answers = cast(SuccessClassifier, Sure(True, True, False, True, True, True))
    judge = ClassifierJudge(answers, in_a_row=3)
    assert [judge({}, False, False, NOTHING)[0] for _ in range(6)] == [*[False] * 5, True]
    assert judge({}, False, False, Intent(verdict="fail")) == (False, True)
    judge = ClassifierJudge(cast(SuccessClassifier, Sure(True, True, True)), in_a_row=3)
    judge({}, False, False, NOTHING)
    judge.begin()
    assert not any(judge({}, False, False, NOTHING)[0] for _ in range(2)), "a row does not cross episodes"


def test_the_task_is_believed_unless_the_person_speaks() -> None:
    judge = TaskJudge()
    assert judge({}, True, True, NOTHING) == (True, False)
    assert judge({}, False, True, NOTHING) == (False, True)
    assert judge({}, True, True, Intent(verdict="fail")) == (False, True)


def test_an_unknown_reward_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no reward named 'keys'. Did you mean 'key'"):
        make_judge("keys", None)
    with pytest.raises(ConfigError, match=r"human.classifier: missing"):
        make_judge("classifier", None)


def test_frames_of_a_store_are_labelled_by_what_their_step_led_to(tmp_path: Path) -> None:
    meta = EpisodesMeta(
        task="t", robot="r", control_hz=20.0, instruction="go", state_names=("x",), action_names=("a",)
    )
    features = {"state": Feature("float32", (1,)), "front.rgb": Feature("uint8", (48, 48, 3))}

    def seen(number: int) -> dict[str, Any]:
        return {"state": np.array([number], np.float32), "front.rgb": np.full((48, 48, 3), number, np.uint8)}

    with StoreWriter(tmp_path, meta, features, picture="png") as writer:
        for step in range(3):
            over = step == 2
            writer.append(
                obs=seen(step), action=[0.0], success=over, terminated=over, final_obs=seen(step + 1)
            )
    found = read_labelled(tmp_path, "front.rgb")
    assert found.frames[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert found.success.tolist() == [False, False, True]
    with pytest.raises(DatasetError, match=r"has no pictures 'wrist.rgb', it has front.rgb"):
        read_labelled(tmp_path, "wrist.rgb")


def test_of_a_dataset_a_part_is_read_under_other_names(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    meta = EpisodesMeta(
        task="t", robot="r", control_hz=20.0, instruction="go", state_names=("x",), action_names=("a",)
    )
    features = {"state": Feature("float32", (1,)), "front.rgb": Feature("uint8", (48, 48, 3))}
    obs = [{"state": np.zeros(1, np.float32), "front.rgb": picture(rng, False)} for _ in range(3)]
    with StoreWriter(tmp_path / "data", meta, features, picture="png") as writer:
        for _ in range(3):
            for step in range(2):
                over = step == 1
                writer.append(
                    obs=obs[step], action=[0.0], success=over, terminated=over, final_obs=obs[step + 1]
                )
    seal(tmp_path / "data")
    assert read_labelled(tmp_path / "data", "front.rgb").episode.tolist() == [0, 0, 1, 1, 2, 2]
    part = read_labelled(tmp_path / "data", "front.rgb", episodes=[0, 2])
    assert part.episode.tolist() == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match="episodes: got '2-0', allowed: the smaller number first"):
        command.run(["train", f"data={tmp_path / 'data'}", f"out={tmp_path / 'out'}", "episodes=2-0"])
    save_pictures(tmp_path / "pictures", labelled(4))
    with pytest.raises(ConfigError, match=r"on_damage: is of datasets, and .* is a folder of pictures"):
        read_labelled(tmp_path / "pictures", "front.rgb", on_damage="skip")


def save_pictures(folder: Path, data: Labelled) -> None:
    for name in ("success", "failure"):
        (folder / name).mkdir(parents=True)
    for i, (frame, shows, episode) in enumerate(zip(data.frames, data.success, data.episode, strict=True)):
        Image.fromarray(frame).save(folder / ("success" if shows else "failure") / f"{episode}-{i}.png")


def test_the_command_trains_from_a_folder_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_pictures(tmp_path / "data", labelled(20))
    words = [f"data={tmp_path / 'data'}", f"out={tmp_path / 'out'}", "updates=20"]
    assert command.run(["train", *words, "--json"]) == 0
    said = capsys.readouterr().out
    assert "20 successes and 140 failures" in said
    assert "held out: 0 of 28 failures count as success (0.0%, 95 % interval 0.0% to 12.1%)" in said
    assert asdict(SuccessClassifier.load(tmp_path / "out").report)["held_out_failures"] == 28
    with pytest.raises(DatasetError, match="exists already"):
        command.run(["train", *words])


def test_the_command_says_that_too_few_frames_are_not_fit_for_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_pictures(tmp_path / "data", labelled(12, per_episode=4))
    words = [f"data={tmp_path / 'data'}", f"out={tmp_path / 'out'}", "updates=10"]
    assert command.run(["train", *words]) == 1
    assert "not fit for use: it saw 12 successes and 36 failures" in capsys.readouterr().out
