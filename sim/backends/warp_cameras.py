"""Pictures that MuJoCo Warp draws itself: all asked simulations in one launch, and tensors on its device.

It casts a ray for each pixel. What differs from OpenGL's pictures (`sim/cameras.py`): shapes are exact, not
facets, and light is computed in each pixel, not in each corner. Sites, tendons and skins are not drawn. A ray
ends at the first surface; so that light passes what is translucent (alpha below 1), a second launch draws
what is behind, and both are mixed. Of two such surfaces one behind the other only the nearer one is seen.

B simulations, k of them drawn, h and w a picture's height and width, G geoms.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import mujoco
import numpy as np
import torch
from mujoco import mjtGeom

from robot_rl.core.arrays import Array
from robot_rl.core.errors import ConfigError, nearest
from robot_rl.sim.backends.scene_model import state_columns
from robot_rl.sim.cameras import Camera, camera_id

_POSES = ("geom_xpos", "geom_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir", "flexvert_xpos")
"""What the renderer reads of the state."""
_LENSES = frozenset({"cam_fovy", "cam_intrinsic"})
_READ = _LENSES | {
    *("geom_dataid", "geom_matid", "geom_size", "geom_rgba", "mat_texid", "mat_texuniform", "mat_texrepeat"),
    *("mat_emission", "mat_specular", "mat_shininess", "mat_rgba", "light_castshadow", "light_active"),
    *("light_cutoff", "light_exponent", "light_ambient", "light_diffuse", "light_specular"),
}
"""Fields of the model that the renderer reads for each simulation."""
_POSED = frozenset({"cam_pos", "cam_quat", "light_pos", "light_dir"})
"""Fields that the poses follow from."""
_LOOKS = ("cam_", "light_", "mat_")
"""How fields begin that only pictures show."""
_OPEN = (mjtGeom.mjGEOM_PLANE.value, mjtGeom.mjGEOM_HFIELD.value)
_FROM_MATERIAL = (0.5, 0.5, 0.5, 1.0)
"""Colour of a geom that has its material's, in MuJoCo too."""


class WarpSimulations(Protocol):
    """What is drawn: a `MujocoWarp`."""

    wp: Any
    mjw: Any
    """The modules `warp` and `mujoco_warp`."""
    model: mujoco.MjModel
    warp_model: Any
    warp_data: Any
    device: str
    num_sims: int
    room: dict[str, int]
    own_fields: dict[str, Array]

    def asarray(self, values: Any, dtype: Any = None) -> Array: ...


