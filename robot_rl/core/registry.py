"""Find components by name without importing them: a table of strings, resolved when asked.

Third parties add components by an entry point in the group `robot_rl.components`, named
`<kind>.<name>` and pointing at `module:attribute`.
"""

import importlib
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from robot_rl.core.errors import ConfigError, UnknownComponentError, nearest

TABLE: dict[str, dict[str, str]] = {
    "task": {
        "reach": "robot_rl.sim.tasks.reach:Reach",
        "push_cube": "robot_rl.sim.tasks.push_cube:PushCube",
        "pick_cube": "robot_rl.sim.tasks.pick_cube:PickCube",
        "pick_red_cube": "robot_rl.sim.tasks.pick_by_colour:PickRedCube",
        "pick_blue_cube": "robot_rl.sim.tasks.pick_by_colour:PickBlueCube",
        "stack_cube": "robot_rl.sim.tasks.stack_cube:StackCube",
        "peg_insert": "robot_rl.sim.tasks.peg_insert:PegInsert",
        "open_drawer": "robot_rl.sim.tasks.open_drawer:OpenDrawer",
        "gantry_peg": "robot_rl.sim.tasks.gantry_peg:GantryPeg",
        "quadrotor_hover": "robot_rl.sim.tasks.quadrotor_hover:QuadrotorHover",
        "mobile_reach": "robot_rl.sim.tasks.mobile_reach:MobileReach",
        "bimanual_reach": "robot_rl.sim.tasks.bimanual_reach:BimanualReach",
        "hand_turn": "robot_rl.sim.tasks.hand_turn:HandTurn",
    },
    "robot": {
        "panda": "robot_rl.sim.robots.panda:PANDA",
        "gantry": "robot_rl.sim.robots.gantry:GANTRY",
        "suction_gantry": "robot_rl.sim.robots.gantry:SUCTION_GANTRY",
        "viperx": "robot_rl.sim.robots.catalog:VIPERX",
        "so_arm100": "robot_rl.sim.robots.catalog:SO_ARM100",
        "crazyflie": "robot_rl.sim.robots.crazyflie:CRAZYFLIE",
        "mobile_panda": "robot_rl.sim.robots.panda_bodies:MOBILE_PANDA",
        "two_pandas": "robot_rl.sim.robots.panda_bodies:TWO_PANDAS",
        "claw": "robot_rl.sim.robots.claw:CLAW",
    },
    "policy": {
        "flow": "robot_rl.policies.chunk:FlowPolicy",
        "diffusion": "robot_rl.policies.chunk:DiffusionPolicy",
        "token": "robot_rl.policies.token:TokenPolicy",
        "gaussian": "robot_rl.policies.gaussian:GaussianPolicy",
        "linear": "robot_rl.policies.linear:LinearPolicy",
        "noise": "robot_rl.policies.noise:NoisePolicy",
        "residual": "robot_rl.policies.residual:ResidualPolicy",
        "latent": "robot_rl.policies.latent:LatentSteer",
        "actor": "robot_rl.policies.actor:ActorPolicy",
        "contested": "robot_rl.policies.contested:ContestedPolicy",
        "small_vla": "robot_rl.policies.vla.small:SmallVLA",
        "lerobot": "robot_rl.policies.vla.lerobot:LeRobotPolicy",
        "lerobot_flow": "robot_rl.policies.vla.lerobot_flow:LeRobotFlowPolicy",
        "lerobot_diffusion": "robot_rl.policies.vla.lerobot_diffusion:LeRobotDiffusionPolicy",
        "onnx": "robot_rl.policies.onnx_policy:OnnxPolicy",
        "given": "robot_rl.policies.given:GivenPolicy",
        "best_of_n": "robot_rl.policies.best_of_n:BestOfN",
        "one_step": "robot_rl.policies.one_step:OneStepPolicy",
        "real_time": "robot_rl.policies.real_time:RealTimeChunks",
    },
    "scorer": {
        "coin_flips": "robot_rl.policies.taco:CoinFlips",
        "critic": "robot_rl.algos.chunk_critics:ChunkCritics",
    },
    "algorithm": {
        "bc": "robot_rl.algos.bc:BehaviourCloning",
        "chunked": "robot_rl.algos.chunk_q:ChunkQ",
        "residual": "robot_rl.algos.residual:ResidualTD",
        "chain_ppo": "robot_rl.algos.chain_ppo:ChainPPO",
        "plain_ppo": "robot_rl.algos.plain_ppo:PlainPPO",
        "latent": "robot_rl.algos.latent:LatentSAC",
        "actor_critic": "robot_rl.algos.actor_critic:ActorCritic",
        "sequence": "robot_rl.algos.sequence:SequenceActorCritic",
        "qarl": "robot_rl.algos.qarl:QARL",
        "offline_ppo": "robot_rl.algos.offline_ppo:OfflinePPO",
        "distil": "robot_rl.algos.distil:Distillation",
        "progress": "robot_rl.algos.progress:ProgressCritic",
    },
    "method": {
        "chunked": "robot_rl.train.improve.chunked:CHUNKED",
        "residual": "robot_rl.train.improve.residual:RESIDUAL",
        "dagger": "robot_rl.train.improve.dagger:DAGGER",
        "ppo": "robot_rl.train.improve.ppo:PPO",
        "plain_ppo": "robot_rl.train.improve.plain_ppo:PLAIN_PPO",
        "imagined": "robot_rl.train.improve.imagined:IMAGINED",
        "grpo": "robot_rl.train.improve.grpo:GRPO",
        "latent": "robot_rl.train.improve.latent:LATENT",
        "direct": "robot_rl.train.improve.direct:DIRECT",
        "rl100": "robot_rl.train.improve.rl100:RL100",
        "sequence": "robot_rl.train.improve.sequence:SEQUENCE",
        "qarl": "robot_rl.train.improve.qarl:QARL",
    },
    "simulator": {
        "mujoco": "robot_rl.sim.vector:SimVectorEnv",
        "gym": "robot_rl.envs.gym:GymVectorEnv",
        "process": "robot_rl.envs.process:ProcessVectorEnv",
        "world": "robot_rl.worlds.env:WorldEnv",
    },
    "imitated": {
        "world": "robot_rl.worlds.inventory:env_of",
    },
    "kinematics": {
        "mujoco": "robot_rl.sim.kinematics:Kinematics",
    },
    "driver": {
        "ros2": "robot_rl.real.drivers.ros2_arm:Ros2Arm",
        "lerobot": "robot_rl.real.drivers.lerobot_arm:LeRobotArm",
        "sim": "robot_rl.real.drivers.sim:SimArm",
    },
    "plant": {
        "mujoco": "robot_rl.sim.plant:MujocoPlant",
    },
}


