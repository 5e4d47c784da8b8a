"""Whether recorded episodes fit the robot or the dataset they are used for; if not, what differs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from robot_rl.core.errors import DatasetError
from robot_rl.data.episode import EpisodeSource, Feature
from robot_rl.data.episodes import EpisodesMeta


def misfit(got: EpisodesMeta, want: EpisodesMeta, also: Sequence[str] = ()) -> str | None:
    """Returns what differs between recorded episodes and those that are wanted, or None.

    Args: also: other fields that must be equal: `robot`, `task`.
    """
    for name in also:
        if getattr(got, name) != getattr(want, name):
            return f"it was recorded with {name} {getattr(got, name)!r}, not {getattr(want, name)!r}"
    for what, names, wanted in (
        ("joints (action)", got.action_names, want.action_names),
        ("state elements", got.state_names, want.state_names),
    ):
        if names == wanted:
            continue
        extra = [name for name in names if name not in wanted]
        lacking = [name for name in wanted if name not in names]
        if not extra and not lacking:
            moved = [name for name, other in zip(names, wanted, strict=False) if name != other]
            return f"its {what} are in another order: {_few(moved)}"
        parts = [f"has {_few(extra)}"] * bool(extra) + [f"lacks {_few(lacking)}"] * bool(lacking)
        return f"its {what} differ: it {' and '.join(parts)}"
    if got.control_hz != want.control_hz:
        return f"it was recorded at {got.control_hz:g} Hz, not {want.control_hz:g} Hz"
    return None


def feature_misfit(
    got: Mapping[str, Feature], want: Mapping[str, Feature], keys: Collection[str]
) -> str | None:
    """Returns the first of these observations that differs in type or shape, or None."""
    for key in keys:
        if got.get(key) != want.get(key):
            return f"observation {key!r} is {_words(got.get(key))}, not {_words(want.get(key))}"
    return None


def common_features(sources: Sequence[EpisodeSource], keys: Collection[str] | None) -> dict[str, Feature]:
    """Returns the observations `keys` (None: all of the first source) that the sources share.

    Raises:
        DatasetError: a source lacks one, or is of another robot than the first.
    """
    first = sources[0]
    for missing in sorted(set(keys or ()) - set(first.features)):
        raise DatasetError(
            f"pool: no observation {missing!r} is recorded, there are {sorted(first.features)}."
        )
    features = {key: first.features[key] for key in first.features if keys is None or key in keys}
    for index, source in enumerate(sources[1:], 1):
        problem = misfit(source.meta, first.meta) or feature_misfit(source.features, features, features)
        if problem is not None:
            raise DatasetError(
                f"pool: source {index} does not fit source 0: {problem}. Make one pool of each."
            )
    return features


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


def _words(feature: Feature | None) -> str:
    return "missing" if feature is None else f"{feature.dtype} {feature.shape}"
