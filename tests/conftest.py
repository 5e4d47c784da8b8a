"""What every test gets: one thread, no window, and leases and claims apart from those of real runs."""

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and numpy load: the suite shares its cores
os.environ.setdefault("MPLBACKEND", "Agg")


_ALONE = ("real", "interop", "faults", "train/deploy", "rollout/test_process.py", "train/test_serve.py")
"""Where tests keep time themselves or start processes that do: a test beside them takes it from them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = [Path(__file__).parent / name for name in _ALONE]
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in folders):
            item.add_marker("alone")


@pytest.fixture(scope="session", autouse=True)
def own_lease_file(tmp_path_factory: pytest.TempPathFactory):
    """Keeps tests, and the processes they start, from waiting for a training run on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBOT_RL_STATE", str(tmp_path_factory.mktemp("state")))
        patch.setenv("ROBOT_RL_CLAIMS", str(tmp_path_factory.mktemp("claims")))
        yield


def _check_handle(handle: int) -> None:
    os.fstat(handle)


@pytest.fixture(scope="session", autouse=True)
def syncs_do_not_wait(request: pytest.FixtureRequest) -> Generator[None]:
    """Has a sync check its file and not wait for the disk: a tiny run syncs 400 times. Speed claims do wait.

    Processes that tests start sync as ever; so do those whose power the tests cut.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not any(item.get_closest_marker("benchmark") for item in request.session.items):
            for name in ("fsync", "fdatasync"):
                patch.setattr(os, name, _check_handle)
        yield


@pytest.fixture(scope="session", autouse=True)
def settings_are_composed_once() -> Generator[None]:
    """Keeps what Hydra composes of the shipped settings: 50 ms, for the same words in hundreds of tests."""
    from robot_rl.config import CONFIGS, compose

    kept: dict[tuple[str | None, tuple[str, ...]], Any] = {}
    hydra = compose._compose

    def composed(root: str | None, overrides: list[str], folder: Path) -> Any:
        if folder != CONFIGS:
            return hydra(root, overrides, folder)
        words = (root, tuple(overrides))
        if words not in kept:
            kept[words] = hydra(root, overrides, folder)
        return copy.deepcopy(kept[words])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_compose", composed)
        yield


@pytest.fixture
def whole_runs(tmp_path: Path) -> Generator[None]:
    """For whole runs: leases of the test's own, and no report."""
    from tests.runs import undisturbed

    with undisturbed(tmp_path / "state"):
        yield


@pytest.fixture(scope="session")
def no_hub() -> Generator[None]:
    """Forbids the hub for the session: what is not on this machine fails at once."""
    pytest.importorskip("lerobot", reason="needs the extra: pip install -e '.[lerobot]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        import huggingface_hub.constants

        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield


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


Watch = Callable[[Path], AbstractContextManager[list[Path]]]
_WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
_watcher: Callable[[str], None] | None = None


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if _watcher is None:
        return
    is_write = event in _WRITES or (
        event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    )
    if is_write:
        _watcher(os.fsdecode(args[0]) if isinstance(args[0], str | bytes) else "")


@pytest.fixture(scope="session")
def hooked() -> None:
    """Lets `kills` see what Python writes; a hook stays for good."""
    sys.addaudithook(_on_event)


@pytest.fixture
def kills(hooked: None, tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """Copies a folder before every call inside that changes it: what a kill at that call leaves.

    Libraries that are not Python's write without being seen, into files that get their names in Python.
    """
    copies, place = list[Path](), tmp_path_factory.mktemp("kills")

    @contextmanager
    def watch(folder: Path) -> Generator[list[Path]]:
        def copy(path: str) -> None:
            global _watcher
            if path.startswith(str(folder)):
                _watcher = None
                copies.append(Path(shutil.copytree(folder, place / f"{len(copies):03d}")))
                _watcher = copy

        global _watcher
        _watcher = copy
        try:
            yield copies
        finally:
            _watcher = None

    return watch
