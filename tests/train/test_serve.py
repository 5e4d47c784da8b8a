"""A served policy acts as it would at home: bit for bit, real-time chunking and residual included."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.core.errors import CheckpointError, DeviceError
from robot_rl.core.language import INSTRUCTION, encode_text
from robot_rl.core.policy import ContinuingPolicy
from robot_rl.policies.async_executor import AsyncExecutor
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.networks import initialise
from robot_rl.policies.real_time import RealTimeChunks
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy
from robot_rl.policies.vla.config import SmallVLAConfig
from robot_rl.policies.vla.small import SmallVLA
from robot_rl.real import remote
from robot_rl.real.messages import Ask
from robot_rl.real.remote import DoorConfig, RemoteConfig
from robot_rl.train.deploy.remote import open_remote
from robot_rl.train.serve import PolicyServer, check_ask

META = PolicyMeta(
    task="reach",
    robot="panda",
    control_hz=20.0,
    state_names=("a", "b", "c"),
    action_names=("x", "y"),
    instruction="reach",
    n_exec=4,
)


def flow() -> FlowPolicy:
    config = ChunkPolicyConfig(
        horizon=8, width=16, depth=1, time_dim=4, cameras=("front",), random_shift_px=0
    )
    return FlowPolicy(config, state_dim=3, action_dim=2, generator=torch.Generator().manual_seed(0)).eval()


def residual() -> ResidualPolicy:
    generator = torch.Generator().manual_seed(1)
    policy = ResidualPolicy(flow(), ResidualHeadConfig(width=16), scale=0.5, generator=generator)
    torch.nn.init.normal_(dict(policy.head.named_parameters())["trunk.out.weight"], generator=generator)
    return policy.eval()


def obs(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    pictures = rng.integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
    return {"state": rng.normal(size=(1, 3)).astype(np.float32), "front.rgb": pictures}


class Served:
    """A server in a thread; `again` begins it anew at the same port."""

    def __init__(self, policy: Any, token: str, meta: PolicyMeta = META) -> None:
        self._policy, self._meta, self._token, self._port = policy, meta, token, 0
        self.again()

    def again(self) -> None:
        config = DoorConfig(port=self._port, token_file=self._token)
        self.server = PolicyServer(self._policy, self._meta, config)
        self._port = int(self.server.address.rpartition(":")[2])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._stop,), daemon=True)
        self._thread.start()

    @property
    def config(self) -> RemoteConfig:
        return RemoteConfig(address=self.server.address, token_file=self._token)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def serve(token: str) -> Iterator[Callable[..., Served]]:
    served: list[Served] = []

    def start(policy: Any, meta: PolicyMeta = META) -> Served:
        served.append(Served(policy, token, meta))
        return served[-1]

    yield start
    for server in served:
        server.close()


@pytest.mark.parametrize("make", [flow, residual])
@pytest.mark.parametrize("real_time", [False, True])
def test_remote_actions_are_the_local_ones(
    serve: Callable[[Any], Served], make: Callable[[], Any], real_time: bool
) -> None:
    server = serve(make())
    policy, meta = open_remote(server.config, expect=META, real_time=real_time)
    assert meta == META
    assert isinstance(policy, ContinuingPolicy) == real_time
    policy.refine_s = 10.0  # a busy machine is late, and would take the chunk's action
    local = RealTimeChunks(make()) if real_time else make()
    with closing(policy):
        ours, theirs = (ChunkExecutor(p, 1, n_exec=4, delay=2, seed=3) for p in (policy, local))
        for step in range(12):
            one, other = ours.act(obs(step)), theirs.act(obs(step))
            np.testing.assert_array_equal(one.action, other.action)
            np.testing.assert_array_equal(one.base_action, other.base_action)
            assert (one.action != one.base_action).any() == (make is residual)
        assert policy.unrefined == 0
    assert server.server.counts.refined == (12 if make is residual else 0)


def test_a_robot_holds_while_the_server_is_gone_and_goes_on(
    serve: Callable[[Any], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_BACK_OFF_S", (0.01, 0.05))
    server = serve(residual())
    policy, _ = open_remote(server.config)
    executor = AsyncExecutor(policy, n_exec=4, control_hz=100.0)
    actions: list[Any] = []

    def act_until(condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 5.0
        while not condition():
            assert time.monotonic() < until_s
            actions.append(executor.act(obs(len(actions))).action)
            time.sleep(0.01)

    try:
        act_until(lambda: len(actions) == 8)
        assert executor.held_steps == 0
        server.close()
        act_until(lambda: executor.held_steps >= 5)
        assert not np.array(actions[-5:]).any()
        assert policy.unrefined > 0
        server.again()
        act_until(lambda: bool(actions[-1].any()))
        assert policy.lost == 1
        held = executor.held_steps
        act_until(lambda: server.server.counts.chunks >= 3)
        assert executor.held_steps <= held + 1
    finally:
        policy.close()
        executor.close()


def test_a_question_that_the_policy_cannot_answer(serve: Callable[[Any], Served]) -> None:
    policy, _ = open_remote(serve(flow()).config)
    with closing(policy):
        with pytest.raises(DeviceError, match=r"sample: .*front\.rgb"):
            policy.sample(policy.encode({"state": torch.zeros(1, 3)}))
        tensors = {name: torch.from_numpy(value) for name, value in obs(0).items()}
        assert policy.sample(policy.encode(tensors)).actions.shape == (1, 8, 2)


class Fails(FlowPolicy):
    """Fails once in the way it is told, and answers the next question."""

    error: Exception | None = None

    def sample(self, encoded: Any, **how: Any) -> Any:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().sample(encoded, **how)


@pytest.mark.parametrize(
    "error", [IndexError("row 7"), AssertionError("no"), ZeroDivisionError(), MemoryError(), OSError("disk")]
)
def test_any_failure_of_the_policy_is_answered_and_the_link_stays(
    serve: Callable[[Any], Served], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    config = ChunkPolicyConfig(horizon=8, width=16, depth=1, time_dim=4)
    failing = Fails(config, state_dim=3, action_dim=2).eval()
    server = serve(failing)
    policy, _ = open_remote(server.config, real_time=False)
    timer = threading.Timer(5.0, policy.close)  # a test that fails, and does not hang
    timer.start()
    with closing(policy):
        failing.error = error
        with pytest.raises(DeviceError, match=f"sample: {type(error).__name__}: {error}"):
            policy.sample(policy.encode({"state": torch.zeros(1, 3)}))
        assert policy.sample(policy.encode({"state": torch.zeros(1, 3)})).actions.shape == (1, 8, 2)
        assert policy.lost == 0
    timer.cancel()
    assert server.server.counts.errors == 1
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert [type(record.exc_info[1]) for record in tracebacks if record.exc_info] == [type(error)]


Z = np.zeros((1, 8, 2), np.float32)
STATE = {"state": np.zeros((1, 3), np.float32)}
PART = {"before": Z, "known": np.zeros(1, np.int64), "z": Z}


@pytest.mark.parametrize(
    ("what", "obs", "arrays", "words"),
    [
        ("sample", {}, {}, "obs: 'state' is missing"),
        (
            "sample",
            {**STATE, "touch": Z},
            {},
            r"obs: 'touch' is unknown, allowed: state, instruction, <camera>",
        ),
        ("sample", {"state": np.zeros((1, 4))}, {}, r"state: has shape \(1, 4\), allowed \(1, 3\)"),
        ("sample", {"state": np.zeros((0, 3))}, {}, r"state: has shape \(0, 3\), .* at least 1 row"),
        ("sample", {"state": np.zeros(())}, {}, r"state: has shape \(\), allowed \(1, 3\)"),
        ("sample", {**STATE, "front.rgb": np.zeros((2, 32, 32, 3))}, {}, r"front\.rgb: has shape \(2, "),
        ("sample", STATE, {"z": Z[:, :4]}, r"z: has shape \(1, 4, 2\), allowed \(1, 8, 2\)"),
        ("sample", STATE, {"noise": Z}, "arrays: 'noise' is unknown, allowed: z"),
        ("refine", STATE, {}, "arrays: 'action' is missing"),
        ("refine", STATE, {"action": Z}, r"action: has shape \(1, 8, 2\), allowed \(1, 2\)"),
        ("sample_after", STATE, {"z": Z}, "arrays: 'before' is missing"),
        ("sample_after", STATE, {**PART, "known": Z}, r"known: has shape \(1, 8, 2\), allowed \(1,\)"),
    ],
)
def test_a_malformed_question_is_refused_by_name(
    what: Any, obs: dict[str, Any], arrays: dict[str, Any], words: str
) -> None:
    ask = Ask(number=1, what=what, mode="ode", obs=obs, arrays=arrays)
    with pytest.raises(ValueError, match=words):
        check_ask(ask, flow(), META)


class LateFailure(ResidualPolicy):
    """Refines nothing: it fails, when it is told to."""

    due: threading.Event

    def refine(self, *_: Any, **__: Any) -> Any:
        assert self.due.wait(5.0)
        raise IndexError("late")


def test_a_refinement_that_failed_late_is_not_forgotten(serve: Callable[[Any], Served]) -> None:
    late = LateFailure(flow(), ResidualHeadConfig(width=16)).eval()
    late.due = threading.Event()
    server = serve(late)
    policy, _ = open_remote(server.config)
    policy.refine_s = 0.02
    given = torch.full((1, 2), 0.5)
    tensors = {name: torch.from_numpy(value) for name, value in obs(0).items()}
    with closing(policy):
        assert torch.equal(policy.refine(policy.encode(tensors), given), given)  # nobody waits
        late.due.set()
        until_s = time.monotonic() + 5.0
        while server.server.counts.errors == 0 and time.monotonic() < until_s:
            time.sleep(0.005)
        time.sleep(0.1)  # for the answer to arrive
        with pytest.raises(DeviceError, match="refine: IndexError: late"):
            policy.refine(policy.encode(tensors), given)
        assert server.server.counts.refined == 1


def test_the_words_reach_a_served_policy_of_several_tasks(serve: Callable[..., Served]) -> None:
    config = SmallVLAConfig(horizon=4, cameras=(), width=16, heads=2, depth=1, context_depth=1)
    policy = SmallVLA(config, state_dim=3, action_dim=2, generator=torch.Generator().manual_seed(0)).eval()
    initialise(policy, torch.Generator().manual_seed(1))
    served = serve(policy, replace(META, tasks=("reach", "push_cube")))
    asked, meta = open_remote(served.config, real_time=False)
    with closing(asked):
        assert (meta.does("push_cube"), meta.does("pick_cube")) == (True, False)
        noise, state = torch.zeros(1, 4, 2), torch.zeros(1, 3)
        chunks: list[torch.Tensor] = []
        for words in ("open the drawer", "push the cube"):
            obs = {"state": state, INSTRUCTION: torch.from_numpy(encode_text([words]))}
            chunks.append(asked.sample(asked.encode(obs), z=noise).actions)
            with torch.inference_mode():
                assert chunks[-1].equal(policy.sample(policy.encode(obs), z=noise).actions)
        assert not chunks[0].equal(chunks[1])


def test_real_time_chunking_can_be_chosen_later(serve: Callable[[Any], Served]) -> None:
    policy, _ = open_remote(serve(flow()).config, real_time=False)
    with closing(policy):
        ours, theirs = (
            ChunkExecutor(p, 1, n_exec=4, delay=2, seed=3)
            for p in (policy.continuing(), RealTimeChunks(flow()))
        )
        for step in range(6):
            np.testing.assert_array_equal(ours.act(obs(step)).action, theirs.act(obs(step)).action)


def test_only_acting_is_served(serve: Callable[[Any], Served]) -> None:
    policy, _ = open_remote(serve(flow()).config)
    with closing(policy), pytest.raises(DeviceError, match="it acts, and does not record a chain"):
        policy.sample(policy.encode({}), record=True)


def test_a_policy_of_another_task_is_refused(serve: Callable[[Any], Served]) -> None:
    with pytest.raises(CheckpointError, match="made for task = 'reach', this arm has 'pick_cube'"):
        open_remote(serve(flow()).config, expect=replace(META, task="pick_cube"))


def test_a_policy_for_several_robots_is_served_to_each(serve: Callable[..., Served]) -> None:
    config = serve(flow(), meta=replace(META, robots=(META.robot, "gantry"))).config
    policy, meta = open_remote(config, expect=replace(META, robot="gantry"))
    with closing(policy):
        assert meta.robots == (META.robot, "gantry")
    with pytest.raises(CheckpointError, match=r"made for robot = \['panda', 'gantry'\], this arm has"):
        open_remote(config, expect=replace(META, robot="viperx"))


def test_a_policy_for_robots_at_other_rates_is_served_to_each_at_its_own(
    serve: Callable[..., Served],
) -> None:
    rates = (META.control_hz, 10.0)
    config = serve(flow(), meta=replace(META, robots=(META.robot, "gantry"), rates=rates)).config
    policy, meta = open_remote(config, expect=replace(META, robot="gantry", control_hz=10.0))
    with closing(policy):
        assert meta.rates == rates
    with pytest.raises(CheckpointError, match=r"made for control_hz = 10\.0, this arm has"):
        open_remote(config, expect=replace(META, robot="gantry"))


def test_a_full_house(serve: Callable[[Any], Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robot_rl.train.serve.MAX_CLIENTS", 1)
    server = serve(flow())
    policy, _ = open_remote(server.config)
    with closing(policy), pytest.raises(DeviceError, match=r"policy server tcp://127\.0\.0\.1"):
        open_remote(server.config)
