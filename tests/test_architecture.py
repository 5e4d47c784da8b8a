"""The shape of the code: what it may import, how large it may grow, what it may silence.

The numbers here are ratchets. Lower them when the code allows; raising one is a decision for
the review, with its reason in the change.
"""

import ast
import dataclasses
import functools
import importlib
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from robot_rl.config import options
from robot_rl.sim.backends.backend import Backend

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "robot_rl"
LINKS = ("sim", "real", "policies")
"""Top-level folders that are packages of robot_rl through committed links."""

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
"""Name -> lines of what is over the limit; entries may shrink or go, and none may come."""
MAX_SUPPRESSIONS = 20
"""Comments that silence ruff or pyright, in the whole tree."""
MAX_LOOP_LINES = 80
MAX_ASSEMBLE_LINES = 120
"""All functions named assemble* of `robot_rl/train/assemble.py` together."""

LIGHT = (
    "robot_rl",
    "robot_rl.core",
    "robot_rl.config",
    "robot_rl.telemetry",
    "robot_rl.hal",
    "robot_rl.sched",
    "robot_rl.real",
    "robot_rl.testing",
)
HEAVY = ("torch", "mujoco", "lerobot", "transformers")


def sources() -> list[Path]:
    """Returns every Python file of the package once, by its real path."""
    folders = [PACKAGE, *(ROOT / name for name in LINKS)]
    # os.walk does not follow links, so the linked folders are not read twice.
    found = (Path(top) / name for folder in folders for top, _, names in os.walk(folder) for name in names)
    return sorted(path for path in found if path.suffix == ".py")


def suite() -> list[Path]:
    """Returns every Python file of the test suite."""
    return sorted((ROOT / "tests").rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """Returns the import name of a source file: sim/task.py is robot_rl.sim.task."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "robot_rl" else ("robot_rl", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def outline(path: Path) -> tuple[list[tuple[str, int]], list[ast.Import | ast.ImportFrom]]:
    """Returns the name and number of lines of every function of a file, and its imports.

    Trees are not kept: those of all files together are millions of objects.
    """
    lengths, imported = list[tuple[str, int]](), list[ast.Import | ast.ImportFrom]()
    left: list[ast.AST] = [ast.parse(read(path))]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lengths.append((node.name, node.end_lineno - node.lineno + 1))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imported.append(node)
        for block in ("body", "orelse", "handlers", "finalbody", "cases"):  # what holds statements
            inner = getattr(node, block, None)
            left += inner if isinstance(inner, list) else []
    return lengths, imported


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yields `file:function` and its number of lines, for every function of a file."""
    for name, lines in outline(path)[0]:
        yield f"{relative(path)}:{name}", lines


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter and returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- imports -----------------------------------------------------------------------------------


def test_the_robot_side_imports_neither_torch_nor_mujoco() -> None:
    """A robot's computer must be able to import these without the learner or a simulator."""
    modules = [
        name
        for name in map(module_name, sources())
        if any(name == top or (top != "robot_rl" and name.startswith(f"{top}.")) for top in LIGHT)
    ]
    assert len(modules) > 20
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]
    if loaded:
        sys.exit(f"{{name}} loads {{loaded}}")
"""
    run_python(code)


def imports(path: Path, names: set[str]) -> set[str]:
    """Returns the modules among `names` that a file imports: at the top, for types alone, or later."""
    found: set[str] = set()
    for node in outline(path)[1]:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner if inner <= names else inner | {node.module}
    return found & names


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = {module_name(path): path for path in sources()}
    graph = TopologicalSorter({name: imports(path, files.keys() - {name}) for name, path in files.items()})
    graph.prepare()  # CycleError: it names one


def test_fakes_stand_in_testing_and_nothing_else_ships_with_them() -> None:
    others = [path for path in sources() if not module_name(path).startswith("robot_rl.testing")]
    marks = ("class Fake", "robot_rl.testing")
    texts = {relative(path): read(path) for path in others}
    assert [(name, mark) for name, text in texts.items() for mark in marks if mark in text] == []


@pytest.mark.parametrize("folder", LINKS)
def test_a_linked_folder_has_one_import_name(folder: str) -> None:
    assert (PACKAGE / folder).is_symlink()
    assert os.readlink(PACKAGE / folder) == f"../{folder}"
    code = f"""
