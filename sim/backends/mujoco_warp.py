"""The GPU back end: MuJoCo Warp, thousands of simulations in single precision; its arrays are torch tensors.

Warp's arrays and torch's share memory, so nothing goes through the host. A control step is one CUDA graph,
which is captured again when an array of the model or of the contacts is replaced. Without a GPU the same
kernels run on the CPU, one after another: for tests. B simulations.

Deviations from the CPU engine: float32; a mask makes nothing faster, since every simulation steps and the
others are put back; no two runs on a GPU are equal bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mujoco
import torch

from robot_rl.core.arrays import Array, assign, namespace_of, to_numpy
from robot_rl.core.errors import ConfigError
from robot_rl.sim.backends.backend import View
from robot_rl.sim.backends.inspect_model import marks, model_hash, penetration_m
from robot_rl.sim.backends.model_index import ModelIndex
from robot_rl.sim.backends.scene_model import (
    compile_scene,
    locate,
    sensor_columns,
    servo_time_s,
    state_columns,
    tool_orientation,
)
from robot_rl.sim.backends.warp_cameras import WarpCameras
from robot_rl.sim.cameras import BatchRenderer, Camera, Renderer, Renderers
from robot_rl.sim.robots.robot import RobotNames

logger = logging.getLogger(__name__)

CONTACTS, ROWS = 32, 128
"""Room for contacts and constraint rows of a simulation; the engine's own guess ignores the scene."""
_GROWTH = 4
_FROM_INERTIA = ("body_subtreemass", "body_invweight0", "dof_invweight0", "actuator_acc0")
_FROM_SIZES = ("geom_aabb", "geom_rbound")
_DERIVED = {
    "body_mass": _FROM_INERTIA,
    "body_inertia": _FROM_INERTIA,
    "body_ipos": _FROM_INERTIA,
    "dof_armature": _FROM_INERTIA,
    "geom_size": _FROM_SIZES,
}
"""Field of the model -> constants that follow from it: one a simulation where it is."""


