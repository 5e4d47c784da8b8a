"""A graph of ONNX as a base: the contract, a whole run, and what is refused."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.config import build
from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.policies.checkpoint import load_policy
from robot_rl.policies.conformance import check_policy
from robot_rl.policies.given import GivenPolicy
from robot_rl.policies.onnx_policy import OnnxPolicy
from robot_rl.policies.onnx_saved import HEAD, read_onnx_folder
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from robot_rl.train.given import check_given, find_given
from tests.kinds import META, observe
from tests.runs import SMALL

onnx = pytest.importorskip("onnx", reason="needs the extra: pip install -e '.[export]'")
pytest.importorskip("onnxruntime", reason="needs the extra: pip install -e '.[export]'")

H = 8


@pytest.fixture
def graph(tmp_path: Path) -> Callable[..., Path]:
    """Writes a linear graph from the state, and perhaps noise, to a chunk; its weights are of seed 0."""

    def write(
        state: int = 4, action: int = 3, batch: Any = "B", noise: bool = True, picture: str = "", **head: Any
    ) -> Path:
        make, types = onnx.helper, onnx.TensorProto
        weights = np.random.default_rng(0).normal(0.0, 0.3, (state, H * action)).astype(np.float32)
        initial = [
            onnx.numpy_helper.from_array(weights, "w"),
            onnx.numpy_helper.from_array(np.array([-1, H, action]), "shape"),
        ]
        nodes = [
            make.make_node("MatMul", ["obs", "w"], ["flat"]),
            make.make_node("Reshape", ["flat", "shape"], ["chunk"]),
        ]
        inputs = [make.make_tensor_value_info("obs", types.FLOAT, [batch, state])]
        names = {"obs": "state"}
        last = "chunk"
        if noise:
            inputs.append(make.make_tensor_value_info("z", types.FLOAT, [batch, H, action]))
            nodes.append(make.make_node("Add", [last, "z"], ["noisy"]))
            last = "noisy"
        if picture:
            inputs.append(make.make_tensor_value_info("image", types.FLOAT, [batch, 3, 12, 16]))
            names["image"] = picture
            nodes.append(make.make_node("ReduceMean", ["image"], ["mean"], axes=[1, 2, 3], keepdims=1))
            nodes.append(make.make_node("Squeeze", ["mean", "third"], ["grey"]))
            initial.append(onnx.numpy_helper.from_array(np.array([3]), "third"))
            nodes.append(make.make_node("Add", [last, "grey"], ["lit"]))
            last = "lit"
        output = [make.make_tensor_value_info(last, types.FLOAT, [batch, H, action])]
        made = make.make_model(
            make.make_graph(nodes, "policy", inputs, output, initial),
            opset_imports=[make.make_opsetid("", 17)],
            ir_version=8,
        )
        onnx.save(made, tmp_path / "policy.onnx")
        (tmp_path / HEAD).write_text(json.dumps({"graph": "policy.onnx", "inputs": names, **head}))
        return tmp_path

    return write


def given(folder: Path) -> GivenPolicy:
    policy = OnnxPolicy.from_folder(folder)
    return GivenPolicy(policy, policy.state_scale()).eval()


@pytest.mark.parametrize("batch", ["B", 1])
def test_it_conforms(batch: Any, graph: Callable[..., Path], tmp_path: Path) -> None:
    folder = graph(batch=batch, picture="front.rgb", mean=[1.0] * 4, std=[3.0] * 4)
    check_policy(lambda: given(folder), observe, save=(tmp_path / "saved", META))


def test_it_is_the_graph(graph: Callable[..., Path], tmp_path: Path) -> None:
    policy = given(graph(picture="front.rgb", mean=[1.0] * 4, std=[2.0] * 4))
    obs, z = observe(5), 0.1 * torch.randn(5, H, 3)
    encoded = policy.encode(obs)
    torch.testing.assert_close(encoded["features"], (obs["state"] - 1.0) / 2.0)
    weights = torch.tensor(np.random.default_rng(0).normal(0.0, 0.3, (4, H * 3)), dtype=torch.float32)
    grey = (obs["front.rgb"].float() / 255.0).mean(dim=(1, 2, 3)).view(5, 1, 1)
    expected = ((obs["state"] @ weights).view(5, H, 3) + z + grey).clamp(-1.0, 1.0)
    torch.testing.assert_close(policy.sample(encoded, z=z).actions, expected, rtol=1e-4, atol=1e-5)
    twin = copy.deepcopy(policy)
    assert torch.equal(twin.sample(encoded, z=z).actions, policy.sample(encoded, z=z).actions)
    with pytest.raises(ValueError, match=r"a graph of ONNX has no chain"):
        policy.sample(encoded, record=True)


@pytest.mark.usefixtures("whole_runs")
def test_a_residual_on_a_graph(graph: Callable[..., Path], tmp_path: Path) -> None:
    config = build(RunConfig, SMALL)
    from robot_rl.rollout.envs import episodes_of

    meta, _ = episodes_of(config.env)
    folder = graph(len(meta.state_names), len(meta.action_names), noise=False)
    config = replace(config, bc=replace(config.bc, policy=str(folder)), out=str(tmp_path / "out"))
    summary = phases.run(config)
    policy: Any = load_policy(Path(summary.run) / "policy" / "final")[0]
    assert policy.base.base.kind == "onnx"
    assert bytes(policy.base.base.graph.numpy()) == (folder / "policy.onnx").read_bytes()
    assert any(value.abs().sum() > 0 for value in policy.head.parameters())
    latent = replace(config, method=build(RunConfig, {"method": {"kind": "latent"}}).method)
    found = find_given(latent)
    assert found is not None
    with pytest.raises(ConfigError, match=r"got 'onnx_without_noise', allowed: .*onnx with method=latent"):
        check_given(latent, found, *episodes_of(config.env))
    with pytest.raises(CheckpointError, match=r"observation\.state has 4 elements, here it is"):
        phases.run(replace(config, bc=replace(config.bc, policy=str(graph()))))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"graph": "other.onnx"}, r"no graph 'other\.onnx' in the folder; .* It says at least"),
        ({"outputs": 1}, r"no option 'outputs'; known are graph, inputs, mean, std"),
        ({"inputs": {"image": "state"}}, r"inputs: the graph has no 'image'; it has obs, z"),
        ({"inputs": {}}, r"input 'obs' is no observation\. Say what it is, as in inputs=\{obs: state\}"),
        ({"inputs": {"obs": "environment_state"}}, r"no input of the graph is the state"),
        ({"mean": [0.0]}, r"mean has 1 elements, the state 4"),
    ],
)
def test_a_folder_that_says_too_little(
    head: dict[str, Any], message: str, graph: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_onnx_folder(graph(**head))


def test_a_damaged_graph(graph: Callable[..., Path]) -> None:
    folder = graph()
    (folder / "policy.onnx").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"policy\.onnx: ONNX Runtime cannot read it: .* Export it"):
        read_onnx_folder(folder)
