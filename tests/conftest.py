"""What every test gets: one thread, no window, and leases and claims apart from those of real runs."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and numpy load: the suite shares its cores
os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(scope="session", autouse=True)
def own_lease_file(tmp_path_factory: pytest.TempPathFactory):
    """Keeps tests, and the processes they start, from waiting for a training run on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBOT_RL_STATE", str(tmp_path_factory.mktemp("state")))
        patch.setenv("ROBOT_RL_CLAIMS", str(tmp_path_factory.mktemp("claims")))
        yield


@pytest.fixture
def whole_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For whole runs: leases of the test's own, and no report, which takes longer than a tiny run."""
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state"))
    for kind in ("phases", "finetune.run"):
        monkeypatch.setattr(f"robot_rl.train.{kind}.write_report", lambda folder: folder / "report.html")


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with <name>.pem and <name>.key of authority, server and robot, and of a stranger."""
    folder = tmp_path_factory.mktemp("pki")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    signed = ["-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial", "-days", "2"]

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("authority", "stranger"):
        openssl("req", "-x509", *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")
    for name in ("server", "robot"):
        openssl("req", *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-extfile", "names", "-out", f"{name}.pem")
    return folder


@pytest.fixture
def token(tmp_path: Path) -> str:
    """Returns a file with a secret that a policy server and its clients share."""
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("a secret of 32 letters, at least\n")
    return str(path)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names every file and folder that is brought to the disk from here on."""
    seen: list[str] = []
    for name in ("fsync", "fdatasync"):
        sync = getattr(os, name)

        def note(handle: int, sync: Callable[[int], None] = sync) -> None:
            seen.append(os.readlink(f"/proc/self/fd/{handle}"))
            sync(handle)

        monkeypatch.setattr(os, name, note)
    return seen
