"""A graph of ONNX as a frozen image encoder: its numbers, a whole run, and what is refused."""

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.config import build
from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.registry import resolve
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.checkpoint import load_policy, save_policy
from robot_rl.policies.config import ChunkPolicyConfig, GaussianPolicyConfig
from robot_rl.policies.export import export_policy
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.policies.onnx_pictures import read_encoder_graph
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.direct import make_policy
from tests.kinds import META
from tests.runs import SMALL

onnx = pytest.importorskip("onnx", reason="needs the extra: pip install -e '.[export]'")
pytest.importorskip("onnxruntime", reason="needs the extra: pip install -e '.[export]'")

SIZE = (12, 16)
Write = Callable[..., Path]


@pytest.fixture
def graph(tmp_path: Path) -> Write:
    """Writes a graph from a picture to the means of its colours, and twice these."""

    def write(
        shape: tuple[Any, ...] = ("N", 3, *SIZE),
        kind: str = "FLOAT",
        out: tuple[Any, ...] = ("N", 6),
        keepdims: int = 0,
    ) -> Path:
        make, types = onnx.helper, onnx.TensorProto
        axes = [2, 3] if shape[1] == 3 else [1, 2]
        nodes = [
            make.make_node("Cast", ["image"], ["seen"], to=types.FLOAT),
            make.make_node("ReduceMean", ["seen"], ["mean"], axes=axes, keepdims=keepdims),
            make.make_node("Add", ["mean", "mean"], ["twice"]),
            make.make_node("Concat", ["mean", "twice"], ["features"], axis=1),
        ]
        inputs = [make.make_tensor_value_info("image", getattr(types, kind), shape)]
        outputs = [make.make_tensor_value_info("features", types.FLOAT, out)]
        made = make.make_model(
            make.make_graph(nodes, "eye", inputs, outputs),
            opset_imports=[make.make_opsetid("", 17)],
            ir_version=8,
        )
        onnx.save(made, tmp_path / "eye.onnx")
        return tmp_path / "eye.onnx"

    return write


def policy(path: Path) -> GaussianPolicy:
    """Returns a policy of two cameras that see through the graph."""
    found = read_encoder_graph(path, SIZE)
    config = GaussianPolicyConfig(
        cameras=("left", "wrist"),
        width=8,
        image_features=5,
        frozen_graph=(len(found.content), found.features),
    )
    made = GaussianPolicy(
        config, state_dim=4, action_dim=3, normaliser=Normaliser({"state": 4}, 3), generator=torch.Generator()
    )
    assert made.encoder.frozen is not None
    made.encoder.frozen.put(found.content)
    return made.eval()


