"""Policies for ONNX Runtime: one graph from observation and noise to the chunk, normaliser included.

    encode.onnx   observation -> features (1, F), once for each observation
    chunk.onnx    features, z -> actions (1, H, A): every denoising step, unrolled
    refine.onnx   features, action -> action (1, A): the residual's correction, where there is one

Batch 1, float32, without exploration noise: what one arm executes. `ExportedPolicy` acts on them
like any policy and equals torch to float rounding. Guided chunks (real-time chunking) need
derivatives, which these graphs do not have. AOTInductor is not offered: it needs a C++ compiler
where it compiles, and took minutes where the graphs take seconds. H chunk length, A action dim,
F feature dim.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.files import read_json, swap_folder, with_checksum, write_synced
from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.policies.chunk import ChunkPolicy
from robot_rl.policies.residual import ResidualPolicy
from robot_rl.policies.spec import SavedPolicy, check_chunk, check_mode

Array = NDArray[Any]
FORMAT = 2
ENCODE, CHUNK, REFINE, _HEAD = "encode.onnx", "chunk.onnx", "refine.onnx", "export.json"


def export_policy(folder: Path | str, policy: SavedPolicy, obs: Mapping[str, Array]) -> None:
    """Writes a policy's graphs as `folder`, in place of older ones.

    Args:
        folder: of the export.
        policy: a flow or DDIM policy, or a residual on one, in evaluation mode on the CPU.
        obs: an example with one row: names, shapes and types are those of every later observation.

    Raises:
        ConfigError: onnx is missing, or the policy is of another kind.
    """
    _require("onnxscript", "torch.onnx")
    base = policy.base if isinstance(policy, ResidualPolicy) else policy
    if not isinstance(base, ChunkPolicy):
        raise ConfigError(
            f"export: got {type(base).__name__}, allowed: a flow or diffusion policy, or a residual on one."
        )
    if base.encoder.frozen is not None:
        raise ConfigError("export: got a policy with a frozen graph of ONNX, allowed: one without.")
    folder, names = Path(folder), tuple(obs)
    shown = tuple(torch.from_numpy(np.array(value)) for value in obs.values())
    temporary = folder.with_name(f".writing-{folder.name}")
    temporary.mkdir(parents=True, exist_ok=True)
    z, features = torch.zeros(1, base.horizon, base.action_dim), torch.zeros(1, base.feature_dim)

    def encode(*values: Tensor) -> Tensor:
        return base.encode(dict(zip(names, values, strict=True)))["features"]

    def chunk(features: Tensor, z: Tensor) -> Tensor:
        return base.sample(Encoded({"features": features}), z=z).actions

    def refine(features: Tensor, action: Tensor) -> Tensor:
        return policy.refine(Encoded({"features": features}), action)

    _write(temporary / ENCODE, _Graph(base, encode), shown, names)
    _write(temporary / CHUNK, _Graph(base, chunk), (features, z), ("features", "z"))
    if isinstance(policy, ResidualPolicy):
        _write(temporary / REFINE, _Graph(policy, refine), (features, z[:, 0]), ("features", "action"))
    head = {"format": FORMAT, "horizon": base.horizon, "action_dim": base.action_dim}
    write_synced(temporary / _HEAD, json.dumps(with_checksum(head)).encode())
    swap_folder(temporary, folder)


class ExportedPolicy:
    """Acts like the policy that was exported; it refuses what only a learner needs."""

    def __init__(self, folder: Path | str, *, threads: int = 1) -> None:
        """Loads the graphs.

        Args:
            folder: what `export_policy` wrote.
            threads: of one computation.

        Raises:
            ConfigError: onnxruntime is missing.
            CheckpointError: there is no such export, or of another version.
        """
        runtime = _require("onnxruntime", "an exported policy")
        folder = Path(folder)
        head = read_json(folder / _HEAD, CheckpointError, "Run `export_policy` again.")
        if head.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder}: export format {head.get('format')!r}, this version reads {FORMAT}. "
                "Run `export_policy` again."
            )
        self.horizon, self.action_dim = int(head["horizon"]), int(head["action_dim"])
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        self._encode = _Session(runtime, folder / ENCODE, options)
        self._chunk = _Session(runtime, folder / CHUNK, options)
        self._refine = _Session(runtime, folder / REFINE, options) if (folder / REFINE).exists() else None

    @property
    def refines(self) -> bool:
        return self._refine is not None

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        """Returns the `features` (1, F)."""
        return Encoded({"features": self._encode.run(obs)})

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns a chunk (1, H, A); modes `ode` and `mean`."""
        _check(mode)
        if record:
            _refuse("record a chain")
        shape = (1, self.horizon, self.action_dim)
        if mode == "mean":
            z = torch.zeros(shape)
        elif z is None:
            z = torch.randn(shape, generator=generator)
        check_chunk("sample", "z", z, shape)
        return ChunkSample(self._chunk.run({**encoded, "z": z}))

    def refine(
        self, encoded: Encoded, action: Tensor, *, mode: Mode = "ode", generator: Generator | None = None
    ) -> Tensor:
        """Returns the corrected action (1, A), or the action itself if the policy had no residual."""
        _check(mode)
        return action if self._refine is None else self._refine.run({**encoded, "action": action})

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Is not exported."""
        _refuse("score chains")

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Is not exported."""
        _refuse("learn")

    def to(self, device: torch.device | str) -> ExportedPolicy:
        """Returns itself: it computes on the CPU.

        Raises:
            ConfigError: another device was asked for.
        """
        if torch.device(device).type != "cpu":
            raise ConfigError(f"device: got {device}, allowed: cpu for an exported policy")
        return self


class _Session:
    """One graph: named tensors give one output."""

    def __init__(self, runtime: Any, path: Path, options: Any) -> None:
        self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._names: list[str] = [entry.name for entry in self._session.get_inputs()]

    def run(self, given: Mapping[str, Tensor]) -> Tensor:
        missing = [name for name in self._names if name not in given]
        if missing:
            raise ConfigError(f"exported policy: the observation lacks {', '.join(missing)}")
        (output,) = self._session.run(None, {name: given[name].numpy() for name in self._names})
        return torch.from_numpy(output)


class _Graph(nn.Module):
    """A function of tensors, as torch.onnx takes it."""

    def __init__(self, policy: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.policy, self.function = policy, function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


def _write(path: Path, module: nn.Module, example: tuple[Tensor, ...], names: tuple[str, ...]) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch.onnx warns about its own use of torch
        torch.onnx.export(
            module.eval(),
            example,
            str(path),
            input_names=list(names),
            output_names=["output"],
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def _require(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"export: {what} needs {module}: `pip install -e '.[export]'`.") from error


def _check(mode: Mode) -> None:
    check_mode(mode)
    if mode == "explore":
        raise ConfigError("exported policy: mode 'explore' needs the policy itself; allowed: ode, mean.")


def _refuse(what: str) -> NoReturn:
    raise ConfigError(f"exported policy: it cannot {what}. Load the policy itself for that.")
