"""What of a dataset a fine-tuning run reads: a stranger's names, chosen episodes and cameras, no damage."""

from pathlib import Path

import pytest

from robot_rl.cli.finetune import spelled
from robot_rl.config import load
from robot_rl.config.words import words
from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.finetune.split import open_data
from tests.data.lerobot.conftest import make_episode
from tests.data.lerobot.shapes import annotated, odd, version_21


def config(folder: Path, *words: str) -> FinetuneConfig:
    given = [f"dataset={folder}", "heldout=1", "horizon=4", *words]
    return load(FinetuneConfig, [spelled(word) for word in given], config_name="finetune")


def test_odd_names_train_with_the_mapping_that_the_error_proposes(tmp_path: Path) -> None:
    folder = odd(tmp_path / "set", make_episode)
    with pytest.raises(DatasetError, match="Read it with rename=") as refused:
        open_data(config(folder))
    word = str(refused.value).split("Read it with ")[1].split(", or write")[0]
    mapping = word.removeprefix("rename=").replace(":", ": ").replace(",", ", ")
    for spelling in (word, f"dataset.{word}", f"dataset.rename={{{mapping}}}"):
        dataset, split = open_data(config(folder, spelling))
        assert set(dataset.features) == {"state", "cam_high.rgb"}
        assert (split.train, split.heldout) == ((0, 1, 2), (3,))


def test_one_missing_video_costs_one_episode(tmp_path: Path) -> None:
    folder = version_21(tmp_path / "set", make_episode)
    (folder / "videos/chunk-000/observation.images.front/episode_000006.mp4").unlink()
    dataset, split = open_data(config(folder, "on_damage=skip"))
    assert [problem.kind for problem in dataset.skipped] == ["missing-video"]
    assert (dataset.index.episode.tolist(), split.heldout) == ([5, 7, 8], (2,))
    dataset, _ = open_data(config(folder, "episodes=0,2-3"))
    assert dataset.index.episode.tolist() == [5, 7, 8]
    dataset, _ = open_data(config(folder, "cameras=front", "episodes=[0,2-3]"))
    assert dataset.cameras == ("front.rgb",)


def test_a_dataset_without_a_state_says_so(tmp_path: Path) -> None:
    folder = annotated(tmp_path / "set", make_episode)
    with pytest.raises(
        DatasetError, match=r"no feature 'observation\.state', there are quality2, .*rename=<col"
    ):
        open_data(config(folder, "rename=observation.state:quality2"))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rename=actions", "rename: got 'actions', allowed"),
        ("episodes=a", "episodes: got 'a', allowed: a whole"),
    ],
)
def test_a_word_that_does_not_say_it_is_refused(tmp_path: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, word)


@pytest.mark.parametrize(
    "given",
    [["episodes=0-9,12"], ["rename=actions:action,zust\u00e4nde:observation.state"], ["cameras=front,wrist"]],
)
def test_the_words_of_a_report_repeat_the_run(given: list[str], tmp_path: Path) -> None:
    asked = config(tmp_path, *given)
    again = load(FinetuneConfig, [spelled(word) for word in words(asked)], config_name="finetune")
    assert again == asked
