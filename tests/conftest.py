"""What every test gets: one thread, no window, and a lease file apart from that of real runs."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and numpy load: the suite shares its cores
os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(scope="session", autouse=True)
def own_lease_file(tmp_path_factory: pytest.TempPathFactory):
    """Keeps tests, and the processes they start, from waiting for a training run on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBOT_RL_STATE", str(tmp_path_factory.mktemp("state")))
        yield
