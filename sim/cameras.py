"""Cameras: colour and depth images of simulations, drawn in software or on a GPU.

B simulations drawn, h and w the image's height and width. Drawing is serial and belongs to one
thread. What it costs is the shadow map, not the pixels: with MuJoCo's default of 4096 x 4096 a
96 x 96 image of a Panda at a table takes 42 ms on one core, with 1024 x 1024 9 ms, without
shadows 0.9 ms (llvmpipe, 4 samples a pixel).
"""

import atexit
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, ModelError, nearest
from robot_rl.sim.gl import GlContext, find_backend, open_context

__all__ = ["Camera", "Renderer", "find_backend"]

Array = NDArray[Any]

SHADOW_MAP_PIXELS = 1024
"""Side of the shadow map of cameras with shadows; MuJoCo's own default costs five times the time."""

_MAX_GEOMS = 2000
_ANTIALIASING_SAMPLES = 4


@dataclass(frozen=True, kw_only=True)
class Camera:
    """An image of a camera that the model defines: its pose and field of view are the model's."""

    name: str
    """Name of the camera in the model."""
    width: int = 96
    """Pixels, from 1 to 4096."""
    height: int = 96
    """Pixels, from 1 to 4096."""
    shadows: bool = False
    """Draw shadows: ten times the time of a small image. For films, rarely for learning."""

    def __post_init__(self) -> None:
        for side in ("width", "height"):
            pixels = getattr(self, side)
            if not 1 <= pixels <= 4096:
                raise ConfigError(f"camera {self.name}: {side} is {pixels}, allowed is 1 to 4096 pixels.")


