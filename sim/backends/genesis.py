"""The Genesis back end: its rigid bodies in MuJoCo's formulas; states only, nothing is drawn. B simulations.

Genesis compiles its kernels for a CPU or a GPU: on a CPU in double precision, one simulation after another,
for tests; on a GPU in single precision. States live here, in MuJoCo's rows; a control step hands them to the
engine and takes them back. So the engine keeps nothing between control steps (its solver starts cold), a row
alone determines the future, and what is not finite never enters it.

Deviations from the CPU engine: contacts are found by Genesis's own algorithms, which may return other points
of a face; constraint rows are those of `genesis_scene.continuous_reference`; a mask makes nothing faster.
`genesis_scene.check_scene` names what is refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
import torch

from robot_rl.core.arrays import Array, assign, namespace_of, to_numpy
from robot_rl.core.errors import ConfigError, ModelError, RenderError, nearest
from robot_rl.sim.backends.backend import View
from robot_rl.sim.backends.frames import Frames
from robot_rl.sim.backends.genesis_scene import Servos, check_scene, plain_mjcf, touching_geoms, trees
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
from robot_rl.sim.cameras import Camera, Renderers
from robot_rl.sim.robots.robot import RobotNames

_ACCESSOR = "genesis.engine.solvers.rigid.abd.accessor"
_TILT_RAD, _MERGED = 0.03, 0.1
"""To find all contacts of two shapes Genesis tilts them by so much, and takes points nearer than this share
of their size for one. With its own 0.001, for both, a capsule at an angle on a face has one contact where
MuJoCo has two, and a grasped cube turns."""
_ROWS = {"mocap_pos": 3, "mocap_quat": 4, "xfrc_applied": 6}
"""Fields of the state that have rows, and their lengths; a scene without mocap bodies has none of theirs."""
_EXPANDABLE = (
    "actuator_biasprm", "actuator_gainprm", "body_gravcomp", "body_mass", "dof_damping", "dof_frictionloss",
    "geom_friction",
)  # fmt: skip
"""Fields of the model that each simulation may have its own of. Of `geom_friction` the first column counts;
the others follow in proportion."""


class Genesis:
    """Steps many copies of one model; `robot_rl.sim.backends.backend.Backend` documents the methods."""

    caps = frozenset({"set_state", "batch"})

    largest_state = mujoco.mjMAXVAL
    overflows: Array | None = None

    def __init__(
        self,
        spec: mujoco.MjSpec,
        robot: RobotNames,
        quantities: Sequence[str],
        num_sims: int,
        *,
        device: str | None = None,
        scene: str = "scene",
    ) -> None:
        """Compiles a scene, and the engine's kernels: a minute, the first time on a machine.

        Args:
            spec: robot and task.
            robot: its names in the scene.
            quantities: what the view holds.
            num_sims: B.
            device: as torch names it; the first GPU, or the CPU without one, if None.
            scene: what messages call the scene.

        Raises:
            ModelError: the scene lacks what a quantity names, or Genesis what the scene has.
            ConfigError: the engine is not installed, or there is no such device.
        """
        self.model = model = compile_scene(spec, robot, quantities)
        check_scene(model, scene)
        self._gs = _engine(device)
        self.xp, self._robot = namespace_of("torch"), robot
        self.device, self._real = str(self._gs.device), self._gs.tc_float
        self.num_sims, self.timestep_s = num_sims, float(model.opt.timestep)
        self.cameras = tuple(model.camera(i).name for i in range(model.ncam))
        self._links = [0] * model.nbody
        """Body -> link of the engine; the world's for mocap bodies that touch nothing."""
        self._moving = [i for i in range(model.nbody) if model.body_treeid[i] >= 0]
        owned = [(tree, i) for tree in trees(model) for i in touching_geoms(model)]
        self._geoms = [i for tree, i in owned if model.geom_bodyid[i] in tree]
        """Geoms in the engine's order."""
        self._solver = self._build(num_sims)
        self._set_armature = importlib.import_module(_ACCESSOR).kernel_set_dofs_armature
        self._all = self.asarray(np.arange(num_sims, dtype=np.int32))
        self._dofs = self.asarray(np.arange(model.nv, dtype=np.int32))
        self._expanded: dict[str, Any] = {}
        self._of_model: dict[str, Any] = {}
        """Fields as the model has them, (1, ...)."""
        self._default_row: Any = self.asarray(_default_row(model))
        self.state_size, self._columns = len(self._default_row), state_columns(model)
        self._rows: Any = self._default_row.repeat(num_sims, 1)
        self._servos = Servos(model, self.asarray)
        self._fields = self._derived_fields()
        self._frames = Frames(model, self.asarray)
        self.index = ModelIndex(model, robot, self.asarray)
        fingers = [f"{joint}.pos" for joint in robot.finger_joints]
        self.view = View(self.bind("sensordata"), sensor_columns(model), fingers)
        self.forward()

    def _build(self, num_sims: int) -> Any:
        """Returns the solver of a scene of Genesis, whose bodies and joints are found by our names."""
        gs, model = self._gs, self.model
        scene = gs.Scene(
            show_viewer=False,
            sim_options=gs.options.SimOptions(dt=self.timestep_s, gravity=tuple(model.opt.gravity)),
            rigid_options=gs.options.RigidOptions(
                enable_mujoco_compatibility=True,
                enable_neutral_collision=True,
                use_gjk_collision=True,
                enable_contact_patch=False,
                enable_torsional_friction=bool((model.geom_condim[touching_geoms(model)] == 4).any()),
                integrator=gs.integrator.approximate_implicitfast,
                friction_cone=_cone(gs, model),
                impratio=float(model.opt.impratio),
                iterations=int(model.opt.iterations),
                ls_iterations=int(model.opt.ls_iterations),
                constraint_timeconst=None,
                batch_dofs_info=True,
                batch_links_info=True,
            ),
        )
        parts = trees(model)
        entities = [self._add(scene, tree) for tree in parts]
        scene.build(n_envs=num_sims)
        self._scene, solver = scene, scene.sim.rigid_solver
        solver.collider.collider_info.mc_perturbation.fill(_TILT_RAD)
        solver.collider.collider_info.mc_tolerance.fill(_MERGED)
        joints = {joint.name: joint for entity in entities for joint in entity.joints}
        for entity, tree in zip(entities, parts, strict=True):
            links = {link.name: link.idx for link in entity.links}
            for body in tree:
                self._links[body] = links["world" if body == tree[0] else f"b{body}"]
        ours = [joints[f"j{i}"] for i in range(model.njnt)]
        self._joints = [joint.idx for joint in ours]
        self._moving_links = [self._links[i] for i in self._moving]
        if [joint.dof_start for joint in ours] != model.jnt_dofadr.tolist():
            raise ModelError(
                "env.engine=genesis: bodies that a mocap body carries must come last in the scene, got "
                f"{', '.join(model.joint(i).name for i in range(model.njnt))}."
            )
        return solver

    def _add(self, scene: Any, tree: list[int]) -> Any:
        """Adds an entity, the contact filters of whose geoms count for those of other entities, too."""
        text, morph = plain_mjcf(self.model, tree), self._gs.morphs.MJCF
        # Mocap bodies are elsewhere in each simulation, and with them the vertices of their geoms.
        entity = scene.add_entity(morph(file=text, default_armature=None, batch_fixed_verts=tree[0] > 0))
        entity._is_local_collision_mask = False
        return entity

    def _derived_fields(self) -> dict[str, Any]:
        """Returns arrays (B, ...) of what follows from a state, and is current after `forward`."""
        model, count = self.model, self.num_sims
        shapes = {
            "xpos": (model.nbody, 3), "xquat": (model.nbody, 4), "xaxis": (model.njnt, 3),
            "xanchor": (model.njnt, 3), "site_xpos": (model.nsite, 3), "site_xmat": (model.nsite, 9),
            "sensordata": (model.nsensordata,),
        }  # fmt: skip
        return {
            name: torch.zeros((count, *shape), dtype=self._real, device=self.device)
            for name, shape in shapes.items()
        }

    def asarray(self, values: Any, dtype: Any = None) -> Array:
        """Returns values as a tensor on the engine's device; numpy's float64 becomes the engine's."""
        array = self.xp.asarray(values, dtype=dtype, device=self.device)
        is_host = dtype is None and not isinstance(values, torch.Tensor)
        return array.to(self._real) if is_host and array.is_floating_point() else array

    def bind(self, field: str) -> Array:
        if field in self._fields:
            return self._fields[field]
        columns = self._columns.get(field, slice(0, 0))
        if field not in self._columns and field not in _ROWS:
            known = [*self._fields, *self._columns]
            raise ModelError(f"env.engine=genesis: no field {field!r} of the state.{nearest(field, known)}")
        number = columns.stop - columns.start
        inner = (number // _ROWS[field], _ROWS[field]) if field in _ROWS else (number,)
        return self._rows[:, columns].view(self.num_sims, *inner)

    def expand(self, field: str) -> Array:
        if field not in self._expanded:
            if field not in _EXPANDABLE:
                raise ModelError(
                    f"env.engine=genesis cannot vary {field!r} from simulation to simulation. It can: "
                    f"{', '.join(_EXPANDABLE)}. Use env.engine=mujoco or mujoco_warp."
                )
            nominal = self._nominal(field)
            self._expanded[field] = nominal.repeat(self.num_sims, *[1] * (nominal.ndim - 1))
        return self._expanded[field]

    def locate(self, field: str, element: str) -> tuple[int, Array]:
        row, nominal = locate(self.model, field, element)
        return row, self.asarray(nominal)

    def recompute_constants(self, ids: Array) -> None:
        mass = self._expanded.get("body_mass")
        if mass is not None:
            self._solver.set_links_mass(mass[:, self._moving].contiguous(), self._moving_links)

    def step(self, num_substeps: int, mask: Array | None = None) -> Array:
        """Advances all or the masked simulations; returns which of them diverged, (B,) bool.

        A simulation diverges when a position or velocity is no number or too large, before or after, or when
        Genesis reports that its contacts found no room or its solver failed.
        """
        start = self._rows
        is_good = start.abs().amax(dim=1) < self.largest_state  # nan is not below it
        rows = torch.where(is_good[:, None], start, self._default_row)
        self._push(rows)
        failed = torch.zeros_like(is_good)
        for _ in range(num_substeps):
            self._drive(rows)
            self._solver.substep(0)
            failed |= self._solver.get_error_envs_mask()
        qpos, qvel = self._solver.get_qpos(), self._solver.get_dofs_velocity()
        active = is_good if mask is None else is_good & mask
        for name, new in (("qpos", qpos), ("qvel", qvel)):
            old = start[:, self._columns[name]]
            old[active] = new[active]
        start[:, self._columns["time"]] += active[:, None] * (num_substeps * self.timestep_s)
        is_good = is_good & ~failed & (start.abs().amax(dim=1) < self.largest_state)
        self.forward()
        return ~is_good if mask is None else ~is_good & mask

    @property
    def num_contacts(self) -> int:
        """Contacts of all simulations in their present states."""
        collider = self._solver.collider
        collider.clear()
        collider.detection()
        return int(collider.get_contacts(as_tensor=True, to_torch=True, is_padded=True)["n_contacts"].sum())

    def _nominal(self, field: str) -> Any:
        if field not in self._of_model:
            self._of_model[field] = self.asarray(np.array(getattr(self.model, field), float))[None]
        return self._of_model[field]

    def _value(self, field: str) -> Any:
        """Returns a field of the model, (B, ...) or (1, ...)."""
        return self._expanded[field] if field in self._expanded else self._nominal(field)

    def _push(self, rows: Any) -> None:
        """Hands states to the engine, whose kinematics are then current."""
        solver, columns = self._solver, self._columns
        solver.set_qpos(rows[:, columns["qpos"]].contiguous(), skip_forward=True)
        for body, mocap in enumerate(self.model.body_mocapid):
            if mocap >= 0 and self._links[body]:
                place = rows[:, columns["mocap_pos"]][:, 3 * mocap : 3 * mocap + 3].contiguous()
                turn = rows[:, columns["mocap_quat"]][:, 4 * mocap : 4 * mocap + 4]
                turn = (turn / turn.norm(dim=1, keepdim=True)).contiguous()
                solver.set_base_links_pos(place, self._links[body], skip_forward=True)
                solver.set_base_links_quat(turn, self._links[body], skip_forward=True)
        self._push_model()
        solver.update_forward_pos()
        solver.set_dofs_velocity(rows[:, columns["qvel"]].contiguous())

    def _push_model(self) -> None:
        """Hands expanded fields to the engine; masses go there by `recompute_constants`."""
        if "dof_frictionloss" in self._expanded:
            self._solver.set_dofs_frictionloss(self._expanded["dof_frictionloss"])
        if "geom_friction" in self._expanded:
            share = self._expanded["geom_friction"] / self._nominal("geom_friction").clip(1e-9)
            self._solver.set_geoms_friction_ratio(share[:, self._geoms, 0].contiguous())

    def _drive(self, rows: Any) -> None:
        """Gives the engine a substep's forces: of servos, damping, weight compensation, `xfrc_applied`."""
        solver, columns = self._solver, self._columns
        state = solver.get_qpos(), solver.get_dofs_velocity(), rows[:, columns["ctrl"]]
        gain, bias = self._value("actuator_gainprm"), self._value("actuator_biasprm")
        force, inertia = self._servos.act(state, gain, bias, self._value("dof_damping"))
        solver.control_dofs_force(force + rows[:, columns["qfrc_applied"]])
        # Not `set_dofs_armature`, which would derive the weights of constraints from it.
        armature = (inertia + self._nominal("dof_armature")).contiguous()
        self._set_armature(self._dofs, self._all, armature, solver.dyn_info, solver.rigid_config)
        self._apply_wrenches(rows)

    def forward(self, ids: Array | None = None) -> None:
        """Makes poses, velocities and the view current, of all simulations: the engine takes all or none."""
        rows, solver = self._rows, self._solver
        is_good = rows.abs().amax(dim=1) < self.largest_state  # nan is not below it
        self._push(torch.where(is_good[:, None], rows, self._default_row))
        position, quaternion = solver.get_links_pos()[:, self._links], solver.get_links_quat()[:, self._links]
        linear, angular = solver.get_links_vel()[:, self._links], solver.get_links_ang()[:, self._links]
        qpos, qvel = rows[:, self._columns["qpos"]], rows[:, self._columns["qvel"]]
        for body, mocap in enumerate(self.model.body_mocapid):
            if mocap >= 0:
                position[:, body] = self.bind("mocap_pos")[:, mocap]
                quaternion[:, body] = self.bind("mocap_quat")[:, mocap]
        site_pos, site_mat = self._frames.sites(position, quaternion)
        found = {
            "xpos": position,
            "xquat": quaternion,
            "xaxis": solver.get_joints_anchor_axis()[:, self._joints],
            "xanchor": solver.get_joints_anchor_pos()[:, self._joints],
            "site_xpos": site_pos,
            "site_xmat": site_mat,
            "sensordata": self._frames.read((position, quaternion, linear, angular), qpos, qvel),
        }
        for name, values in found.items():
            self._fields[name].copy_(values)

    def _apply_wrenches(self, rows: Any) -> None:
        """Gives the engine forces and torques at centres of mass, as its kinematics then have them."""
        solver, bodies = self._solver, self.model.nbody
        wrench = rows[:, self._columns["xfrc_applied"]].reshape(-1, bodies, 6)[:, self._moving]
        weight = (self._value("body_gravcomp") * self._value("body_mass"))[:, self._moving, None]
        force = wrench[:, :, :3] - weight * self.asarray(np.array(self.model.opt.gravity))
        torque, frame = wrench[:, :, 3:].contiguous(), self._gs.link_ref_frame.link_COM
        solver.clear_external_force()
        solver.update_forward_pos()
        solver.apply_links_external_wrench(force.contiguous(), torque, self._moving_links, ref=frame)

    def read_states(self) -> Array:
        return self._rows

    def write_states(self, ids: Array, rows: Array) -> None:
        assign(self._rows, ids, rows)

    def clear(self, ids: Array) -> None:
        self._rows[ids] = self._default_row

    def tool_orientation(self, posture_rad: Sequence[float]) -> Array:
        return self.asarray(tool_orientation(self.model, self._robot, posture_rad))

    def servo_time_s(self) -> Array:
        return servo_time_s(self.model, self._robot)

    def model_hash(self) -> str:
        return model_hash(self.model)

    def penetration_m(self, ids: Array) -> Array:
        return self.asarray(penetration_m(self.model, to_numpy(self._rows[ids]).astype(float)))

    def marks(self) -> tuple[str, ...]:
        return marks(self.model)

    def renderer(self, cameras: Sequence[Camera], num_threads: int = 1) -> Renderers:
        """Refuses: nothing is drawn."""
        raise RenderError(
            "env.engine=genesis draws no pictures, it has states only. Use env.engine=mujoco or mujoco_warp, "
            "or leave env.cameras empty."
        )


def _default_row(model: mujoco.MjModel) -> Any:
    kind = mujoco.mjtState.mjSTATE_INTEGRATION.value
    row = np.zeros(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, mujoco.MjData(model), row, kind)
    return row


def _cone(gs: Any, model: mujoco.MjModel) -> Any:
    is_elliptic = model.opt.cone == mujoco.mjtCone.mjCONE_ELLIPTIC
    return gs.friction_cone.elliptic if is_elliptic else gs.friction_cone.pyramidal


def _engine(device: str | None) -> Any:
    """Returns the module `genesis`, which runs on one device for the life of the process."""
    try:
        gs: Any = importlib.import_module("genesis")
    except ImportError as error:
        raise ConfigError(
            f"env.engine: got 'genesis', which is not installed ({error}). In a clone of robot_rl: "
            "pip install -e '.[genesis]'."
        ) from error
    has_gpu = torch.cuda.is_available()
    if device is not None and device.startswith("cuda") and not has_gpu:
        raise ConfigError(f"env.engine_device: got {device!r}, and torch sees no GPU. Allowed: cpu, or null.")
    kind = "cuda" if (has_gpu if device is None else device.startswith("cuda")) else "cpu"
    if not gs._initialized:
        gs.init(
            backend=gs.cuda if kind == "cuda" else gs.cpu,
            precision="32" if kind == "cuda" else "64",
            logging_level="error",
            use_deterministic_algorithms=False,  # it would set torch's, for the whole process
        )
    if gs.device.type != kind:
        raise ConfigError(
            f"env.engine_device: got {device!r}, and genesis already runs on {gs.device} in this process. "
            f"Allowed: {gs.device.type}."
        )
    return gs