def table(kind: str) -> dict[str, str]:
    """Returns name -> `module:attribute` of one kind, entry points included."""
    if kind not in TABLE:
        raise UnknownComponentError(f"registry: no kind {kind!r}.{nearest(kind, TABLE)}")
    return {**plugins(kind), **TABLE[kind]}


@cache
def plugins(kind: str) -> dict[str, str]:
    """Returns name -> `module:attribute` of the entry points of one kind.

    Raises:
        ConfigError: two packages, or a package and robot_rl itself, give one name.
    """
    found: dict[str, str] = {}
    for point in entry_points(group="robot_rl.components"):
        of, _, name = point.name.partition(".")
        if of != kind:
            continue
        taken = TABLE[kind].get(name) or found.get(name, point.value)
        if taken != point.value:
            raise ConfigError(
                f"plug-in {point.value}: the {kind} {name!r} is {taken} already. Give its entry point "
                f"{point.name!r} another name, or uninstall one of the two packages."
            )
        found[name] = point.value
    return found


def resolve(kind: str, name: str, *, at: str = "config") -> Any:
    """Imports and returns component `name` of `kind`.

    Raises:
        UnknownComponentError: no such kind or name; the message offers the nearest.
        ConfigError: a plug-in cannot be imported.
    """
    known = table(kind)
    if name not in known:
        raise UnknownComponentError(
            f"{at}: no {kind} named {name!r}.{nearest(name, known)} "
            f"`robot-rl doctor --list {kind}` shows all {len(known)}."
        )
    module, attribute = known[name].split(":")
    if name in TABLE[kind]:
        return getattr(importlib.import_module(module), attribute)
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"{at}: the {kind} {name!r} of a plug-in cannot be imported: {error!r} ({known[name]}). "
            "Repair or uninstall the package that brings it."
        ) from error
