"""A scene that a browser draws: MuJoCo's own web viewer (mujoco.studio) behind a unix socket.

The viewer asks nobody for a token, takes models from all who connect, and would listen on all interfaces. It
gets a unix socket instead, which only this user can open.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import mujoco

from robot_rl.sim.backends.model_index import ModelIndex
from robot_rl.sim.robots.robot import RobotNames


class ShownScene:
    """One state of a scene, which others write: nothing moves by itself."""

    def __init__(self, spec: mujoco.MjSpec, robot: RobotNames) -> None:
        """Compiles the scene; `robot` names its joints."""
        self._model = spec.compile()
        self._data = mujoco.MjData(self._model)
        self.index = ModelIndex(self._model, robot)
        self.qpos, self.mocap_pos = self._data.qpos, self._data.mocap_pos
        self.mocap_quat, self.body_pos = self._data.mocap_quat, self._data.xpos

    def place(self) -> None:
        """Puts all bodies where joints (`qpos`) and mocap poses say."""
        mujoco.mj_forward(self._model, self._data)

    @contextlib.contextmanager
    def served(self, path: Path, title: str) -> Generator[Callable[[], bool]]:
        """Serves the viewer at a unix socket.

        Yields a function that shows the state as it is now; it returns whether the viewer is there.
        """
        # By name: the stubs of mujoco know no viewers.
        names = ("mujoco.studio.launch_web", "mujoco.studio.viewer_protocol", "mujoco.studio.web.web_server")
        launch_web, protocol, web_server = (cast("Any", importlib.import_module(name)) for name in names)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen()  # at once: the viewer does so some time after it was launched
            # There is no setting for it (mujoco 4.0.0, studio/web_viewer.py: host "::").
            web_server.bind_public_socket = lambda host, port: listener
            try:
                with launch_web.launch(protocol.ViewerConfig(gfx="web", title=title)) as handle:

                    def show() -> bool:
                        handle.sync(self._model, self._data)
                        return handle.is_running()

                    show()
                    yield show
            finally:
                path.unlink(missing_ok=True)