class MujocoWarp:
    """Steps many copies of one model; `robot_rl.sim.backends.backend.Backend` documents the methods."""

    caps = frozenset({"set_state", "render", "batch"})

    largest_state = mujoco.mjMAXVAL

    def __init__(
        self,
        spec: mujoco.MjSpec,
        robot: RobotNames,
        quantities: Sequence[str],
        num_sims: int,
        *,
        device: str | None = None,
        contacts: int = CONTACTS,
        rows: int = ROWS,
    ) -> None:
        """Compiles a scene, with a sensor for each quantity.

        Args:
            spec: robot and task.
            robot: its names in the scene.
            quantities: what the view holds.
            num_sims: B.
            device: as torch names it; the first GPU, or the CPU without one, if None.
            contacts: room for so many contacts a simulation, of all simulations together.
            rows: room for so many rows of constraints, of each simulation; both grow once if they overflow.

        Raises:
            ModelError: the scene lacks what a quantity names.
            ConfigError: the engine is not installed, or there is no such device.
        """
        self.wp, self.mjw = _packages()
        self.xp, self._robot = namespace_of("torch"), robot
        self.device = _device(device)
        self.model = model = compile_scene(spec, robot, quantities)
        self.num_sims, self.timestep_s = num_sims, float(model.opt.timestep)
        self.cameras = tuple(model.camera(i).name for i in range(model.ncam))
        self.room = {"nconmax": contacts, "njmax": rows}
        self.num_overflows = 0
        """Simulations, summed over control steps, that ran out of contacts or constraint rows."""
        self.overflows = self.xp.zeros(num_sims, dtype=self.xp.int64, device=self.device)
        self._has_grown, self._next_warning = False, 0
        self.own_fields: dict[str, Array] = {}
        """Fields of the model of which each simulation has its own, (B, ...)."""
        self._graphs: dict[int, Any] = {}
        """Physics steps -> captured graph; 0 is `forward`."""
        with self.wp.ScopedDevice(self.device):
            self.warp_model = self.mjw.put_model(model)
            # Each is counted; printing in a kernel makes threads wait.
            self.warp_model.opt.warn_overflow = False
            self.warp_data = self.mjw.make_data(model, nworld=num_sims, **self.room)
        self._parts = self._state_parts()
        self.state_size = sum(part.shape[1] for part in self._parts)
        self._default_row = self.read_states()[:1]
        overflow = self.mjw.OverflowType
        self._ran_out = int(overflow.ALL & ~(overflow.ITERATIONS | overflow.LS_ITERATIONS))
        self._overflow: Any = self.bind("overflow")
        self._qpos, self._qvel = self.bind("qpos"), self.bind("qvel")
        self.index = ModelIndex(model, robot, self.asarray)
        fingers = [f"{joint}.pos" for joint in robot.finger_joints]
        self.view = View(self.bind("sensordata"), sensor_columns(model), fingers)
        self.forward()

    def _state_parts(self) -> list[Any]:
        """Returns the fields of a state, (B, k) each and live, in the order of MuJoCo's rows."""
        columns = state_columns(self.model)
        parts: list[Any] = [self.bind(field).reshape(self.num_sims, -1) for field in columns]
        got = sum(part.shape[1] for part in parts)
        need = mujoco.mj_stateSize(self.model, mujoco.mjtState.mjSTATE_INTEGRATION.value)
        if got != need:
            raise ConfigError(
                f"env.engine: mujoco_warp keeps {got} of the {need} numbers of this scene's state, perhaps "
                "because of a plugin. Use env.engine=mujoco."
            )
        return parts

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        """Returns values as a tensor on the engine's device; numpy's float64 becomes float32."""
        array = self.xp.asarray(values, dtype=dtype, device=self.device)
        is_host = dtype is None and not isinstance(values, torch.Tensor)
        return array.to(torch.float32) if is_host and array.dtype == torch.float64 else array

    def bind(self, field: str) -> Array:
        return self.wp.to_torch(getattr(self.warp_data, field))

    def expand(self, field: str) -> Array:
        if field not in self.own_fields:
            follow = (name for name in _DERIVED.get(field, ()) if name not in self.own_fields)
            names = [field, *follow]
            with self.wp.ScopedDevice(self.device):
                fresh = self.mjw.put_model(self.model, dict.fromkeys(names, self.num_sims))
            for name in names:
                setattr(self.warp_model, name, getattr(fresh, name))
                self.own_fields[name] = self.wp.to_torch(getattr(self.warp_model, name))
            self._graphs.clear()
        return self.own_fields[field]

    def locate(self, field: str, element: str) -> tuple[int, Array]:
        row, nominal = locate(self.model, field, element)
        return row, self.asarray(nominal)

    def recompute_constants(self, ids: Array) -> None:
        with self.wp.ScopedDevice(self.device):
            self.mjw.set_const(self.warp_model, self.warp_data)

    def step(self, num_substeps: int, mask: Array | None = None) -> Array:
        """Advances all or the masked simulations; returns which of them diverged, (B,) bool.

        A simulation diverges when a position or velocity is no number or too large, or when it ran out of
        contacts or constraint rows: what it then computed is wrong.
        """
        before = None if mask is None else self.read_states()
        self.advance(num_substeps)
        ran_out = (self._overflow & self._ran_out) != 0
        self._overflow.zero_()  # kernels only add to it
        worst = _largest(self._qpos, self._qvel)
        diverged = ran_out | ~(worst < self.largest_state)  # so that nan is not below it
        if mask is not None and before is not None:
            (idle,) = self.xp.nonzero(~mask)
            self.write_states(idle, before[idle])
            self.forward()
            diverged, ran_out = diverged & mask, ran_out & mask
        if diverged.any():
            self._count(ran_out)
        return diverged

    @property
    def num_contacts(self) -> int:
        """Contacts of all simulations in the last physics step; reading it waits for the GPU."""
        return int(self.bind("nacon")[0])

    def _count(self, ran_out: Array) -> None:
        """Counts simulations that ran out of room, and makes more the first time."""
        number = int(ran_out.sum())
        self.num_overflows += number
        self.overflows += ran_out
        if not number or self.num_overflows < self._next_warning:
            return
        self._next_warning = 10 * self.num_overflows
        if self._has_grown:
            logger.warning(
                "mujoco_warp: %d times a simulation has run out of %d contacts or %d constraint rows. "
                "Its step is undone, and room grows no more: use env.engine=mujoco if that is often.",
                self.num_overflows,
                *self.room.values(),
            )
            return
        self._grow(number)

    def _grow(self, number: int) -> None:
        """Makes more room, as `number` simulations lacked it."""
        self._has_grown, self._next_warning = True, 0
        self.room = {name: size * _GROWTH for name, size in self.room.items()}
        logger.warning(
            "mujoco_warp: %d of %d simulations ran out of contacts or constraint rows; their step is undone. "
            "There is room for %d contacts and %d rows a simulation from now on.",
            number,
            self.num_sims,
            *self.room.values(),
        )
        with self.wp.ScopedDevice(self.device):
            larger = self.mjw.make_data(self.model, nworld=self.num_sims, **self.room)
        for field in dataclasses.fields(larger):
            old, new = getattr(self.warp_data, field.name), getattr(larger, field.name)
            is_array = isinstance(new, self.wp.array)
            if not is_array or old.shape != new.shape:  # what was handed out by `bind` stays
                setattr(self.warp_data, field.name, new)
        self._graphs.clear()

    def read_states(self) -> Array:
        found: Any = torch.cat([part.to(torch.float32) for part in self._parts], dim=1)
        return found

    def write_states(self, ids: Array, rows: Array) -> None:
        first = 0
        for part in self._parts:
            last = first + part.shape[1]
            assign(part, ids, rows[:, first:last])
            first = last

    def clear(self, ids: Array) -> None:
        self.write_states(ids, self.xp.broadcast_to(self._default_row, (len(ids), self.state_size)))

    def forward(self, ids: Array | None = None) -> None:
        """Makes poses, velocities and the view current, of all simulations: a kernel takes all or none."""
        self.advance(0)

    def advance(self, num_substeps: int) -> None:
        """Takes physics steps, and makes the view current; as one graph on a GPU. It checks nothing."""
        with self.wp.ScopedDevice(self.device):
            if not self.device.startswith("cuda"):
                self._compute(num_substeps)
                return
            if num_substeps not in self._graphs:
                self._graphs[num_substeps] = self._capture(lambda: self._compute(num_substeps))
            self.wp.capture_launch(self._graphs[num_substeps])

    def _compute(self, num_substeps: int) -> None:
        mjw, m, d = self.mjw, self.warp_model, self.warp_data
        for _ in range(num_substeps):
            mjw.step(m, d)
        mjw.fwd_kinematics(m, d)
        mjw.sensor_pos(m, d)
        mjw.com_vel(m, d)
        mjw.sensor_vel(m, d)
        if self.model.na:  # sensors of actuators that have a state of their own
            mjw.fwd_actuation(m, d)
            mjw.sensor_acc(m, d)

    def _capture(self, work: Callable[[], None]) -> Any:
        """Returns a graph of the work. The collector rests: a graph freed in a capture would break it."""
        kept = [part.clone() for part in self._parts]
        work()  # compiles the kernels, which no capture may
        was_on = gc.isenabled()
        gc.disable()
        try:
            with self.wp.ScopedCapture() as capture:
                work()
        finally:
            if was_on:
                gc.enable()
        for part, before in zip(self._parts, kept, strict=True):
            part.copy_(before)
        return capture.graph

    def tool_orientation(self, posture_rad: Sequence[float]) -> Array:
        return self.asarray(tool_orientation(self.model, self._robot, posture_rad))

    def servo_time_s(self) -> Array:
        return servo_time_s(self.model, self._robot)

    def model_hash(self) -> str:
        return model_hash(self.model)

    def penetration_m(self, ids: Array) -> Array:
        return self.asarray(penetration_m(self.model, to_numpy(self.read_states()[ids]).astype(float)))

    def marks(self) -> tuple[str, ...]:
        return marks(self.model)

    def renderer(self, cameras: Sequence[Camera], num_threads: int = 1) -> BatchRenderer:
        """Returns what draws here if the cameras are the engine's; else copies on the CPU, as films want."""
        if all(camera.by_engine for camera in cameras):
            return WarpCameras(self, cameras)
        copies: Any = _HostCopies(self)
        return Renderers(lambda: Renderer(self.model, cameras, copies), num_threads)

    def host_model(self, sim: int, model: mujoco.MjModel) -> mujoco.MjModel:
        """Returns `model` with the fields that one simulation has of its own."""
        for name, values in self.own_fields.items():
            own = getattr(model, name, None)
            if own is not None:
                own[...] = to_numpy(values[sim]).reshape(own.shape)
        return model


