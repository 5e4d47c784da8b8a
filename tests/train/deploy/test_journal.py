"""What a deployment came to is on the disk as a whole, or as it was."""

import errno
import json
import os
from pathlib import Path

import pytest

from robot_rl.core.errors import StorageError
from robot_rl.train.deploy.config import DeployConfig
from robot_rl.train.deploy.journal import EpisodeOutcome, Journal


def test_a_full_disk_leaves_the_older_report_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(folder=tmp_path, config=DeployConfig(station="x", run="y"), task="reach", real=False)
    journal.write()
    journal.episodes.append(EpisodeOutcome(seed=1, success=True, steps=10, limited=0))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=rf"^{tmp_path}: the disk is full .*Make room"):
            journal.write()
    assert json.loads((tmp_path / "deploy.json").read_text())["episodes"] == 0
    journal.write()
    assert json.loads((tmp_path / "deploy.json").read_text())["episodes"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["deploy.json"]
