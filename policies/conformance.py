"""The rules of `Policy` as checks for any policy.

    from robot_rl.policies.conformance import check_policy
    check_policy(lambda: MyPolicy(...), lambda rows: {"state": torch.randn(rows, 9)})

A broken rule raises `ConformanceError` with what was got and what is needed. A policy without a likelihood,
or one that cannot clone, raises a ValueError; everything else has to be right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from robot_rl.core.policy import Chain, DemoBatch, Encoded, rows_of
from robot_rl.hal.env_rules import ConformanceError, require
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.spec import MODES

__all__ = ["ConformanceError", "check_policy"]

_ROWS = 24
_CLOSE = 1e-5
"""Of a ratio from 1 (PPO's first minibatch), and of a row among many from the row alone."""


def check_policy(
    make_policy: Callable[[], Any],
    observe: Callable[[int], dict[str, Tensor]],
    *,
    save: tuple[Path, PolicyMeta] | None = None,
    bounded: bool = True,
    max_difference: float = 0.0,
) -> None:
    """Checks every rule of `robot_rl.core.policy.Policy`.

    Args:
        make_policy: returns the policy, a module, with the same weights at each call. They should not be zero
            where the policy ends: what is zero for every observation shows little.
        observe: returns an observation of that many rows, other ones in each row.
        save: a folder to be made and what the policy is for, where it can be saved.
        bounded: False for one whose actions are in a dataset's units, and not in [-1, 1].
        max_difference: of the actions of the same chunk sampled twice, where bits cannot be equal.

    Raises:
        ConformanceError: names the rule.
    """
    case = _Case(make_policy, observe(_ROWS), bounded, max_difference)
    _check_encode(case)
    _check_encoded_once(case)
    _check_sample(case)
    _check_rows(case)
    _check_refine(case)
    _check_chain(case)
    _check_cloning(case)
    if save is not None:
        _check_saved(case, *save)


@dataclass(frozen=True)
class _Case:
    make: Callable[[], Any]
    obs: dict[str, Tensor]
    bounded: bool
    max_difference: float

    @property
    def shape(self) -> tuple[int, int, int]:
        policy = self.make()
        return _ROWS, policy.horizon, policy.action_dim

    def z(self) -> Tensor:
        return torch.randn(self.shape, generator=_seeded(7))

    def inside(self, rule: str, got: Tensor) -> None:
        """Refuses actions that nothing can execute."""
        most = got.abs().max().item()
        limit = 1.0 if self.bounded else math.inf
        require(
            bool(torch.isfinite(got).all()) and most <= limit, rule, f"up to {most:g}", f"within {limit:g}"
        )

    def same(self, rule: str, got: Tensor, want: Tensor) -> None:
        """Refuses two chunks that should be one."""
        off = (got - want).abs().max().item()
        require(off <= self.max_difference, rule, f"a difference of {off:g}", "the same actions")


def _seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def _refused(ask: Callable[[], Any]) -> bool:
    """Returns whether a ValueError with a message refuses it; another error is a fault."""
    try:
        ask()
    except ValueError as error:
        require(len(str(error)) > 0, "a refusal", "no words", "what to do instead")
        return True
    return False


def _check_encode(case: _Case) -> None:
    policy, before = case.make(), {key: value.clone() for key, value in case.obs.items()}
    with torch.no_grad():
        found, again = policy.encode(case.obs), policy.encode(case.obs)
        for name, value in found.items():
            require(
                len(value) == _ROWS, f"encode: rows of {name!r}", len(value), f"{_ROWS}, as observations have"
            )
            require(torch.equal(value, again[name]), f"encode: {name!r} twice", "others", "the same")
        features, shape = found["features"], (_ROWS, policy.feature_dim)
        require(features.shape == shape, "encode: shape of features", tuple(features.shape), shape)
        require(bool(torch.isfinite(features).all()), "encode: features", "NaN or infinite ones", "finite")
    for key, value in before.items():
        require(torch.equal(value, case.obs[key]), f"encode: observation {key!r}", "changed", "left alone")


def _check_encoded_once(case: _Case) -> None:
    """Refuses a policy that encodes again: modules of `encode` run nowhere else."""
    policy, ran = case.make(), set[str]()
    hooks = [
        module.register_forward_hook(lambda *_, name=name: ran.add(name))
        for name, module in policy.named_modules()
    ]
    with torch.no_grad():
        encoded = policy.encode(case.obs)
        looks = set(ran)

        def check(rule: str) -> None:
            again = sorted(looks & ran)
            require(
                not again, f"encode: once in a control step, but {rule} runs", again, "none of them again"
            )

        ran.clear()
        sample = _recorded(policy, encoded) or policy.sample(encoded, z=case.z())
        check("sample")
        policy.refine(encoded, sample.actions[:, 0], generator=_seeded(1))
        check("refine")
        if sample.chain is not None:
            policy.log_prob(encoded, sample.chain)
            check("log_prob")
    for hook in hooks:
        hook.remove()


def _check_sample(case: _Case) -> None:
    with torch.no_grad():
        for mode in MODES:
            policy, rule = case.make(), f"sample, mode {mode}"
            encoded = policy.encode(case.obs)
            before = {name: value.clone() for name, value in encoded.items()}
            first = policy.sample(encoded, mode=mode, generator=_seeded(1))
            got = first.actions
            require(got.shape == case.shape, f"{rule}: shape", tuple(got.shape), case.shape)
            case.inside(f"{rule}: actions", got)
            require(first.chain is None, f"{rule}: chain without record", "a chain", "None")
            for name, value in before.items():
                require(torch.equal(value, encoded[name]), f"{rule}: {name!r}", "changed", "left alone")
            again = policy.sample(encoded, mode=mode, generator=_seeded(1)).actions
            case.same(f"{rule}: twice with the same generator", again, got)
        one, other = (
            policy.sample(policy.encode(case.obs), z=case.z(), generator=_seeded(seed)).actions
            for seed, policy in ((1, case.make()), (2, case.make()))
        )
    case.same("sample: the same noise with another generator", one, other)


def _check_rows(case: _Case) -> None:
    policy, z = case.make(), case.z()
    with torch.no_grad():
        encoded = policy.encode(case.obs)
        many = policy.sample(encoded, z=z).actions
        for row in (0, _ROWS // 2):
            rows = torch.tensor([row])
            for of in (policy.encode(rows_of(case.obs, rows)), rows_of(encoded, rows)):
                off = (policy.sample(of, z=z[rows]).actions[0] - many[row]).abs().max().item()
                rule = f"sample: row {row} alone and among {_ROWS}"
                require(off <= _CLOSE, rule, f"{off:g} apart", "the same")


def _check_refine(case: _Case) -> None:
    policy = case.make()
    with torch.no_grad():
        encoded = policy.encode(case.obs)
        action = policy.sample(encoded, z=case.z()).actions[:, 0]
        for mode in MODES:
            rule = f"refine, mode {mode}"
            got = policy.refine(encoded, action.clone(), mode=mode, generator=_seeded(1))
            require(got.shape == action.shape, f"{rule}: shape", tuple(got.shape), "that of action")
            case.inside(f"{rule}: actions", got)
            if not policy.refines:
                require(
                    torch.equal(got, action),
                    f"{rule}: actions, though it `refines` not",
                    "others",
                    "the same",
                )
            again = policy.refine(encoded, action.clone(), mode=mode, generator=_seeded(1))
            case.same(f"{rule}: twice with the same generator", again, got)


def _check_chain(case: _Case) -> None:
    policy = case.make()
    with torch.no_grad():
        encoded = policy.encode(case.obs)
        sample = _recorded(policy, encoded)
        if sample is None:
            return
        plain = policy.sample(encoded, mode="explore", generator=_seeded(2)).actions
        case.same("sample: with and without record", sample.actions, plain)
        chain: Chain = sample.chain
        _check_ratio("log_prob of a recorded chain", policy, encoded, chain)
        shuffled = torch.randperm(_ROWS, generator=_seeded(3))[: _ROWS // 2]
        part = policy.encode(rows_of(case.obs, shuffled))
        _check_ratio("log_prob of a minibatch", policy, part, chain.rows(shuffled))
        for parameter in policy.parameters():
            parameter.mul_(1.1)
        moved = (policy.log_prob(policy.encode(case.obs), chain)[0] - chain.log_prob).abs().max().item()
    require(moved > 1e-3, "log_prob after the weights have moved", f"{moved:g} away", "another one")


def _recorded(policy: Any, encoded: Encoded) -> Any:
    """Returns a sample with its chain; None where there is none, or nothing in it was drawn."""

    def ask() -> Any:
        return policy.sample(encoded, mode="explore", record=True, generator=_seeded(2))

    if _refused(ask):
        return None
    sample = ask()
    require(sample.chain is not None, "sample with record: chain", "None", "a chain")
    # An adapter's base may act without noise: its chain scores nothing.
    return sample if sample.chain.log_prob.shape[1] else None


def _check_ratio(rule: str, policy: Any, encoded: Encoded, chain: Chain) -> None:
    found, entropy = policy.log_prob(encoded, chain)
    for name, part in (("log-probability", found), ("entropy", entropy)):
        require(part.shape == chain.log_prob.shape, f"{rule}: {name}", part.shape, chain.log_prob.shape)
    off = ((found - chain.log_prob).exp() - 1.0).abs().max().item()
    require(off <= _CLOSE, rule, f"a ratio {off:g} from 1", f"1 within {_CLOSE:g}")


def _check_cloning(case: _Case) -> None:
    policy = case.make()
    shape = case.shape
    # Of a chunk that is valid in part, a denoiser may look at the rest, noised: that is no target.
    valid = torch.ones(shape[:2], dtype=torch.bool)
    valid[_ROWS // 2 :] = False
    actions = torch.rand(shape, generator=_seeded(4)) * 2.0 - 1.0
    padded = torch.where(valid[..., None], actions, 1.0 - actions.abs())

    def loss(chunk: Tensor) -> Tensor:
        return policy.bc_loss(DemoBatch(case.obs, chunk, valid), _seeded(5))

    if _refused(lambda: loss(actions)):
        return
    found = loss(actions)
    require(found.shape == (), "bc_loss: shape", tuple(found.shape), "a scalar")
    require(bool(torch.isfinite(found)), "bc_loss", found.item(), "a finite number")
    require(found.requires_grad, "bc_loss: gradient", "none", "one")
    off = (loss(padded) - found).abs().item()
    require(
        off <= _CLOSE, "bc_loss: other actions in rows that are not valid", f"{off:g} away", "the same loss"
    )
    other = (loss(-actions) - found).abs().item()
    require(other > 0, "bc_loss: other actions", "the same loss", "another one")


def _check_saved(case: _Case, folder: Path, meta: PolicyMeta) -> None:
    policy = case.make()
    save_policy(folder, policy, meta=meta)
    loaded, found = load_policy(folder, expect=meta)
    require(found == meta, "saved and loaded: meta", found, meta)
    with torch.no_grad():
        want, got = (
            one.sample(one.encode(case.obs), mode="mean", generator=_seeded(6)).actions
            for one in (policy, loaded)
        )
        case.same("saved and loaded: actions", got, want)
        sample, encoded = _recorded(policy, policy.encode(case.obs)), loaded.encode(case.obs)
        if sample is not None:
            _check_ratio("log_prob of a policy that was saved and loaded", loaded, encoded, sample.chain)