try:
    import {folder}
except ImportError as error:
    print(error)
"""
    assert run_python(code) == f"import robot_rl.{folder}, not {folder}: a module has one name"


def test_configs_are_linked_into_the_package() -> None:
    assert os.readlink(PACKAGE / "configs") == "../configs"


# --- sizes -------------------------------------------------------------------------------------


def over(found: dict[str, int], limit: int) -> dict[str, int]:
    return {name: lines for name, lines in found.items() if lines > limit}


def test_files_stay_small() -> None:
    lines = {relative(path): len(read(path).splitlines()) for path in sources() + suite()}
    assert over(lines, MAX_FILE_LINES) == LONG_FILES


def test_functions_stay_small() -> None:
    lines = dict(pair for path in sources() + suite() for pair in functions(path))
    assert over(lines, MAX_FUNCTION_LINES) == LONG_FUNCTIONS


def test_the_loop_and_its_assembly_stay_readable() -> None:
    train = PACKAGE / "train"
    assert dict(functions(train / "loop.py"))["robot_rl/train/loop.py:train"] <= MAX_LOOP_LINES
    parts = [lines for name, lines in functions(train / "assemble.py") if ":assemble" in name]
    assert 0 < sum(parts) <= MAX_ASSEMBLE_LINES


def test_no_test_file_is_empty() -> None:
    empty = [
        relative(path)
        for path in suite()
        if path.name.startswith("test_")
        and not any(name.rpartition(":")[2].startswith("test_") for name, _ in functions(path))
    ]
    assert empty == []


# --- what is silenced, what is hidden ------------------------------------------------------------


def comments(path: Path, marks: tuple[str, ...]) -> Iterator[str]:
    """Yields the comments of a file with one of the marks."""
    if not any(mark in read(path) for mark in marks):
        return
    for token in tokenize.generate_tokens(io.StringIO(read(path)).readline):
        if token.type == tokenize.COMMENT and any(mark in token.string for mark in marks):
            yield token.string


def test_suppressions_only_fall_in_number() -> None:
    marks = ("noqa", "type: ignore", "pyright: ignore", "ruff: ")
    found = [
        f"{relative(path)}: {comment}" for path in sources() + suite() for comment in comments(path, marks)
    ]
    assert len(found) <= MAX_SUPPRESSIONS, "\n".join(found)


def test_everything_is_ascii() -> None:
    files = [*sources(), *suite(), *ROOT.glob("*.md"), *(ROOT / "configs").rglob("*.yaml"), ROOT / "Makefile"]
    assert [relative(path) for path in files if not path.read_bytes().isascii()] == []


LITERARY = (
    "anew|beside|besides|cease|clumsily|ears|eyes|hasty|heed|hurried|lately|likeliest|mend|mended|mends|"
    "nameless|obey|overrate|punctual|said|seldom|senseless|spoiled|taught|told|unheard|vanish|whoever|whom"
)
"""Words that were replaced by plain ones; they may not come back, in names either."""
OLD_KEYS = "earlier_names: ClassVar"
"""Begins lines with names of tensors in files that were saved before."""


def literary(text: str) -> list[str]:
    """Returns the literary words of a text, with the lines that they are in."""
    words = re.compile(rf"(?<![A-Za-z])({LITERARY})(?![A-Za-z])")
    found = [(match[1], line.strip()) for line in text.splitlines() for match in words.finditer(line)]
    return [f"{word}: {line}" for word, line in found if not line.startswith(OLD_KEYS)]


def test_words_are_plain() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    texts = [path for path in pages if relative(path) != "docs/results.md"]
    files = [*sources(), *(ROOT / "configs").rglob("*.yaml"), *texts]
    found = {relative(path): literary(read(path)) for path in files}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a file beside it\n", ["beside: a file beside it"]),
        ("    def _anew(self): ...", ["anew: def _anew(self): ..."]),
        ("self.eyes = nn.ModuleDict()", ["eyes: self.eyes = nn.ModuleDict()"]),
        ('earlier_names: ClassVar = {"eyes": "image_encoders"}', []),
        ("it clears and appears; untold, amended", []),
    ],
)
def test_every_literary_word_is_seen(text: str, words: list[str]) -> None:
    assert literary(text) == words


def test_no_file_names_a_package_registry() -> None:
    """An installer finds its index by its own configuration; a name in the tree would break mirrors."""
    hosts = ["".join(parts) for parts in (("py", "pi.org"), ("python", "hosted.org"), ("anaconda", ".org"))]
    top = [
        "pyproject.toml",
        "Makefile",
        ".ci/run",
        ".ci/setup",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ]
    files = [*sources(), *suite(), *(ROOT / "configs").rglob("*.yaml"), *(ROOT / name for name in top)]
    found = [(relative(path), host) for path in files for host in hosts if host in read(path)]
    assert found == []


# --- configuration -------------------------------------------------------------------------------


def config_classes() -> list[tuple[str, str]]:
    """Returns (module, class) of every dataclass named `*Config`. Each worker asks: few files are parsed."""
    return [
        (module_name(path), node.name)
        for path in sources()
        if re.search(r"^class \w*Config\b", read(path), re.MULTILINE)
        for node in ast.parse(read(path)).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.decorator_list
    ]


@pytest.mark.parametrize(("module", "name"), config_classes())
def test_configs_are_frozen_and_by_keyword(module: str, name: str) -> None:
    schema = getattr(importlib.import_module(module), name)
    assert dataclasses.is_dataclass(schema)
    assert "__setattr__" in vars(schema), f"{name} is not frozen"  # what frozen=True writes
    assert all(field.kw_only for field in dataclasses.fields(schema)), f"{name} takes positional arguments"


def test_every_yaml_file_parses() -> None:
    files = list((ROOT / "configs").rglob("*.yaml"))
    assert len(files) > 3
    for path in files:
        OmegaConf.load(path)


@pytest.mark.parametrize("recipe", options("recipe"))
def test_every_recipe_makes_a_run_config(recipe: str) -> None:
    from robot_rl.config import load
    from robot_rl.train.config import RunConfig

    assert load(RunConfig, [f"recipe={recipe}"], config_name="train").recipe == recipe


ENVS = ("make_env", "SimVectorEnv", "SingleEnv", "GymVectorEnv", "ProcessVectorEnv", "StationEnv", "PastEnv")
MAKES = ("EnvDevice", "LeasedEnv", "gymnasium.make", "gymnasium.make_vec", "resolve('simulator'")
"""Calls that make envs of others, or devices."""
MAKERS = (*ENVS, "EnvDevice", "LeasedEnv", "gymnasium", "simulator")
"""A file without any of these words makes none."""
DEVICES = (
    "robot_rl/rollout/envs.py",
    "robot_rl/train/deploy/run.py",
    "robot_rl/hal/leased.py",
    "robot_rl/envs/gym.py",
    "robot_rl/envs/foreign.py",
    "robot_rl/envs/process.py",
)
"""Where envs are made into devices, and the one that is made of others'."""
APART = (
    "robot_rl/bench/sim.py",
    "robot_rl/bench/engines.py",
    "robot_rl/bench/render.py",
    "robot_rl/bench/her_peer.py",
    "robot_rl/bench/pixels_peer.py",
    "robot_rl/bench/ppo.py",
    "robot_rl/testing/devices.py",
    "robot_rl/resets/workbench.py",
    "robot_rl/train/imagine.py",
)
"""What measures an env layer by layer, Stable-Baselines3's own loops, the fake robot, and what is given
simulations that a command has opened."""