class Renderer:
    """Draws the simulations of one model; all its cameras share one OpenGL context.

    Raises:
        RenderError: this machine cannot draw; the message names what to install.
        ModelError: the model has no camera of a given name.
    """

    def __init__(self, model: mujoco.MjModel, cameras: Sequence[Camera]) -> None:
        self._cameras = {camera.name: camera for camera in cameras}
        self._ids = {camera.name: _camera_id(model, camera.name) for camera in cameras}
        # A model of its own: the framebuffer and the shadow map take their sizes from it.
        self._model = copy.copy(model)
        self._model.vis.global_.offwidth = max((camera.width for camera in cameras), default=1)
        self._model.vis.global_.offheight = max((camera.height for camera in cameras), default=1)
        self._model.vis.quality.shadowsize = SHADOW_MAP_PIXELS
        self._model.vis.quality.offsamples = _ANTIALIASING_SAMPLES
        self._scratch: tuple[mujoco.MjModel, mujoco.MjData] | None = None
        self._scene = mujoco.MjvScene(self._model, _MAX_GEOMS)
        self._flags = self._scene.flags.copy()
        self._view, self._option = mujoco.MjvCamera(), mujoco.MjvOption()
        self._view.type = int(mujoco.mjtCamera.mjCAMERA_FIXED)
        self._gl: GlContext | None = open_context()
        self._gl.make_current()
        self._drawing = mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        self._drawing.readDepthMap = int(mujoco.mjtDepthMap.mjDEPTH_ZEROFAR)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._drawing)
        _close_at_exit(self)

    def rgb(self, data: mujoco.MjData, camera: str) -> Array:
        """Returns a uint8 image (h, w, 3) of forwarded data of this renderer's model."""
        return self._rgb(self._model, data, self._camera(camera))

    def depth(self, data: mujoco.MjData, camera: str) -> Array:
        """Returns distances along the viewing axis, float32 (h, w), in metres.

        Where nothing is, it is the far plane of the model (`vis.map.zfar` times its extent).
        """
        return self._depth(self._model, data, self._camera(camera))

    def render_batch(self, batch: Batch, ids: Array, camera: str, *, depth: bool = False) -> Array:
        """Returns images of the simulations `ids`: uint8 (B, h, w, 3), or depth float32 (B, h, w) in metres.

        Each is drawn with its own model fields (colours, lights, camera poses) and its present state.
        """
        asked = self._camera(camera)
        shape = (len(ids), asked.height, asked.width)
        images = np.empty(shape, np.float32) if depth else np.empty((*shape, 3), np.uint8)
        draw = self._depth if depth else self._rgb
        for row, sim in enumerate(ids):
            images[row] = draw(*self._materialise(batch, int(sim)), asked)
        return images

    def close(self) -> None:
        """Frees the OpenGL context; may be called twice."""
        if self._gl is not None:
            self._gl.make_current()
            self._drawing.free()
            self._gl.free()
            self._gl = None

    def _camera(self, name: str) -> Camera:
        if name not in self._cameras:
            raise ConfigError(
                f"renderer: it was not made with a camera {name!r}.{nearest(name, self._cameras)}"
            )
        return self._cameras[name]

    def _materialise(self, batch: Batch, sim: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """Copies one simulation into scratch space (made once: it costs a hundred times the copy)."""
        if self._scratch is None:
            self._scratch = batch.get_model(sim), batch.get_data(sim)
        model, data = batch.get_model(sim, self._scratch[0]), batch.get_data(sim, self._scratch[1])
        mujoco.mj_fwdKinematics(model, data)  # poses of bodies, cameras and lights: all that is drawn
        return model, data

    def _rgb(self, model: mujoco.MjModel, data: mujoco.MjData, camera: Camera) -> Array:
        rectangle = self._draw(model, data, camera, only_depth=False)
        image = np.empty((camera.height, camera.width, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, rectangle, self._drawing)
        return np.ascontiguousarray(image[::-1])  # OpenGL's first row is the lowest

    def _depth(self, model: mujoco.MjModel, data: mujoco.MjData, camera: Camera) -> Array:
        rectangle = self._draw(model, data, camera, only_depth=True)
        buffer = np.empty((camera.height, camera.width), np.float32)
        mujoco.mjr_readPixels(None, buffer, rectangle, self._drawing)
        near_m = model.vis.map.znear * model.stat.extent
        far_m = model.vis.map.zfar * model.stat.extent
        nearness = buffer[::-1].astype(np.float64)  # 1 at the near plane, 0 at the far plane
        if self._scene.camera[0].orthographic:
            return (far_m - nearness * (far_m - near_m)).astype(np.float32)
        return (near_m * far_m / (near_m + nearness * (far_m - near_m))).astype(np.float32)

    def _draw(
        self, model: mujoco.MjModel, data: mujoco.MjData, camera: Camera, *, only_depth: bool
    ) -> mujoco.MjrRect:
        if self._gl is None:
            raise RuntimeError("renderer: it is closed")
        self._gl.make_current()
        self._view.fixedcamid = self._ids[camera.name]
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, data, self._option, None, self._view, everything, self._scene)
        flags, names = self._scene.flags, mujoco.mjtRndFlag
        flags[:] = self._flags
        flags[names.mjRND_SHADOW] = camera.shadows and not only_depth
        # Flat colours without antialiasing: a depth between two surfaces would be on neither.
        flags[names.mjRND_SEGMENT] = flags[names.mjRND_IDCOLOR] = only_depth
        rectangle = mujoco.MjrRect(0, 0, camera.width, camera.height)
        mujoco.mjr_render(rectangle, self._scene, self._drawing)
        return rectangle


def _camera_id(model: mujoco.MjModel, name: str) -> int:
    number = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA.value, name)
    if number < 0:
        names = [
            mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_CAMERA.value, i) or f"#{i}"
            for i in range(model.ncam)
        ]
        raise ModelError(f"cameras: the model has no camera {name!r}.{nearest(name, names)}")
    return number


_open_renderers: WeakSet[Renderer] = WeakSet()


def _close_at_exit(renderer: Renderer) -> None:
    """Has the renderer closed before the libraries below it, whose own exit hooks came earlier, are gone."""
    if not _open_renderers:
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _open_renderers.add(renderer)


def _close_all() -> None:
    for renderer in list(_open_renderers):
        renderer.close()
