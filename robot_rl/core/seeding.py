"""Seeds: training and evaluation never meet, and a draw never depends on how many envs run beside it."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

EVAL_SEED_START = 2**31
"""Training seeds lie below this number, evaluation seeds at or above it."""

QUICK_EVAL_SEED_START = 2**32
"""Seeds of the quick evaluations during training; `eval_seeds` ends below this number."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def train_seed(run_seed: int, stream: str) -> int:
    """Returns the seed of one named stream of a training run, below `EVAL_SEED_START`."""
    words = [run_seed, *stream.encode()]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint32)[0] >> 1)


def eval_seeds(run_seed: int, num_episodes: int) -> NDArray[np.uint64]:
    """Returns one seed per held-out episode, distinct and at or above `EVAL_SEED_START`."""
    start = EVAL_SEED_START + (run_seed % 100_000) * 10_000
    return np.arange(start, start + num_episodes, dtype=np.uint64)


def quick_eval_seeds(run_seed: int, num_episodes: int) -> NDArray[np.uint64]:
    """Returns seeds for looking on during training: disjoint from training and from `eval_seeds`.

    Whoever tunes by what a run shows while it trains, tunes on these and never on the held-out ones.
    """
    start = QUICK_EVAL_SEED_START + (run_seed % 100_000) * 10_000
    return np.arange(start, start + num_episodes, dtype=np.uint64)


class EpisodeRng:
    """Draws that depend on (seed, episode, index of the draw) alone.

    A counter-based generator (SplitMix64: Steele, Lea, Flood 2014), so that row i is the same
    whether it is drawn alone or among thousands, and no generator object exists per env.
    """

    def __init__(self, seeds: ArrayLike, episodes: ArrayLike) -> None:
        seeds_B = np.atleast_1d(np.asarray(seeds, dtype=np.uint64))
        episodes_B = np.atleast_1d(np.asarray(episodes, dtype=np.uint64))
        with np.errstate(over="ignore"):
            self._key_B = _mix(_mix(seeds_B + _GOLDEN) ^ (episodes_B * _GOLDEN + _MIX_1))
        self._drawn = 0

    @property
    def num_rows(self) -> int:
        return len(self._key_B)

    @property
    def key(self) -> NDArray[np.uint64]:
        """One number a row that identifies (seed, episode)."""
        return self._key_B.copy()

    def uniform(self, low: ArrayLike = 0.0, high: ArrayLike = 1.0, size: int = 1) -> NDArray[np.float64]:
        """Returns (rows, size) numbers in [low, high)."""
        index = np.arange(self._drawn + 1, self._drawn + size + 1, dtype=np.uint64)
        self._drawn += size
        with np.errstate(over="ignore"):
            bits = _mix(self._key_B[:, None] + index[None, :] * _GOLDEN)
        unit = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.asarray(low) + unit * (np.asarray(high) - np.asarray(low))

    def normal(self, size: int = 1) -> NDArray[np.float64]:
        """Returns (rows, size) standard normal numbers (Box and Muller)."""
        radius = np.sqrt(-2.0 * np.log1p(-self.uniform(size=size)))
        return radius * np.cos(2.0 * np.pi * self.uniform(size=size))


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        word = (word ^ (word >> np.uint64(30))) * _MIX_1
        word = (word ^ (word >> np.uint64(27))) * _MIX_2
        return word ^ (word >> np.uint64(31))
