"""Seeds: training and evaluation never meet, and a draw never depends on how many other envs run."""

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from robot_rl.core.arrays import Array, copied, is_array, like, namespace

EVAL_SEED_START = 2**31
"""Training seeds lie below this number, evaluation seeds at or above it."""

QUICK_EVAL_SEED_START = 2**32
"""Seeds of the quick evaluations during training; `eval_seeds` ends below this number."""

# Words are int64, since torch has next to nothing for uint64: products wrap to the same 64 bits.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def train_seed(run_seed: int, stream: str) -> int:
    """Returns the seed of one named stream of a training run, below `EVAL_SEED_START`."""
    words = [run_seed, *stream.encode()]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint32)[0] >> 1)


def eval_seeds(run_seed: int, num_episodes: int) -> NDArray[np.uint64]:
    """Returns one seed per held-out episode, distinct and at or above `EVAL_SEED_START`."""
    start = EVAL_SEED_START + (run_seed % 100_000) * 10_000
    return np.arange(start, start + num_episodes, dtype=np.uint64)


def quick_eval_seeds(run_seed: int, num_episodes: int) -> NDArray[np.uint64]:
    """Returns seeds of the evaluations during training, disjoint from training and from `eval_seeds`.

    A person who tunes by the curves of a run tunes on these seeds, never on the held-out ones.
    """
    start = QUICK_EVAL_SEED_START + (run_seed % 100_000) * 10_000
    return np.arange(start, start + num_episodes, dtype=np.uint64)


class Stream(IntEnum):
    """What an episode draws apart from its start, which is of stream 0: none shifts or repeats another's."""

    LOOKS = 1
    BANK_ROWS = 2
    DOMAIN = 3
    VARIANTS = 4
    RETRIES = 5
    SENSING = 6
    """In each control step, in the place of episodes."""
    PICTURES = 7
    SAMPLES = 8


class EpisodeRng:
    """Draws that depend on (seed, episode, index of the draw) alone.

    A counter-based generator (SplitMix64: Steele, Lea, Flood 2014), so that row i is the same
    whether it is drawn alone or among thousands, and no generator object exists per env.
    """

    def __init__(self, seeds: ArrayLike | Array, episodes: ArrayLike | Array, *, stream: int = 0) -> None:
        """Begins at draw 0 of each row.

        Args:
            seeds: (rows,) numbers below 2**64; draws are arrays of their kind. A tensor holds them as int64.
            episodes: (rows,) of the same kind.
            stream: each has draws of its own.
        """
        self._key_B = _mix(_mix(_words(seeds) + _GOLDEN) ^ (_words(episodes) * _GOLDEN + _MIX_1))
        for _ in range(stream):
            self._key_B = _mix(self._key_B + _MIX_2)
        self._drawn = 0

    @property
    def num_rows(self) -> int:
        return len(self._key_B)

    @property
    def key(self) -> Array:
        """One number a row that identifies (seed, episode): uint64, of a tensor the same bits as int64."""
        words: Any = copied(self._key_B)
        return words.view(np.uint64) if isinstance(words, np.ndarray) else words

    def uniform(self, low: ArrayLike = 0.0, high: ArrayLike = 1.0, size: int = 1) -> Array:
        """Returns (rows, size) numbers in [low, high), float64."""
        xp, key_B1 = namespace(self._key_B), self._key_B[:, None]
        first = self._drawn + 1
        index = xp.arange(first, first + size, dtype=xp.int64, device=key_B1.device)
        self._drawn += size
        bits = _mix(key_B1 + index[None, :] * _GOLDEN)
        unit = xp.asarray(_shifted(bits, 11), dtype=xp.float64) * 2.0**-53
        lowest = like(low, unit)
        return lowest + unit * (like(high, unit) - lowest)

    def normal(self, size: int = 1) -> Array:
        """Returns (rows, size) standard normal numbers (Box and Muller)."""
        xp = namespace(self._key_B)
        radius = xp.sqrt(-2.0 * xp.log1p(-self.uniform(size=size)))
        return radius * xp.cos(2.0 * np.pi * self.uniform(size=size))


def _words(numbers: Any) -> Array:
    """Returns the bits of (rows,) numbers as int64."""
    if is_array(numbers) and not isinstance(numbers, np.ndarray):
        return numbers
    return np.atleast_1d(np.asarray(numbers, dtype=np.uint64)).view(np.int64)


def _mix(word: Array) -> Array:
    word = (word ^ _shifted(word, 30)) * _MIX_1
    word = (word ^ _shifted(word, 27)) * _MIX_2
    return word ^ _shifted(word, 31)


def _shifted(word: Array, by: int) -> Array:
    """Returns the bits moved to the right, with zeros behind them, as those of an unsigned number."""
    return (word >> by) & (2 ** (64 - by) - 1)