def makes_env(node: ast.AST) -> str:
    """Returns what a node makes an env by, or an empty text."""
    if isinstance(node, ast.ImportFrom):
        return " ".join(alias.name for alias in node.names if alias.name in ENVS)
    if isinstance(node, ast.Attribute):
        is_ours = node.attr != "make_env" or ast.unparse(node.value).endswith("envs")  # others have one too
        return node.attr if node.attr in ENVS and is_ours else ""
    if isinstance(node, ast.Call):
        called = ast.unparse(node)
        return next((name for name in MAKES if called.startswith((f"{name}(", f"{name},"))), "")
    return ""


def test_all_that_acts_opens_a_device_under_a_lease() -> None:
    """Simulators may make what they consist of; everybody else asks `simulation` or `station_device`."""
    others = [path for path in sources() if relative(path).split("/")[0] != "sim"]
    found = [
        f"{relative(path)}:{getattr(node, 'lineno', 0)} makes {name}"
        for path in others
        if relative(path) not in (*DEVICES, *APART) and any(word in read(path) for word in MAKERS)
        for node in ast.walk(ast.parse(read(path)))
        if (name := makes_env(node))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from robot_rl.envs.gym import GymVectorEnv as G", "GymVectorEnv"),
        ("envs.make_env(config, 1)", "make_env"),
        ("functools.partial(vector.SimVectorEnv, config)", "SimVectorEnv"),
        ("gymnasium.make('Hopper-v5')", "gymnasium.make"),
        ("resolve('simulator', 'mujoco', at='env')(config, 1)", "resolve('simulator'"),
        ("EnvDevice(spec, make).open(lease)", "EnvDevice"),
        ("simulation(config, 1).open(lease)", ""),
        ("resolve('policy', kind)", ""),
    ],
)
def test_every_other_way_to_make_an_env_is_seen(code: str, name: str) -> None:
    seen = [found for node in ast.walk(ast.parse(code)) if (found := makes_env(node))]
    assert seen[:1] == ([name] if name else [])


