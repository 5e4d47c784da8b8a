"""The small VLA on one core: an update and a chunk with one camera, 26 joints and the default sizes."""

import time

import pytest
import torch

from robot_rl.algos.bc import BCConfig, BehaviourCloning
from robot_rl.core.language import encode_text
from robot_rl.core.policy import DemoBatch
from robot_rl.policies.vla.config import SmallVLAConfig
from robot_rl.policies.vla.small import SmallVLA

JOINTS = 26


def observation(batch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "state": torch.randn(batch, JOINTS, generator=generator),
        "head.rgb": torch.randint(0, 256, (batch, 96, 128, 3), dtype=torch.uint8, generator=generator),
        "instruction": torch.from_numpy(encode_text(["Pick up the bottle."] * batch)),
    }


def cpu_ms(run: object, times: int) -> float:
    """Returns the least processor time of a call: what else runs on the machine only adds to it."""
    assert callable(run)
    least = float("inf")
    for _ in range(times):
        began = time.process_time()
        run()
        least = min(least, time.process_time() - began)
    return 1e3 * least


@pytest.mark.benchmark
@pytest.mark.parametrize(("horizons", "limit_ms"), [((), 150.0), ((4, 8, 16), 220.0)])
def test_an_update_and_a_chunk_are_cheap(horizons: tuple[int, ...], limit_ms: float) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config = SmallVLAConfig(cameras=("head",), horizons=horizons)
        policy = SmallVLA(config, state_dim=JOINTS, action_dim=JOINTS)
        learner = BehaviourCloning(policy, BCConfig(), 0)
        valid = torch.ones(32, config.horizon, dtype=torch.bool)
        batch = DemoBatch(observation(32), torch.randn(32, config.horizon, JOINTS), valid)
        assert cpu_ms(lambda: learner.update(batch), 10) <= limit_ms
        policy.eval()
        one = observation(1)
        with torch.no_grad():
            assert cpu_ms(lambda: policy.sample(policy.encode(one)), 20) <= 30.0
    finally:
        torch.set_num_threads(threads)