class _HostCopies:
    """Copies of single simulations on the CPU, as `mujoco.batch.Batch` gives them to a renderer."""

    def __init__(self, backend: MujocoWarp) -> None:
        self._backend = backend

    def get_model(self, sim: int, model: mujoco.MjModel | None = None) -> mujoco.MjModel:
        return self._backend.host_model(sim, model or copy.copy(self._backend.model))

    def get_data(self, sim: int, data: mujoco.MjData | None = None) -> mujoco.MjData:
        model = self._backend.model
        data = data or mujoco.MjData(model)
        row = to_numpy(self._backend.read_states()[sim]).astype(float)
        mujoco.mj_setState(model, data, row, mujoco.mjtState.mjSTATE_INTEGRATION.value)
        return data


def _largest(*fields: Any) -> Any:
    """Returns the largest absolute value of each row of all fields, (B,); nan where one is."""
    return torch.cat(fields, dim=1).abs().amax(dim=1)


def _packages() -> tuple[Any, Any]:
    """Returns the modules `warp` and `mujoco_warp`."""
    try:
        wp: Any = importlib.import_module("warp")
        wp.config.quiet = True
        return wp, importlib.import_module("mujoco_warp")
    except ImportError as error:
        raise ConfigError(
            f"env.engine: got 'mujoco_warp', which is not installed ({error}). In a clone of robot_rl: "
            "pip install -e '.[warp]'."
        ) from error


def _device(name: str | None) -> str:
    """Returns a device of torch's and Warp's; the first GPU if there is one."""
    if name is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"env.engine_device: got {name!r}, and torch sees no GPU. Allowed: cpu, or null.")
    return "cuda:0" if name == "cuda" else name