# --- back ends -----------------------------------------------------------------------------------

BACK_END = ("sim/backends/", "sim/robots/", "sim/kinematics.py", "sim/cameras.py", "sim/gl.py")
"""What may name MuJoCo's models: the back ends, robots alone and the checks of their models, cameras."""
SCENES = ("sim/scene.py", "sim/looks.py", "sim/task.py", "sim/tasks/", "sim/variants.py")
"""What builds MJCF, which every back end loads."""
MEASURES_MUJOCO = tuple(
    f"robot_rl/bench/{name}.py" for name in ("sim", "engines", "mjx_peer", "physics", "render")
)
BUILDS = ("MjSpec", "MjsBody", "MjsJoint")


def breaches(path: str, code: str) -> list[str]:
    """Returns what a file above the back end takes of MuJoCo beyond building scenes."""
    if path.startswith((*BACK_END, *MEASURES_MUJOCO)) or not ("mujoco" in code or "backend" in code):
        return []
    offered = {*vars(Backend), *Backend.__annotations__}
    found: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [alias.name for alias in node.names]
            whole = [module] if module else names
            if any(name.split(".")[0] == "mujoco" for name in whole):
                is_scene = path.startswith(SCENES) and set(whole) == {"mujoco"}
                taken = names if module else []
                found += (
                    [] if is_scene and all(map(builds, taken)) else [f"imports {' '.join(whole + taken)}"]
                )
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner == "mujoco" and not builds(node.attr):
                found.append(f"mujoco.{node.attr}")
            elif owner.rpartition(".")[2].strip("_") == "backend" and node.attr not in offered:
                found.append(f"backend.{node.attr}")
    return found


def builds(name: str) -> bool:
    """Returns whether a name of MuJoCo serves to write MJCF."""
    return name in BUILDS or name.startswith("mjt")


def test_nothing_above_the_back_end_names_an_object_of_mujoco() -> None:
    """A second back end gives arrays to tasks, controller, safety, env and resets, and they run."""
    found = {relative(path): breaches(relative(path), read(path)) for path in sources()}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "code", "found"),
    [
        ("sim/vector.py", "import mujoco", ["imports mujoco"]),
        ("sim/control.py", "self._backend.model.opt", ["backend.model"]),
        ("sim/vector.py", "self.backend.view; backend.bind('qpos')", []),
        ("robot_rl/train/pictures.py", "from mujoco.batch import Batch", ["imports mujoco.batch Batch"]),
        ("sim/tasks/reach.py", "import mujoco\ndef scene(spec: mujoco.MjSpec): ...", []),
        ("sim/tasks/reach.py", "from mujoco import MjModel", ["imports mujoco MjModel"]),
        ("sim/tasks/reach.py", "import mujoco\nmujoco.MjData(model)", ["mujoco.MjData"]),
        ("sim/robots/servo_check.py", "import mujoco\nmujoco.MjData(model)", []),
    ],
)
def test_every_object_of_mujoco_is_seen(path: str, code: str, found: list[str]) -> None:
    assert breaches(path, code) == found
