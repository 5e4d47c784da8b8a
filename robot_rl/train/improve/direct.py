"""Reinforcement learning without the base: a new actor decides at every control step.

From scratch with demonstrations in every batch (RLPD), or pretrained on them and then without them
(WSRL), with many envs and distributional critics (FastTD3, FastSAC): all are settings of `direct`.

WSRL's pretraining here is the plain one: the actor clones the demonstrations, the critics learn the
clone's values by TD, held in place by their layer norm; no conservative term (CQL, Cal-QL). Its
warm-up is `explore_steps`: the pretrained policy acts, and nothing is learned.

The actor sees what the base sees, or what `policy` names where the base is noise. With cameras it begins with
the base's encoder, which then learns from the critics' loss.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any, cast

import numpy as np

from robot_rl.algos.actor_critic import ActorCritic
from robot_rl.core.errors import require
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import train_seed
from robot_rl.data.episodes import Episodes
from robot_rl.data.replay import ReplayBuffer
from robot_rl.policies.config import PictureSettings
from robot_rl.policies.encoded import EncodedPolicy
from robot_rl.policies.spec import SavedPolicy
from robot_rl.train.assemble import generator
from robot_rl.train.config import RunConfig
from robot_rl.train.improve import off_policy
from robot_rl.train.improve.config import NOISE, ActorSettings, DirectSettings
from robot_rl.train.improve.method import Method, Module, Start, settings_of
from robot_rl.train.loop import Meter, Run
from robot_rl.train.schedule import Counters
from robot_rl.train.session import Session

_ROWS = 20  # of metrics, while pretraining


def make_policy(config: RunConfig, base: SavedPolicy, *, decides: int = 1) -> Module:
    """Returns an actor that sees what the base does; its weights are the learner's.

    Args: decides: actions that it gives at once.
    """
    cfg, cloned = settings_of(config, ActorSettings), cast("Any", base)
    actor = cfg.algorithm.actor
    policy_class = resolve("policy", "actor", at="direct")
    policy = policy_class(
        policy_class.config_class(
            horizon=base.horizon,
            decides=decides,
            width=actor.width,
            depth=actor.depth,
            layernorm=actor.norm == "layer",
            is_gaussian=actor.kind == "gaussian",
            log_std_range=actor.log_std_range,
            explore_std=cfg.explore_std,
            **_pictures(config, base),
        ),
        state_dim=cloned.state_dim,
        action_dim=base.action_dim,
        normaliser=copy.deepcopy(cloned.normaliser),
        generator=generator(config.seed, "encoder"),
    )
    if cloned.config.cameras:
        policy.encoder.load_state_dict(cloned.encoder.state_dict())
    return policy


def _pictures(config: RunConfig, base: SavedPolicy) -> dict[str, Any]:
    """Returns the settings of what the actor sees in addition to the state; none if that is nothing."""
    own: Any = config.policy if base.kind == NOISE else vars(base)["config"]
    cameras = getattr(own, "cameras", ())
    if not cameras:
        return {}
    allowed = f"none with method={config.method.kind}, which reads the state alone"
    require(isinstance(config.method, DirectSettings), "policy.cameras", cameras, allowed)
    has_encoder = isinstance(own, PictureSettings) and isinstance(base, EncodedPolicy)
    require(has_encoder, "policy.cameras", cameras, f"none with a base of kind {base.kind}")
    is_frozen, allowed = bool(own.frozen_graph), "no graph of ONNX, which does not learn, with method=direct"
    require(not is_frozen, "bc.encoder", config.bc.encoder, allowed)
    allowed = "0 without env.privileged=true, the truth of the guess"
    is_known = own.guess_weight == 0 or config.env.privileged
    require(is_known, "policy.guess_weight", own.guess_weight, allowed)
    return {field.name: getattr(own, field.name) for field in fields(PictureSettings)}


def assemble(session: Session, start: Start) -> tuple[Run, Module]:
    """Returns the loop of an actor-critic without a base, and the policy that acts with its actor."""
    config, cfg = session.config, settings_of(session.config, DirectSettings)
    policy = make_policy(config, start.base).to(config.device)
    learner: ActorCritic = resolve("algorithm", "actor_critic", at="direct")(
        policy.feature_dim,
        policy.action_dim,
        cfg.algorithm,
        train_seed(config.seed, "direct"),
        encode=policy.encode,
        seeing=policy if policy.config.cameras else None,
        device=config.device,
    )
    if session.loop_state(config.method.kind) is None:  # else the checkpoint holds the pretrained weights
        _pretrain(session, start.episodes, learner)
    return off_policy.assemble(session, start, policy, learner, off_policy.steps(cfg)), policy


def _pretrain(session: Session, episodes: Episodes, learner: ActorCritic) -> None:
    """Clones the demonstrations, failures included; a run that is killed in this phase begins it again."""
    config, cfg = session.config, settings_of(session.config, DirectSettings)
    if not cfg.pretrain_updates:
        return
    nothing = np.zeros((episodes.num_episodes, episodes.action.shape[1]), np.float32)
    demos = ReplayBuffer.from_episodes(episodes, base_action=episodes.action, final_base_action=nothing)
    rng, meter = np.random.default_rng(train_seed(config.seed, "pretraining")), Meter()
    total = cfg.pretrain_updates
    with session.phase("pretrain", total, unit="updates") as progress:
        for done in range(1, total + 1):
            batch = demos.sample(cfg.batch, n_step=cfg.n_step, gamma_step=cfg.gamma_step, rng=rng)
            meter.add(learner.pretrain(batch.to(config.device)))
            progress.update(done)
            if done % max(1, total // _ROWS) == 0:
                row = {f"pretrain/{name}": value for name, value in meter.take().items()}
                session.write("pretrain", row, Counters(env_steps=0, updates=done))


DIRECT = Method(make_policy=make_policy, assemble=assemble)
