"""Small datasets and tiny LeRobot policies, made on the spot; the hub is never asked."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.core.language import INSTRUCTION, encode_text
from robot_rl.core.policy import DemoBatch
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.facts import DatasetFacts


@pytest.fixture(scope="session")
def facts_of() -> Callable[..., DatasetFacts]:
    """Facts of a made-up dataset: state and action elements, cameras, height and width."""

    def make(
        state: int = 5, action: int = 4, cameras: tuple[str, ...] = ("front", "wrist"), px: int = 48
    ) -> DatasetFacts:
        random = np.random.default_rng(0)
        stats = {"state": table(random, state), "action": table(random, action)}
        channel = {"mean": np.full((3, 1, 1), 0.4), "std": np.full((3, 1, 1), 0.2)}
        return DatasetFacts(
            meta=EpisodesMeta(
                task="tidy",
                robot="arm",
                control_hz=20.0,
                instruction="pick up the bottle",
                state_names=tuple(f"joint_{i}" for i in range(state)),
                action_names=tuple(f"joint_{i}" for i in range(action)),
            ),
            features={
                "state": Feature("float32", (state,)),
                **{f"{camera}.rgb": Feature("uint8", (px, px, 3)) for camera in cameras},
            },
            stats=stats | {f"{camera}.rgb": channel for camera in cameras},
            instructions=("pick up the bottle", "open the drawer"),
        )

    def table(random: np.random.Generator, elements: int):
        values = 3.0 + random.normal(size=(100, elements)) * np.arange(1, elements + 1)
        quantiles = {f"q{q:02}": np.quantile(values, q / 100, axis=0) for q in (1, 10, 50, 90, 99)}
        return {
            "min": values.min(axis=0),
            "max": values.max(axis=0),
            "mean": values.mean(axis=0),
            "std": values.std(axis=0),
            "count": np.array([100]),
            **quantiles,
        }

    return make


@pytest.fixture(scope="session")
def demo_of() -> Callable[..., DemoBatch]:
    """Random demonstrations; the first row ends its episode half-way."""

    def make(
        horizon: int,
        rows: int = 3,
        state: int = 5,
        action: int = 4,
        cameras: tuple[str, ...] = ("front", "wrist"),
        px: int = 48,
    ) -> DemoBatch:
        random = torch.Generator().manual_seed(1)
        obs = {
            "state": 3.0 + torch.randn(rows, state, generator=random),
            INSTRUCTION: torch.from_numpy(encode_text(["open the drawer"] * rows)),
        }
        for camera in cameras:
            obs[f"{camera}.rgb"] = torch.randint(256, (rows, px, px, 3), generator=random, dtype=torch.uint8)
        valid = torch.ones(rows, horizon, dtype=torch.bool)
        valid[0, horizon // 2 :] = False
        return DemoBatch(obs, 3.0 + torch.randn(rows, horizon, action, generator=random), valid)

    return make


@pytest.fixture(scope="session")
def tiny_vlm(no_hub: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer, processor and configuration of a two-layer SmolVLM."""
    from robot_rl.policies.vla import tiny

    folder = tmp_path_factory.mktemp("vlm")
    tiny.write_vlm(folder)
    return folder


@pytest.fixture(scope="session")
def small_pi(no_hub: None) -> Iterator[None]:
    """Patches LeRobot for the session, so that pi0 and pi0.5 are tiny."""
    from robot_rl.policies.vla import tiny

    with ExitStack() as stack:
        stack.enter_context(tiny.tiny_gemma())
        yield


@pytest.fixture(scope="session")
def tiny_policy(tiny_vlm: Path, small_pi: None, facts_of: Callable[..., DatasetFacts]):
    """Makes a tiny policy of a type, with further options; weights are drawn with seed 0."""
    from robot_rl.policies.vla import tiny
    from robot_rl.policies.vla.lerobot import LeRobotPolicy

    def make(kind: str, policy_class: type[LeRobotPolicy] = LeRobotPolicy, **options: Any):
        chosen = tiny.options(kind, tiny_vlm)
        chosen["config"] |= options.pop("config", {})
        return policy_class.create(
            facts_of(), {**chosen, **options}, generator=torch.Generator().manual_seed(0)
        )

    return make
