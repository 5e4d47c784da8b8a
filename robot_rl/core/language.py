"""Instructions as arrays: UTF-8 bytes, so that an observation stays a dict of tensors.

Bytes need no tokenizer file, which a checkpoint could lose. Policies with a tokenizer of their own
decode the bytes again. B rows, L bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError

INSTRUCTION = "instruction"
"""Key of the instruction in an observation, uint8 (B, L)."""
MAX_BYTES = 192
"""L of `encode_text` by default."""


def encode_text(texts: Sequence[str], length: int = MAX_BYTES) -> NDArray[np.uint8]:
    """Returns the texts' UTF-8 bytes, (B, L), padded with zeros.

    Raises:
        DatasetError: a text that does not fit, or holds a zero byte.
    """
    encoded = np.zeros((len(texts), length), np.uint8)
    for row, text in zip(encoded, texts, strict=True):
        content = text.encode()
        if len(content) > length or b"\0" in content:
            raise DatasetError(
                f"instruction {text[:60]!r}: {len(content)} bytes, allowed {length} and no zero byte. "
                "Shorten the instruction."
            )
        row[: len(content)] = np.frombuffer(content, np.uint8)
    return encoded


def decode_text(encoded: NDArray[Any]) -> list[str]:
    """Returns the texts of `encode_text`, one for each row (B, L)."""
    return [bytes(row).rstrip(b"\0").decode() for row in np.asarray(encoded, np.uint8)]