def pictures(rows: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    seen = rng.integers(0, 256, (2, rows, *SIZE, 3), np.uint8)
    return {
        "state": torch.zeros(rows, 4),
        "left.rgb": torch.from_numpy(seen[0]),
        "wrist.rgb": torch.from_numpy(seen[1]),
    }


@pytest.mark.parametrize("rows", ["N", 1])
@pytest.mark.parametrize(
    ("shape", "kind"),
    [((3, *SIZE), "FLOAT"), ((*SIZE, 3), "FLOAT"), ((3, *SIZE), "UINT8"), ((*SIZE, 3), "UINT8")],
)
def test_every_form_of_a_picture_gives_the_means_of_its_colours(
    graph: Write, rows: Any, shape: tuple[int, ...], kind: str
) -> None:
    made, obs = policy(graph((rows, *shape), kind, (rows, 6))), pictures(3)
    assert made.encoder.frozen is not None
    found = made.encoder.frozen(obs["left.rgb"].float() / 255.0)
    mean = obs["left.rgb"].double().mean(dim=(1, 2)).float() / (255.0 if kind == "FLOAT" else 1.0)
    torch.testing.assert_close(found, torch.cat([mean, 2 * mean], dim=1), rtol=1e-5, atol=1e-5)
    assert not found.requires_grad
    assert made.encode(obs)["features"].shape == (3, 4 + 2 * 5)


def test_height_and_width_may_be_free(graph: Write) -> None:
    assert read_encoder_graph(graph(("N", 3, "h", "w")), SIZE).features == 6


def test_the_digest_is_that_of_the_file(graph: Write) -> None:
    path = graph()
    assert read_encoder_graph(path, SIZE).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_checkpoint_and_a_copy_hold_the_graph(graph: Write, tmp_path: Path) -> None:
    made, obs = policy(graph()), pictures(2)
    need = made.encode(obs)["features"]
    save_policy(tmp_path / "policy", made, meta=META)
    again, _ = load_policy(tmp_path / "policy")
    for each in (again, copy.deepcopy(made)):
        torch.testing.assert_close(each.encode(obs)["features"], need, rtol=0, atol=0)


def test_other_weights_bring_another_graph(graph: Write) -> None:
    made, obs = policy(graph()), pictures(2)
    other = policy(graph(kind="UINT8")).state_dict()  # of as many bytes
    assert made.encoder.frozen is not None
    before = made.encoder.frozen(obs["left.rgb"].float() / 255.0)
    made.load_state_dict(other)
    after = made.encoder.frozen(obs["left.rgb"].float() / 255.0)
    torch.testing.assert_close(after, 255.0 * before)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"shape": ("N", 4, *SIZE)}, r"has image tensor\(float\) \['N', 4, 12, 16\], .*; allowed: one input"),
        ({"shape": ("N", 3, *SIZE), "kind": "DOUBLE"}, r"image tensor\(double\)"),
        ({"shape": (2, 3, *SIZE), "out": (2, 6)}, r"\[2, 3, 12, 16\], .*allowed: one input, float or uint8"),
        ({"out": ("N", 6, 1, 1), "keepdims": 1}, r"features tensor\(float\) \['N', 6, 1, 1\]; allowed"),
        ({"shape": ("N", 3, 32, 32)}, r"takes pictures of \(32, 32\), those of the run are \(12, 16\)\. Set"),
    ],
)
def test_another_graph_is_refused(graph: Write, how: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"eye.onnx: .*{message}"):
        read_encoder_graph(graph(**how), SIZE)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.onnx"
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=r"cut.onnx: ONNX Runtime cannot read it"):
        read_encoder_graph(path, SIZE)


def seeing(folder: Path, path: Path, **others: Any) -> RunConfig:
    see = {"cameras": ["front"], "image_size": list(SIZE)}
    settings = {
        **SMALL,
        "out": str(folder),
        "env": {**SMALL["env"], **see},
        "policy": {**SMALL["policy"], "cameras": ["front"], "random_shift_px": 0},
        "bc": {**SMALL["bc"], "encoder": str(path)},
        "checkpoint": {},
        **others,
    }
    return build(RunConfig, settings)


@pytest.mark.usefixtures("whole_runs")
def test_a_run_clones_a_head_on_a_graph_and_improves_it(
    graph: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = graph()
    summary = phases.run(seeing(tmp_path / "runs", path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f"frozen image encoder of 6 features: {path}, SHA-256 {digest}" in capsys.readouterr().err
    final: Any = load_policy(Path(summary.run) / "policy" / "final")[0]
    held = final.base.encoder.frozen.graph.numpy().tobytes()
    assert held == path.read_bytes()


def flow(path: Path) -> Any:
    found = read_encoder_graph(path, SIZE)
    sizes = (len(found.content), found.features)
    config = ChunkPolicyConfig(horizon=4, cameras=("left",), frozen_graph=sizes)
    return resolve("policy", "flow", at="policy")(config, state_dim=4, action_dim=3)


def test_settings_that_do_not_fit_a_graph_are_refused(graph: Write, tmp_path: Path) -> None:
    path = graph()
    by_hand = {**SMALL["policy"], "cameras": ["front"], "frozen_graph": [10, 6]}
    with pytest.raises(ConfigError, match=r"policy.frozen_graph: got \(10, 6\), allowed: none: bc.encoder="):
        seeing(tmp_path, path, policy=by_hand)
    base = policy(path)
    with pytest.raises(
        ConfigError, match=r"bc.encoder: got .*, allowed: no graph of ONNX, which does not learn"
    ):
        make_policy(seeing(tmp_path, path, method={"kind": "direct"}), base)
    with pytest.raises(ConfigError, match=r"export: got a policy with a frozen graph of ONNX"):
        export_policy(tmp_path / "export", flow(path), {})
    with pytest.raises(ValueError, match=r"policy frozen_graph: got \(0, 6\), allowed: two numbers above 0"):
        GaussianPolicyConfig(frozen_graph=(0, 6))