class WarpCameras:
    """Draws the cameras of a `MujocoWarp`; `robot_rl.sim.cameras.BatchRenderer` documents the methods."""

    def __init__(self, backend: WarpSimulations, cameras: Sequence[Camera]) -> None:
        """Compiles nothing: the first picture does, for seconds.

        Raises:
            ModelError: the model has no camera of a given name.
            ConfigError: simulations differ in a field that pictures show and this renderer does not read.
        """
        self._backend, self._cameras = backend, {camera.name: camera for camera in cameras}
        self._ids = [camera_id(backend.model, name) for name in self._cameras]
        self._is_closed: Any = backend.asarray(~np.isin(backend.model.geom_type, _OPEN))
        """Which geoms have a back behind their front, (G,)."""
        self._context: Any = None
        """The engine's buffers and trees, made with the first picture."""
        self._has_depth = False
        self._scratch: Any = None
        """A state of all simulations, for those that are given."""
        check_own_fields(backend.own_fields)

    def render_batch(
        self, ids: Array, camera: str, *, depth: bool = False, states: Array | None = None
    ) -> Array:
        """Returns tensors: uint8 (k, h, w, 3), or depth float32 (k, h, w) in metres."""
        if camera not in self._cameras:
            raise ConfigError(
                f"renderer: it was not made with a camera {camera!r}.{nearest(camera, self._cameras)}"
            )
        backend = self._backend
        rows: Any = backend.asarray(ids, torch.int64)
        with backend.wp.ScopedDevice(backend.device):
            self._open(depth)
            model, poses = self._drawn(rows, states)
            backend.mjw.refit_bvh(model, poses, self._context)
            draw: Any = self._depth if depth else self._rgb
            return draw(model, poses, camera)

    def close(self) -> None:
        """Frees the buffers."""
        self._context = self._scratch = None

    def _open(self, depth: bool) -> None:
        """Makes the context, and a larger one where the first depth is asked for."""
        if self._context is not None and (self._has_depth or not depth):
            return
        backend, cameras = self._backend, self._cameras.values()
        check_own_fields(backend.own_fields)
        self._has_depth = depth
        self._context = backend.mjw.create_render_context(
            backend.model,
            nworld=backend.num_sims,
            cam_res=[(camera.width, camera.height) for camera in cameras],
            cam_active=self._ids,
            render_rgb=True,
            render_depth=depth,
            render_seg=True,
            use_shadows=any(camera.shadows for camera in cameras),
            use_precomputed_rays=not _LENSES & backend.own_fields.keys(),
            render_skybox=True,
        )

    def _drawn(self, rows: Any, states: Array | None) -> tuple[Any, Any]:
        """Returns the model and the poses of the asked simulations alone, in their order."""
        backend = self._backend
        source = backend.warp_data if states is None else self._posed(rows, states)
        model, poses = copy.copy(backend.warp_model), copy.copy(source)
        poses.nworld = len(rows)
        for name in _POSES:
            setattr(poses, name, self._picked(getattr(source, name), rows))
        for name in _READ & backend.own_fields.keys():
            setattr(model, name, self._picked(getattr(model, name), rows))
        return model, poses

    def _posed(self, rows: Any, states: Array) -> Any:
        """Returns a state of all simulations, in which the rows have the poses of `states` (k, n)."""
        backend = self._backend
        if self._scratch is None:
            self._scratch = backend.mjw.make_data(backend.model, nworld=backend.num_sims, **backend.room)
        values: Any = backend.asarray(states, torch.float32)
        for field, columns in state_columns(backend.model).items():
            part = backend.wp.to_torch(getattr(self._scratch, field)).reshape(backend.num_sims, -1)
            part[rows] = values[:, columns].to(part.dtype)
        backend.mjw.fwd_kinematics(backend.warp_model, self._scratch)
        return self._scratch

    def _rgb(self, model: Any, poses: Any, camera: str) -> Any:
        nearest_surface, hit = self._colours(model, poses, camera)
        alpha_kG = self._alphas(model, poses.nworld)
        if not bool((alpha_kG < 1).any()):
            return nearest_surface
        alpha = torch.gather(alpha_kG, 1, hit.reshape(poses.nworld, -1).clamp(min=0)).reshape(hit.shape)
        alpha = torch.where(hit < 0, 1.0, alpha)[..., None]
        behind, _ = self._colours(self._without_translucent(model), poses, camera)
        return (alpha * nearest_surface + (1 - alpha) * behind).round().to(torch.uint8)

    def _colours(self, model: Any, poses: Any, camera: str) -> tuple[Any, Any]:
        """Returns what rays meet first: its colour, uint8 (k, h, w, 3), and its geom or -1, (k, h, w)."""
        self._launch(model, poses, camera, ("render_rgb", "render_seg"))
        packed = self._buffer("rgb_data", poses.nworld, camera)
        colours = packed.contiguous().view(torch.uint8).reshape(*packed.shape, 4)  # blue, green, red, alpha
        return colours[..., [2, 1, 0]], self._buffer("seg_data", poses.nworld, camera)[..., 0].long()

    def _depth(self, model: Any, poses: Any, camera: str) -> Any:
        self._launch(model, poses, camera, ("render_depth",))
        depth_m = self._buffer("depth_data", poses.nworld, camera)
        return torch.where(depth_m == 0, self._context.zfar, depth_m)  # 0: nothing is there

    def _launch(self, model: Any, poses: Any, camera: str, outputs: Sequence[str]) -> None:
        """Draws one camera; threads of the others end at once."""
        number = list(self._cameras).index(camera)
        for name in ("render_rgb", "render_depth", "render_seg"):
            flags = self._backend.wp.to_torch(getattr(self._context, name))
            flags.zero_()
            flags[number] = name in outputs
        self._backend.mjw.render(model, poses, self._context)

    def _buffer(self, name: str, num_drawn: int, camera: str) -> Any:
        """Returns the part of a buffer that the pictures of a camera are in, (k, h, w, ...)."""
        first = 0
        for other, size in self._cameras.items():
            if other == camera:
                break
            first += size.width * size.height
        asked = self._cameras[camera]
        values = self._backend.wp.to_torch(getattr(self._context, name))
        values = values[:num_drawn, first : first + asked.height * asked.width]
        return values.reshape(num_drawn, asked.height, asked.width, *values.shape[2:])

    def _alphas(self, model: Any, num_drawn: int) -> Any:
        """Returns how opaque geoms are, (k, G): OpenGL mixes in the front and the back of closed shapes."""
        rgba, mat_rgba = self._tensor(model.geom_rgba), self._tensor(model.mat_rgba)
        alpha = rgba[..., 3]
        if mat_rgba.shape[1]:
            material = self._tensor(model.geom_matid).long()
            is_from_material = (rgba == rgba.new_tensor(_FROM_MATERIAL)).all(dim=-1) & (material >= 0)
            size = max(len(material), len(mat_rgba))
            ids = material.clamp(min=0).expand(size, -1)
            theirs = torch.gather(mat_rgba[..., 3].expand(size, -1), 1, ids)
            alpha = torch.where(is_from_material, theirs, alpha)
        return torch.where(self._is_closed, 1 - (1 - alpha) ** 2, alpha).expand(num_drawn, -1)

    def _without_translucent(self, model: Any) -> Any:
        """Returns a model whose translucent colours have an alpha of 0, which no ray meets."""
        opaque = copy.copy(model)
        for name in ("geom_rgba", "mat_rgba"):
            rgba = self._tensor(getattr(model, name)).clone()
            rgba[..., 3] = torch.where(rgba[..., 3] < 1, 0.0, rgba[..., 3])
            setattr(opaque, name, self._backend.wp.from_torch(rgba, dtype=self._backend.wp.vec4))
        return opaque

    def _picked(self, array: Any, rows: Any) -> Any:
        """Returns the rows of an array of the engine, as another one."""
        values = self._tensor(array)[rows]
        return self._backend.wp.from_torch(values.contiguous(), dtype=array.dtype)

    def _tensor(self, array: Any) -> Any:
        return self._backend.wp.to_torch(array)


def check_own_fields(names: Collection[str]) -> None:
    """Refuses fields that differ between simulations, that pictures show, and that the renderer ignores.

    Raises:
        ConfigError: there are such fields.
    """
    known = _READ | _POSED
    ignored = sorted(
        name for name in names if name not in known and (name.startswith(_LOOKS) or name.endswith("_rgba"))
    )
    if ignored:
        raise ConfigError(
            f"env.renderer: got engine, and mujoco_warp draws all simulations with the same "
            f"{', '.join(ignored)}; allowed with these: env.renderer=opengl, or leave out what varies them."
        )
