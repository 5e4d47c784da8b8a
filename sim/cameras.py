"""Cameras: colour and depth images of simulations, drawn in software or on a GPU.

B simulations drawn, h and w the image's height and width. A `Renderer` is one OpenGL context, which one
thread uses at a time; `Renderers` draw in several threads, since MuJoCo's drawing leaves Python to the
others. An image of 96 x 96 of a Panda at a table takes 1.5 ms of one core (llvmpipe), 20 ms with shadows;
with MuJoCo's own settings it would be 60 ms, because its shadow map has 4096 x 4096 points.
"""

from __future__ import annotations

import atexit
import copy
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, ModelError, nearest
from robot_rl.sim.gl import GlContext, find_backend, open_context

__all__ = ["BatchRenderer", "Camera", "Renderer", "Renderers", "find_backend"]

Array = NDArray[Any]

SHADOW_MAP_PIXELS = 1024
"""Side of the shadow map; MuJoCo's own default, 4096, costs five times the time."""

SAMPLES = 4
"""Samples a pixel of a renderer with shadows; without it has one, a third of the time."""

SLICES, STACKS = 16, 10
"""Facets of round shapes without shadows; MuJoCo's own 28 and 16 cost 1.7 times the time."""

_MAX_GEOMS = 2000
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION.value
"""What a row of a batch's states holds."""


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
    """Draw shadows and smooth edges, as films want: five times the time of a small image."""
    by_engine: bool = False
    """Let the physics engine draw, where it can: for what is learned from, by the thousand."""

    def __post_init__(self) -> None:
        for side in ("width", "height"):
            pixels = getattr(self, side)
            if not 1 <= pixels <= 4096:
                raise ConfigError(f"camera {self.name}: {side} is {pixels}, allowed is 1 to 4096 pixels.")


class BatchRenderer(Protocol):
    """Draws simulations: with OpenGL (`Renderers`), or on the engine's own device."""

    def render_batch(
        self, ids: Array, camera: str, *, depth: bool = False, states: Array | None = None
    ) -> Array:
        """See `Renderer.render_batch`; the images are the engine's arrays where it draws itself."""
        ...

    def close(self) -> None:
        """Frees what drawing needs; may be called twice."""
        ...


class Renderer:
    """Draws the simulations of one model; all its cameras share one OpenGL context.

    Raises:
        RenderError: this machine cannot draw; the message names what to install.
        ModelError: the model has no camera of a given name.
    """

    def __init__(self, model: mujoco.MjModel, cameras: Sequence[Camera], batch: Batch | None = None) -> None:
        """Opens an OpenGL context; `batch` is what `render_batch` draws."""
        self._batch = batch
        self._cameras = {camera.name: camera for camera in cameras}
        self._ids = {camera.name: camera_id(model, camera.name) for camera in cameras}
        self._model = _drawing_model(model, cameras)
        self._scratch: tuple[mujoco.MjModel, mujoco.MjData] | None = None
        self._scene = mujoco.MjvScene(self._model, _MAX_GEOMS)
        self._flags = self._scene.flags.copy()
        self._view, self._option = mujoco.MjvCamera(), mujoco.MjvOption()
        self._view.type = int(mujoco.mjtCamera.mjCAMERA_FIXED)
        self._gl = open_context()
        self._gl.make_current()
        self._drawing = mujoco.MjrContext(self._model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        self._drawing.readDepthMap = int(mujoco.mjtDepthMap.mjDEPTH_ZEROFAR)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._drawing)
        self._freed = weakref.finalize(self, _free, self._gl, self._drawing)
        _free_at_exit(self._freed)

    def rgb(self, data: mujoco.MjData, camera: str) -> Array:
        """Returns a uint8 image (h, w, 3) of forwarded data of this renderer's model."""
        return self._rgb(self._model, data, self._camera(camera))

    def depth(self, data: mujoco.MjData, camera: str) -> Array:
        """Returns distances along the viewing axis, float32 (h, w), in metres.

        Where nothing is, it is the far plane of the model (`vis.map.zfar` times its extent).
        """
        return self._depth(self._model, data, self._camera(camera))

    def render_batch(
        self, ids: Array, camera: str, *, depth: bool = False, states: Array | None = None
    ) -> Array:
        """Returns images of the simulations `ids`: uint8 (B, h, w, 3), or depth float32 (B, h, w) in metres.

        Each is drawn with its own model fields (colours, lights, camera poses), and its row of `states`
        (B, n) or its present state.
        """
        asked = self._camera(camera)
        shape = (len(ids), asked.height, asked.width)
        images = np.empty(shape, np.float32) if depth else np.empty((*shape, 3), np.uint8)
        draw = self._depth if depth else self._rgb
        for row, sim in enumerate(ids):
            images[row] = draw(*self._materialise(int(sim), None if states is None else states[row]), asked)
        return images

    def release(self) -> None:
        """Leaves the context to other threads."""
        self._gl.release()

    def close(self) -> None:
        """Frees the OpenGL context; may be called twice."""
        self._freed()

    def _camera(self, name: str) -> Camera:
        if name not in self._cameras:
            raise ConfigError(
                f"renderer: it was not made with a camera {name!r}.{nearest(name, self._cameras)}"
            )
        return self._cameras[name]

    def _materialise(self, sim: int, state: Array | None) -> tuple[mujoco.MjModel, mujoco.MjData]:
        """Copies one simulation into scratch space (made once: it costs a hundred times the copy)."""
        batch = self._batch
        assert batch is not None, "the renderer was made without a batch"
        if self._scratch is None:
            self._scratch = batch.get_model(sim), batch.get_data(sim)
        model, data = batch.get_model(sim, self._scratch[0]), batch.get_data(sim, self._scratch[1])
        if state is not None:
            mujoco.mj_setState(model, data, state, _STATE)
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
        if not self._freed.alive:
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


