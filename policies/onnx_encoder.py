"""A graph of ONNX as a frozen image encoder; see `onnx_pictures` for what it takes.

The graph is part of the weights, so that a checkpoint is whole. B rows, D features.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robot_rl.policies.onnx_pictures import encoded, signature_of
from robot_rl.policies.onnx_saved import open_graph


class OnnxEncoder(nn.Module):
    """Encodes pictures on the CPU, without a gradient; ONNX Runtime opens the graph when it is first used."""

    def __init__(self, num_bytes: int) -> None:
        """Has room for a graph, which `put` or a checkpoint brings."""
        super().__init__()
        self.graph: Tensor = nn.Buffer(torch.zeros(num_bytes, dtype=torch.uint8))

    def put(self, graph: bytes) -> None:
        """Takes a graph of as many bytes."""
        self.graph.copy_(torch.from_numpy(np.frombuffer(graph, np.uint8).copy()))

    def forward(self, image: Tensor) -> Tensor:
        """Maps images (B, h, w, 3) in [0, 1] to (B, D)."""
        session, taken = self._session
        found = encoded(session, taken, image.detach().float().cpu().contiguous().numpy())
        return torch.from_numpy(found).to(image.device)

    @cached_property
    def _session(self) -> tuple[Any, Any]:
        session = open_graph(self.graph.cpu().numpy().tobytes(), at="image encoder", setting="bc.encoder")
        return session, signature_of(session, at="image encoder")[0]

    def _load_from_state_dict(self, *given: Any, **how: Any) -> None:
        before = self.graph.clone()
        super()._load_from_state_dict(*given, **how)
        if not before.equal(self.graph):
            self.__dict__.pop("_session", None)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_session"}
