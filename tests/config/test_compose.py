"""Hydra composition: groups, overrides, interpolation, sweeps, any directory, any outer program."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from robot_rl.config import dump, load, options, read, sweep
from robot_rl.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Learner:
    lr: float = 1e-3
    updates: int = 100
    sizes: tuple[int, ...] = (64,)


@dataclass(frozen=True, kw_only=True)
class Run:
    recipe: str = "custom"
    seed: int = 0
    folder: str | None = None
    learner: Learner = field(default_factory=Learner)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A root config with two recipes."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "run.yaml").write_text("defaults:\n  - recipe: smoke\n  - _self_\n")
    (tmp_path / "recipe" / "smoke.yaml").write_text(
        "# @package _global_\nrecipe: smoke\nlearner:\n  updates: 5\nfolder: runs/${seed}\n"
    )
    (tmp_path / "recipe" / "pick_cube.yaml").write_text("# @package _global_\nrecipe: pick_cube\n")
    (tmp_path / "recipe" / "broken.yaml").write_text(
        "# @package _global_\nrecipe: broken\nlearner:\n  updtes: 5\n"
    )
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "small.yaml").write_text("# @package _global_\nlearner: {lr: 0.5, updates: 2}\n")
    (tmp_path / "base" / "large.yaml").write_text("# @package _global_\nlearner: {lr: 0.25, updates: 2}\n")
    (tmp_path / "recipe" / "upon.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /base: small\n  - _self_\nrecipe: upon\nlearner:\n  updates: 9\n"
    )
    return tmp_path


def test_default_recipe_overrides_and_interpolation(folder: Path) -> None:
    config = load(Run, ["seed=7", "learner.lr=1e-4", "learner.sizes=[8,8]"], config_name="run", folder=folder)
    assert config == Run(
        recipe="smoke", seed=7, folder="runs/7", learner=Learner(lr=1e-4, updates=5, sizes=(8, 8))
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # pyright: ignore[reportAttributeAccessIssue]  # that it is refused is the test


def test_recipe_is_selected_by_name(folder: Path) -> None:
    assert load(Run, ["recipe=pick_cube"], config_name="run", folder=folder) == Run(recipe="pick_cube")


def test_a_recipe_stands_on_a_base_that_can_be_another(folder: Path) -> None:
    config = load(Run, ["recipe=upon"], config_name="run", folder=folder)
    assert config == Run(recipe="upon", learner=Learner(lr=0.5, updates=9))
    config = load(Run, ["recipe=upon", "base=large", "learner.updates=3"], config_name="run", folder=folder)
    assert config == Run(recipe="upon", learner=Learner(lr=0.25, updates=3))


def test_works_from_any_directory_and_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(Run, [], config_name="run", folder=folder)
    monkeypatch.chdir("/")
    assert load(Run, [], config_name="run", folder=folder) == first


def test_leaves_an_outer_hydra_program_alone(folder: Path) -> None:
    with initialize_config_dir(str(folder), version_base="1.3"):
        load(Run, ["seed=1"], config_name="run", folder=folder)
        assert compose("run").recipe == "smoke"


def test_a_command_without_groups_needs_no_file(folder: Path) -> None:
    assert load(Learner, ["updates=3"], config_name="learner", folder=folder) == Learner(updates=3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["recipe=pik_cube"],
            "recipe: no recipe named 'pik_cube'. Did you mean 'pick_cube'? "
            "`robot-rl doctor --list recipe` shows all 4.",
        ),
        (
            ["recipe=upon", "base=smal"],
            "base: no base named 'smal'. Did you mean 'small'? `robot-rl doctor --list base` shows all 2.",
        ),
        (
            ["recipe=pick_cube", "base=small"],
            "base=small: the recipe is built on no base, allowed: recipes whose file says `- /base: <name>`.",
        ),
        (["sed=3"], "sed: no such key. Did you mean 'seed'?"),
        (["learner.updats=3"], "learner.updats: no such key. Did you mean 'learner.updates'?"),
        (["lr=3"], "lr: no such key. Did you mean 'learner.lr'?"),
        (["learner.updates=many"], "learner.updates: got 'many', allowed: a whole number."),
        (["recipe=broken"], "learner.updtes: no such key. Did you mean 'learner.updates'?"),
        (
            ["seed=0,1"],
            "seed=0,1: got several values for one run, allowed: one. Add -m to run them all.",
        ),
        (["pick_cube"], "pick_cube: got a word, allowed: key=value, for example `seed=3`."),
        (["seed=${sed}"], "run: Interpolation key 'sed' not found"),
    ],
)
def test_refusals(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Run, overrides, config_name="run", folder=folder)
    assert str(caught.value) == message


def test_a_value_that_hydra_cannot_parse_is_judged_by_the_schema(folder: Path) -> None:
    assert load(Run, ["folder=[a"], config_name="run", folder=folder).folder == "[a"
    with pytest.raises(ConfigError, match=r"^seed: got '3\(', allowed: a whole number\.$"):
        load(Run, ["seed=3("], config_name="run", folder=folder)
    with pytest.raises(ConfigError, match=r"^sed: no such key\. Did you mean 'seed'\?$"):
        load(Run, ["sed=3("], config_name="run", folder=folder)
    with pytest.raises(ConfigError, match=r"^a\(b: no such key\. Got 'a\(b=3', allowed: key=value"):
        load(Run, ["a(b=3"], config_name="run", folder=folder)


def test_dump_and_read_are_inverse(folder: Path, tmp_path: Path) -> None:
    config = load(Run, ["learner.lr=1e-5", "seed=2"], config_name="run", folder=folder)
    saved = tmp_path / "config.yaml"
    saved.write_text(dump(config))
    assert read(Run, saved) == config


def test_read_names_the_file(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text("sed: 3\n")
    with pytest.raises(ConfigError, match=r"config.yaml: sed: no such key. Did you mean 'seed'\?"):
        read(Run, saved)
    saved.write_text("- 3\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: got a list, allowed: keys and values"):
        read(Run, saved)
    with pytest.raises(ConfigError, match="there is no such file"):
        read(Run, tmp_path / "absent.yaml")


def test_sweep_expands_in_order_and_keeps_flags() -> None:
    assert sweep(["recipe=smoke", "seed=0,1", "--json"]) == [
        ["recipe=smoke", "seed=0", "--json"],
        ["recipe=smoke", "seed=1", "--json"],
    ]
    # Two axes of two and three values: six jobs, the last axis turns fastest.
    jobs = sweep(["a=1,2", "b=range(0,3)"])
    assert jobs[:4] == [["a=1", "b=0"], ["a=1", "b=1"], ["a=1", "b=2"], ["a=2", "b=0"]]
    assert len(jobs) == 6


def test_sweep_leaves_lists_and_quotes_alone() -> None:
    assert sweep(["sizes=[1,2]", "name='a,b'"]) == [["sizes=[1,2]", "name='a,b'"]]


def test_sweep_splits_what_hydra_cannot_read() -> None:
    assert sweep(["out=l\u00e4ufe", "dataset=a=b,'c,d'"]) == [
        ["out=l\u00e4ufe", "dataset=a=b"],
        ["out=l\u00e4ufe", "dataset='c,d'"],
    ]


def test_sweep_refuses_intervals() -> None:
    with pytest.raises(ConfigError, match="an interval needs an optimiser"):
        sweep(["lr=interval(0,1)"])


def test_two_swept_seeds_make_two_configs(folder: Path) -> None:
    jobs = sweep(["recipe=pick_cube", "seed=3,4"])
    assert [load(Run, job, config_name="run", folder=folder).seed for job in jobs] == [3, 4]


def test_options_are_the_files_of_a_group(folder: Path) -> None:
    assert options("recipe", folder) == ["broken", "pick_cube", "smoke", "upon"]


def test_a_word_of_a_sweep_that_sets_nothing_is_left_to_be_refused() -> None:
    assert sweep(["recipe=smoke", "seed"]) == [["recipe=smoke", "seed"]]