class Renderers:
    """Draws simulations in several threads, each with a renderer; the pictures are those of one."""

    def __init__(self, make: Callable[[], Renderer], num_threads: int) -> None:
        """Args: make: opens a renderer. num_threads: 1 or more, this one among them."""
        self._own = make()
        self._others = [(ThreadPoolExecutor(1), _released(make)) for _ in range(num_threads - 1)]

    def render_batch(
        self, ids: Array, camera: str, *, depth: bool = False, states: Array | None = None
    ) -> Array:
        """See `Renderer.render_batch`."""
        first, *parts = np.array_split(np.arange(len(ids)), len(self._others) + 1)

        def draw(renderer: Renderer, part: Array) -> Array:
            seen = None if states is None else states[part]
            return renderer.render_batch(ids[part], camera, depth=depth, states=seen)

        asked = [
            thread.submit(_and_release, draw, renderer, part)
            for (thread, renderer), part in zip(self._others, parts, strict=True)
            if len(part)
        ]
        own = draw(self._own, first)
        return np.concatenate([own, *(part.result() for part in asked)]) if asked else own

    def close(self) -> None:
        """Frees the OpenGL contexts; may be called twice."""
        for thread, renderer in self._others:
            thread.shutdown()
            renderer.close()
        self._own.close()


def _released(make: Callable[[], Renderer]) -> Renderer:
    renderer = make()
    renderer.release()
    return renderer


def _and_release(draw: Callable[[Renderer, Array], Array], renderer: Renderer, part: Array) -> Array:
    try:
        return draw(renderer, part)
    finally:
        renderer.release()  # the one that frees the renderer is another thread


def _drawing_model(model: mujoco.MjModel, cameras: Sequence[Camera]) -> mujoco.MjModel:
    """Returns a copy whose settings give the framebuffer and the quality that the cameras need."""
    copied = copy.copy(model)
    copied.vis.global_.offwidth = max((camera.width for camera in cameras), default=1)
    copied.vis.global_.offheight = max((camera.height for camera in cameras), default=1)
    quality = copied.vis.quality
    if any(camera.shadows for camera in cameras):
        quality.shadowsize, quality.offsamples = SHADOW_MAP_PIXELS, SAMPLES
    else:
        quality.shadowsize = quality.offsamples = 0
        quality.numslices, quality.numstacks = SLICES, STACKS
    return copied


def camera_id(model: mujoco.MjModel, name: str) -> int:
    """Returns the number of a camera.

    Raises:
        ModelError: the model has no camera of that name.
    """
    number = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA.value, name)
    if number < 0:
        names = [model.camera(i).name or f"#{i}" for i in range(model.ncam)]
        raise ModelError(f"cameras: the model has no camera {name!r}.{nearest(name, names)}")
    return number


def _free(context: GlContext, drawing: mujoco.MjrContext) -> None:
    """Frees a renderer's memory in its own context: in another's, the same numbers name other things."""
    context.make_current()
    drawing.free()
    context.free()


_finalizers: list[weakref.finalize[Any, Any]] = []


def _free_at_exit(finalizer: weakref.finalize[Any, Any]) -> None:
    """Frees a renderer at exit, before the exit hooks of the libraries that it uses."""
    finalizer.atexit = False
    if not _finalizers:  # registering it twice is harmless
        atexit.register(_free_all)
    _finalizers[:] = [known for known in _finalizers if known.alive] + [finalizer]


def _free_all() -> None:
    for finalizer in _finalizers:
        finalizer()
