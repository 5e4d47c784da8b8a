"""A graph of ONNX as a policy: frozen, on the CPU; see `onnx_saved` for the folder.

The graph is part of the weights, so that a checkpoint is whole.
B rows, H chunk length, A action dim, S state dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Generator, Tensor, nn

from robot_rl.core.policy import ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.policies.onnx_saved import NOISE, Signature, open_graph, read_onnx_folder
from robot_rl.policies.processes import normal_like
from robot_rl.policies.spec import Chainless, check_chunk, check_mode, read_config, read_size


class OnnxPolicy(Chainless, nn.Module):
    """A graph from an observation, and perhaps noise, to a chunk."""

    kind: ClassVar[str] = "onnx"
    name: ClassVar[str] = "a graph of ONNX"

    def __init__(
        self, graph: bytes | int, signature: Signature, scale: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Takes a graph; ONNX Runtime opens it when it first acts.

        Args:
            graph: its bytes; a number: so many bytes are loaded later.
            signature: sizes of its inputs and of its chunk.
            scale: mean and standard deviation (S,) of the state; known where it was opened from a folder.
        """
        super().__init__()
        blob = np.zeros(graph, np.uint8) if isinstance(graph, int) else np.frombuffer(graph, np.uint8).copy()
        self.graph: Tensor = nn.Buffer(torch.from_numpy(blob))
        self.signature, self.scale = signature, scale
        self.horizon, self.action_dim = signature.horizon, signature.action_dim
        self.state_dim: int = signature.shapes["state"][0]
        self.feature_dim: int = self.state_dim
        self.observed: tuple[str, ...] = tuple(key for key in signature.shapes if key != NOISE)
        """Observations that it reads."""
        self.takes_noise: bool = NOISE in signature.shapes

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Opens the graph of a folder; raises what `read_onnx_folder` does."""
        head, signature = read_onnx_folder(folder)
        size = signature.shapes["state"][0]
        scale = torch.tensor(head.mean or (0.0,) * size), torch.tensor(head.std or (1.0,) * size)
        return cls(head.graph.read_bytes(), signature, scale)

    @cached_property
    def _session(self) -> Any:
        return open_graph(self.graph.cpu().numpy().tobytes(), at="onnx")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_session"}

    def state_scale(self) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation (S,) of the state."""
        assert self.scale is not None, "it was opened from a folder"
        return self.scale

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        """Returns what the graph reads; `features` are the state."""
        return Encoded({"features": obs["state"].float(), **{key: obs[key] for key in self.observed}})

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns the graph's chunk (B, H, A); mode `mean` decodes zero noise.

        Raises:
            ValueError: an unknown mode, `z` of another shape, or a chain is asked for.
        """
        check_mode(mode)
        if record:
            raise ValueError(f"sample: {self.name} has no chain to record. Use a gaussian or flow policy.")
        rows = len(encoded["features"])
        shape = (rows, self.horizon, self.action_dim)
        if z is not None:
            check_chunk("sample", NOISE, z, shape)
        elif self.takes_noise:
            z = normal_like(torch.empty(shape), generator)
        noise = None if z is None else torch.zeros_like(z) if mode == "mean" else z
        feed = {name: self._given(key, encoded, noise) for name, key in self.signature.inputs.items()}
        parts = [slice(i, i + 1) for i in range(rows)] if self.signature.one_row else [slice(None)]
        found = [
            self._session.run(None, {name: value[part] for name, value in feed.items()})[0] for part in parts
        ]
        return ChunkSample(torch.from_numpy(np.concatenate(found)).to(encoded["features"].device))

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Refuses: a graph does not learn."""
        raise ValueError("bc_loss: a graph of ONNX does not learn. Put a residual on it.")

    def _given(self, key: str, encoded: Encoded, noise: Tensor | None) -> Any:
        """Returns an input as the graph takes it."""
        value = noise if key == NOISE else encoded[key]
        assert value is not None, "a graph that takes noise gets it"
        if key in self.signature.floats:
            value = value.permute(0, 3, 1, 2).float() / 255.0
        value = value if key.endswith(".rgb") else value.float()
        return value.cpu().contiguous().numpy()

    def spec(self) -> dict[str, Any]:
        return {"bytes": len(self.graph), "signature": asdict(self.signature)}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        table = dict(spec["signature"])
        table["shapes"] = {key: tuple(shape) for key, shape in table["shapes"].items()}
        return cls(read_size(spec, "bytes", at=at), read_config(Signature, table, at=f"{at}: signature"))
