"""A task without a scripted expert: all that needs demonstrations of it is refused, with one message."""

from pathlib import Path

import pytest

from robot_rl.cli.main import main
from robot_rl.cli.train import config
from robot_rl.core.errors import ConfigError
from robot_rl.train.before import check_before_learner

MESSAGE = "demos: the task 'quadrotor_hover' has no scripted expert. Train without demonstrations"


@pytest.mark.parametrize("words", [["recipe=smoke"], ["recipe=pick_cube_pixels", "env.cameras=[]"]])
def test_a_run_is_refused_before_the_learner_is_loaded(words: list[str]) -> None:
    """One that clones demonstrations, and one whose learner asks the expert for labels."""
    with pytest.raises(ConfigError, match=MESSAGE):
        check_before_learner(config([*words, "env.task=quadrotor_hover"]))


def test_a_run_without_demonstrations_is_not() -> None:
    check_before_learner(config(["recipe=quadrotor"]))


def test_collect_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", "task=quadrotor_hover", "episodes=2", f"out={tmp_path / 'demos'}"]) == 2
    assert MESSAGE in capsys.readouterr().err
    assert not (tmp_path / "demos").exists()
