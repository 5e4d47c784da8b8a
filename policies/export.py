"""Policies for ONNX Runtime: one graph from observation and noise to the chunk, normaliser included.

    chunk.onnx    observation, z -> actions (1, H, A): the encoder and every denoising step, unrolled
    refine.onnx   observation, action -> action (1, A): the residual's correction, where there is one

Batch 1, float32, without exploration noise: what one arm executes. `ExportedPolicy` acts on them
like any policy and equals torch to float rounding. Guided chunks (real-time chunking) need
derivatives, which these graphs do not have. AOTInductor is not offered: it needs a C++ compiler
where it compiles, and took minutes where the graphs take seconds. H chunk length, A action dim.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.core.files import read_json, swap_folder, with_checksum, write_synced
from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Mode
from robot_rl.policies.chunk import ChunkPolicy
from robot_rl.policies.residual import ResidualPolicy
from robot_rl.policies.spec import SavedPolicy, check_chunk, check_mode

Array = NDArray[Any]
FORMAT = 1
CHUNK, REFINE, _HEAD = "chunk.onnx", "refine.onnx", "export.json"


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
    folder, names = Path(folder), tuple(obs)
    shown = tuple(torch.from_numpy(np.array(value)) for value in obs.values())
    temporary = folder.with_name(f".writing-{folder.name}")
    temporary.mkdir(parents=True, exist_ok=True)
    z = torch.zeros(1, base.horizon, base.action_dim)
    _write(temporary / CHUNK, _Chunk(base, names), (*shown, z), (*names, "z"))
    if isinstance(policy, ResidualPolicy):
        _write(temporary / REFINE, _Refine(policy, names), (*shown, z[:, 0]), (*names, "action"))
    head = {"format": FORMAT, "horizon": base.horizon, "action_dim": base.action_dim}
    write_synced(temporary / _HEAD, json.dumps(with_checksum(head)).encode())
    swap_folder(temporary, folder)


class ExportedPolicy:
    """Acts as the policy it was exported from; what only a learner needs is refused."""

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
        head = read_json(folder / _HEAD, CheckpointError, "`export_policy` makes one anew.")
        if head.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder}: export format {head.get('format')!r}, this version reads {FORMAT}."
            )
        self.horizon, self.action_dim = int(head["horizon"]), int(head["action_dim"])
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        self._chunk = _Session(runtime, folder / CHUNK, options)
        self._refine = _Session(runtime, folder / REFINE, options) if (folder / REFINE).exists() else None

    def sample(
        self,
        obs: dict[str, Tensor],
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
        return ChunkSample(self._chunk.run(obs, z))

    def refine(
        self,
        obs: dict[str, Tensor],
        action: Tensor,
        *,
        mode: Mode = "ode",
        generator: Generator | None = None,
    ) -> Tensor:
        """Returns the corrected action (1, A), or the action itself if the policy had no residual."""
        _check(mode)
        return action if self._refine is None else self._refine.run(obs, action)

    def log_prob(self, obs: dict[str, Tensor], chain: Chain) -> tuple[Tensor, Tensor]:
        """Is not exported."""
        _refuse("score chains")

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Is not exported."""
        _refuse("learn")

    def features(self, obs: dict[str, Tensor]) -> Tensor:
        """Is not exported."""
        _refuse("give features")

    def to(self, device: torch.device | str) -> ExportedPolicy:
        """Returns itself: it computes on the CPU.

        Raises:
            ConfigError: another device was asked for.
        """
        if torch.device(device).type != "cpu":
            raise ConfigError(f"device: got {device}, allowed: cpu for an exported policy")
        return self


class _Runtime(Protocol):
    """What this module uses of onnxruntime, which carries no types."""

    SessionOptions: Any
    InferenceSession: Any


class _Session:
    """One graph: named observation tensors and one more input give one output."""

    def __init__(self, runtime: _Runtime, path: Path, options: Any) -> None:
        self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._names: list[str] = [entry.name for entry in self._session.get_inputs()]

    def run(self, obs: Mapping[str, Tensor], last: Tensor) -> Tensor:
        *names, last_name = self._names
        missing = [name for name in names if name not in obs]
        if missing:
            raise ConfigError(f"exported policy: the observation lacks {', '.join(missing)}")
        fed = {name: obs[name].numpy() for name in names}
        (output,) = self._session.run(None, {**fed, last_name: last.numpy()})
        return torch.from_numpy(output)


class _Chunk(nn.Module):
    """Chunk sampling as a function of tensors."""

    def __init__(self, policy: ChunkPolicy, names: tuple[str, ...]) -> None:
        super().__init__()
        self.policy, self.names = policy, names

    def forward(self, *tensors: Tensor) -> Tensor:
        *shown, z = tensors
        return self.policy.sample(dict(zip(self.names, shown, strict=True)), z=z).actions


class _Refine(nn.Module):
    """The residual's correction as a function of tensors."""

    def __init__(self, policy: ResidualPolicy, names: tuple[str, ...]) -> None:
        super().__init__()
        self.policy, self.names = policy, names

    def forward(self, *tensors: Tensor) -> Tensor:
        *shown, action = tensors
        return self.policy.refine(dict(zip(self.names, shown, strict=True)), action)


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
    raise ConfigError(f"exported policy: it acts, and does not {what}. Load the policy itself for that.")
