from pathlib import Path

import numpy as np

from robot_rl.data.example import record_example
from robot_rl.data.store.reader import StoreReader


def test_one_more_episode_each_time(tmp_path: Path) -> None:
    for count in (1, 2):
        store = StoreReader(record_example(tmp_path / "demos"))
        assert store.lengths().tolist() == [20] * count
    episode = store.read(1)
    assert episode.is_complete
    np.testing.assert_array_equal(episode.obs["state"][7], [7, 7])
    assert abs(int(episode.obs["wrist.rgb"][7].mean()) - 6) <= 1  # JPEG; step 7 saw the picture of step 6
