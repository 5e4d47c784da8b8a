"""Make LeRobot's model and pipelines: new for a dataset, or from a checkpoint folder.

Both end as `Parts`, and `describe` turns parts back into the files of a checkpoint folder. S state
dim, A action dim.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import SafetensorError
from safetensors.torch import save

from robot_rl.core.errors import CheckpointError, ConfigError, nearest, require
from robot_rl.data.facts import DatasetFacts
from robot_rl.policies.config import ProcessConfig
from robot_rl.policies.processes import flow_process
from robot_rl.policies.vla import lerobot_files as files
from robot_rl.policies.vla.lerobot_fit import (
    IMAGES,
    check_cameras,
    check_sizes,
    check_statistics,
    dataset_stats,
    features,
    matched_cameras,
    padded_sizes,
    rename_map,
)
from robot_rl.policies.vla.lora import LoraOptions

TYPES = ("act", "diffusion", "smolvla", "pi0", "pi05")

_OWN = "robot_rl.json"
_FROM_FILE: dict[str, Any] = {
    "load_vlm_weights": False,
    "pretrained_backbone_weights": None,
    "pretrained_path": None,
    "use_peft": False,
}
"""Fields that would fetch weights which a checkpoint overwrites anyway."""


@dataclass(frozen=True, kw_only=True)
class FlowOptions:
    """How `lerobot_flow` walks from noise to actions."""

    steps: int | None = None
    """K, the number of denoising steps; None takes the configuration's."""
    process: str = "flow_sde"
    """`flow_sde`, which is an ODE but for mode `explore`, or `flow_ode`."""
    eta: float = 0.5
    """Noise of `flow_sde`, at least 0."""
    stochastic_steps: str = "one"
    """`one` or `all` steps of `flow_sde` are stochastic in mode `explore`."""
    scored: int | None = None
    """Log-probabilities are of the first so many actions, those that are executed; None means all."""

    def __post_init__(self) -> None:
        known = ("flow_sde", "flow_ode")
        require(self.process in known, "policy.flow.process", self.process, ", ".join(known))

    def exploring(self, options: ProcessConfig) -> FlowOptions:
        """Returns these options with another process.

        Raises:
            ConfigError: a process that LeRobot's flows do not have, or options of another one.
        """
        frozen = options.tuned_steps
        require(frozen == 0, "policy.flow.tuned_steps", frozen, "0: all steps learn")
        found = replace(
            self,
            process=options.process or "flow_ode",
            eta=options.eta,
            stochastic_steps=options.stochastic_steps,
            scored=options.scored,
        )
        process = flow_process(found.process, eta=found.eta, stochastic_steps=found.stochastic_steps)
        if found.steps is not None:
            process.check(found.steps)
        return found


@dataclass(frozen=True, kw_only=True)
class LeRobotOptions:
    """How a LeRobot policy is made."""

    type: str = ""
    """`act`, `diffusion`, `smolvla`, `pi0` or `pi05`; not needed with `pretrained`."""
    pretrained: str = ""
    """Checkpoint folder or hub id to begin from; '' begins with random weights."""
    revision: str = ""
    """Branch, tag or commit of a hub id."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of LeRobot's own configuration class, by their names there: `chunk_size`, `num_steps`."""
    rename: Mapping[str, str | None] = field(default_factory=dict[str, "str | None"])
    """Camera of the dataset -> camera of the checkpoint; None leaves a camera out."""
    normalisation: str = "dataset"
    """With `pretrained`: statistics of the `dataset`, or those of the `checkpoint`."""
    vlm: str = ""
    """Folder or hub id of the tokenizer and (SmolVLA) the VLM's configuration; '' as the config names."""
    lora: LoraOptions | None = None
    """Trains adapters and heads instead of all weights."""
    flow: FlowOptions | None = None
    """How `lerobot_flow` samples; None takes LeRobot's number of steps."""
    instruction: str = ""
    """What an observation without an instruction means; '' takes the first of the dataset."""

    def __post_init__(self) -> None:
        if self.type not in (*TYPES, ""):
            raise ConfigError(f"policy.type: got {self.type!r}.{nearest(self.type, TYPES)}")
        if not self.type and not self.pretrained:
            raise ConfigError(f"policy.type: say one of {', '.join(TYPES)}, or name a pretrained folder.")
        if not self.pretrained and any(self.rename.values()):
            raise ConfigError(
                "policy.rename: a new policy takes the dataset's cameras by their names; allowed is null, "
                "to leave one out. Names of a checkpoint need `pretrained`."
            )
        known = ("dataset", "checkpoint")
        require(self.normalisation in known, "policy.normalisation", self.normalisation, ", ".join(known))


@dataclass
class Parts:
    """A LeRobot policy in its pieces."""

    policy: Any
    """LeRobot's `PreTrainedPolicy`."""
    config: Any
    """Its configuration, an instance of LeRobot's class."""
    pre: Any
    """Pipeline from a batch in the dataset's units to the model's inputs."""
    post: Any
    """Pipeline from the model's actions to the dataset's units."""
    assets: files.Files
    """Files of the tokenizer and the VLM, below their subfolder."""
    origin: str = ""
    """The checkpoint it was opened from."""
    instruction: str = ""
    """The default instruction that checkpoint holds."""

    def cameras(self) -> tuple[str, ...]:
        """Returns the cameras a batch must have, by their names before LeRobot renames them."""
        names = {
            after: before for before, after in self.step("rename_observations_processor").rename_map.items()
        }
        seen = (key for key in self.config.image_features if "empty_camera" not in key)
        return tuple(names.get(key, key).removeprefix(IMAGES) for key in seen)

    def step(self, name: str) -> Any:
        """Returns the preprocessor's step of that registered name, or None."""
        found = (s for s in self.pre.steps if getattr(type(s), "_registry_name", "") == name)
        return next(found, None)

    def move(self, device: torch.device) -> None:
        """Makes the preprocessor return tensors on a device."""
        step = self.step("device_processor")
        if step is not None and step.tensor_device != device:
            step.device, step.tensor_device = device.type, device
            step.non_blocking = device.type == "cuda"


def check(options: LeRobotOptions, facts: DatasetFacts) -> None:
    """Refuses what does not fit, without weights or statistics: before pictures are read.

    Raises:
        ConfigError: see `new_parts` and `open_parts`.
        CheckpointError: see `open_parts`.
    """
    if not options.pretrained:
        at = f"policy {options.type}"
        _check_new(options, facts, at=at)
        _check_fields(options.type, options.config, at=at)
        return
    at = options.pretrained
    _, kind, table, pipelines = _read(options, at=at, weights=False)
    matched_cameras(kind, table, rename_map(pipelines[0]), options.rename, facts, at=at)
    check_sizes(kind, {**table, **options.config}, facts, at=at)
    _check_fields(kind, options.config, at=at)


def new_parts(options: LeRobotOptions, facts: DatasetFacts) -> Parts:
    """Makes a policy with random weights, or with those of a pretrained backbone its config names.

    Raises:
        ConfigError: options that LeRobot refuses for this dataset.
        CheckpointError: a file that is neither here nor on the hub.
    """
    at = f"policy {options.type}"
    cameras, sizes = _check_new(options, facts, at=at)
    table: dict[str, Any] = {"device": "cpu", "push_to_hub": False, **_defaults(options), **sizes}
    table |= options.config
    table |= features(facts, cameras)
    vlm = None
    if options.type in files.ASSETS:
        name = options.vlm or table.get("vlm_model_name") or _default_vlm(options.type)
        vlm = files.assets_folder(options.type, name, at=at, weights=bool(table.get("load_vlm_weights")))
    config = _decode(options.type, table, facts, vlm, at=at)
    policy = _model(config, at=at)
    factory = files.extra("lerobot.policies.factory")
    with files.quiet(), _tokenizer_of_pi(config, vlm):
        pre, post = factory.make_pre_post_processors(config, dataset_stats=dataset_stats(facts, cameras))
    return Parts(policy, config, pre, post, _assets(policy, pre, config))


def open_parts(
    options: LeRobotOptions, facts: DatasetFacts | None, *, weights: bool = True, at: str = ""
) -> Parts:
    """Opens a checkpoint; with `facts`, its inputs, outputs and statistics become the dataset's.

    Raises:
        ConfigError: options that the checkpoint cannot have.
        CheckpointError: it is incomplete, damaged, of other cameras or sizes, or needs a file that
            is neither here nor on the hub.
    """
    at = at or options.pretrained
    folder, kind, table, pipelines = _read(options, at=at, weights=True)
    table |= {"device": "cpu", **_FROM_FILE, **options.config}
    rename = rename_map(pipelines[0])
    cameras: dict[str, str] = {}
    if facts is not None:
        cameras = matched_cameras(kind, table, rename, options.rename, facts, at=at)
        check_sizes(kind, table, facts, at=at)
        table |= features(facts, cameras)
        rename = {IMAGES + c: IMAGES + t for c, t in cameras.items() if c != t}
    vlm = _vlm_of(kind, folder, table, pipelines[0], options, at=at)
    config = _decode(kind, table, facts, vlm, at=at)
    stats = None
    if facts is not None and options.normalisation == "dataset":
        stats = dataset_stats(facts, cameras)
    pre, post = _open_pipelines(folder, config, pipelines, rename, stats, vlm, at=at)
    policy = _model(config, at=at)
    if weights:
        files.load_weights(policy, folder / files.WEIGHTS, at=at)
    own = files.read_json(folder / _OWN, at=at) if (folder / _OWN).is_file() else {}
    assets = _assets(policy, pre, config)
    return Parts(policy.eval(), config, pre, post, assets, at, str(own.get("instruction", "")))


def describe(parts: Parts, *, root: Path | None, instruction: str) -> files.Files:
    """Returns every file of the checkpoint folder `root` but the weights.

    Paths are written as `root` makes them: LeRobot takes a path as it stands, from the working
    directory or absolute; None leaves them relative to the folder.
    """
    draccus = files.extra("draccus")
    base: Any = files.extra("lerobot.configs").PreTrainedConfig
    config = draccus.encode(parts.config, base)
    config |= {key: value for key, value in _FROM_FILE.items() if key in config}
    config["device"] = next(parts.policy.parameters()).device.type
    content: files.Files = dict(parts.assets)
    asset = files.ASSETS.get(config["type"])
    path = asset and str(root / asset if root else asset)
    if "vlm_model_name" in config:
        config["vlm_model_name"] = path
    content[files.CONFIG] = _json(config)
    for name, pipeline in zip(files.PIPELINES, (parts.pre, parts.post), strict=True):
        table = pipeline.get_config()
        for step in table["steps"]:
            if "tokenizer_name" in step["config"]:
                step["config"]["tokenizer_name"] = path
        content[f"{name}.json"] = _json(table)
        for key, state in pipeline.state_dict().items():
            content[f"{key}.safetensors"] = save({n: t.contiguous() for n, t in state.items()})
    content[_OWN] = _json({"instruction": instruction})
    return content


def relocate(folder: Path) -> None:
    """Writes the new path of a moved checkpoint folder into its files, for LeRobot's loading.

    Raises:
        CheckpointError: it is no checkpoint folder, or damaged.
    """
    folder = folder.resolve()
    files.verify(folder, at=str(folder))
    config = files.read_json(folder / files.CONFIG, at=str(folder))
    asset = files.ASSETS.get(str(config.get("type")))
    if asset is None or not (folder / asset).is_dir():
        return
    if "vlm_model_name" in config:
        (folder / files.CONFIG).write_bytes(_json({**config, "vlm_model_name": str(folder / asset)}))
    path = folder / f"{files.PIPELINES[0]}.json"
    table = files.read_json(path, at=str(folder))
    for step in table["steps"]:
        if "tokenizer_name" in step.get("config", {}):
            step["config"]["tokenizer_name"] = str(folder / asset)
    path.write_bytes(_json(table))
    files.write_checksums(folder)


def _check_new(
    options: LeRobotOptions, facts: DatasetFacts, *, at: str
) -> tuple[dict[str, str], dict[str, int]]:
    """Returns the cameras of a new policy, and the sizes it pads to."""
    cameras = {c: c for c in facts.cameras if options.rename.get(c, c) is not None}
    check_cameras(facts, cameras, at=at)
    return cameras, padded_sizes(options.type, facts, options.config, at=at)


def _read(
    options: LeRobotOptions, *, at: str, weights: bool
) -> tuple[Path, str, dict[str, Any], list[dict[str, Any]]]:
    """Returns a checkpoint's folder, policy type, configuration and both pipelines, as they are written."""
    folder = files.hub_folder(
        options.pretrained,
        at=at,
        what="the checkpoint",
        remedy="as pretrained (for `robot-rl finetune`: policy=FOLDER)",
        revision=options.revision,
        weights=weights,
    )
    if weights:
        files.verify(folder, at=at)
    table = files.read_json(folder / files.CONFIG, at=at)
    pipelines = [files.read_json(folder / f"{name}.json", at=at) for name in files.PIPELINES]
    kind = table.pop("type", None)
    if kind not in TYPES or options.type not in (kind, ""):
        raise CheckpointError(
            f"{at}: a policy of type {kind!r}, expected {options.type or 'one of ' + ', '.join(TYPES)}."
        )
    return folder, kind, table, pipelines


def _defaults(options: LeRobotOptions) -> dict[str, Any]:
    """Returns what differs from LeRobot's defaults: one observation, and chunks executed whole."""
    horizon = options.config.get("chunk_size", options.config.get("horizon"))
    whole = {} if horizon is None else {"n_action_steps": horizon}
    if options.type == "diffusion":
        return {"n_obs_steps": 1, "n_action_steps": 64, **whole}
    return whole


def _default_vlm(kind: str) -> str:
    known = {f.name: f.default for f in fields(_config_class(kind))}
    return str(known.get("vlm_model_name", "google/paligemma-3b-pt-224"))


def _config_class(kind: str) -> Any:
    files.extra("lerobot.policies")  # registers the types
    return files.extra("lerobot.configs").PreTrainedConfig.get_choice_class(kind)


def _check_fields(kind: str, settings: Mapping[str, Any], *, at: str) -> None:
    """Refuses settings that LeRobot's configuration class does not have; imports LeRobot if there are any."""
    known = {f.name for f in fields(_config_class(kind))} if settings else set[str]()
    for key in settings:
        if key not in known:
            raise ConfigError(f"{at}: LeRobot's {kind} has no option {key!r}.{nearest(key, known)}")


def _decode(
    kind: str, table: dict[str, Any], facts: DatasetFacts | None, vlm: Path | None, *, at: str
) -> Any:
    """Builds LeRobot's configuration from plain values, refusing what it does not know.

    Raises:
        ConfigError: an unknown field, a value out of range, or more than one observation step.
    """
    config_class = _config_class(kind)
    known = {f.name for f in fields(config_class)}
    table = {key: value for key, value in table.items() if key in known or key not in _FROM_FILE}
    _check_fields(kind, table, at=at)
    if facts is not None and "action_feature_names" in known:
        table["action_feature_names"] = list(facts.meta.action_names)
    if vlm is not None and "vlm_model_name" in known:
        table["vlm_model_name"] = str(vlm)
    try:
        with files.quiet():
            config = files.extra("draccus").decode(config_class, table)
            config.validate_features()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"{at}: LeRobot refuses the configuration: {error}") from error
    except Exception as error:  # draccus raises its own class, derived from Exception alone
        if type(error).__module__.split(".")[0] != "draccus":
            raise
        raise ConfigError(f"{at}: LeRobot refuses the configuration: {error}") from error
    if config.n_obs_steps != 1:
        raise ConfigError(
            f"{at}: n_obs_steps is {config.n_obs_steps}, allowed 1: policies here see the present "
            "observation only."
        )
    return config


def _model(config: Any, *, at: str) -> Any:
    factory = files.extra("lerobot.policies.factory")
    files.extra(type(config).__module__.replace("configuration_", "modeling_"))
    try:
        with files.quiet():
            return factory.get_policy_class(config.type)(config)
    except OSError as error:  # torchvision's download of a pretrained backbone
        raise CheckpointError(
            f"{at}: weights of the backbone cannot be fetched: {error}. Where there is no network, begin "
            f"with random ones: {files.option('config.pretrained_backbone_weights=null')}."
        ) from error
    except (ValueError, RuntimeError, AssertionError, ImportError) as error:
        raise ConfigError(f"{at}: LeRobot refuses the configuration: {error}") from error


def _open_pipelines(
    folder: Path,
    config: Any,
    tables: list[dict[str, Any]],
    rename: Mapping[str, str],
    stats: Mapping[str, Any] | None,
    vlm: Path | None,
    *,
    at: str,
) -> tuple[Any, Any]:
    """Loads both pipelines by LeRobot's own factory; every step's statistics must be there."""
    for table in tables:
        for step in table.get("steps", ()):
            state = step.get("state_file")
            if state is not None and not (folder / state).is_file():
                raise CheckpointError(
                    f"{at}: the statistics {state} are missing, and without them LeRobot would not "
                    "normalise at all. Copy the file, too."
                )
    normaliser = {
        "features": {**config.input_features, **config.output_features},
        "norm_map": config.normalization_mapping,
        **({} if stats is None else {"stats": stats}),
    }
    wanted = {
        "rename_observations_processor": {"rename_map": dict(rename)},
        "device_processor": {"device": "cpu"},
        "normalizer_processor": normaliser,
        "unnormalizer_processor": {**normaliser, "features": config.output_features},
        **({} if vlm is None else {"tokenizer_processor": {"tokenizer_name": str(vlm)}}),
    }
    overrides = [
        {name: wanted[name] for step in table["steps"] if (name := step.get("registry_name")) in wanted}
        for table in tables
    ]
    files.module_of(config, "processor")  # registers the steps of this policy type
    factory = files.extra("lerobot.policies.factory")
    try:
        with files.quiet():
            pre, post = factory.make_pre_post_processors(
                config,
                pretrained_path=str(folder),
                preprocessor_overrides=overrides[0],
                postprocessor_overrides=overrides[1],
            )
    except (ValueError, KeyError, ImportError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{at}: LeRobot refuses the pipelines: {error}") from error
    check_statistics(pre, {**config.input_features, **config.output_features}, config, at=at)
    check_statistics(post, config.output_features, config, at=at)
    return pre, post


def _vlm_of(
    kind: str,
    folder: Path,
    table: Mapping[str, Any],
    preprocessor: Mapping[str, Any],
    options: LeRobotOptions,
    *,
    at: str,
) -> Path | None:
    """Returns the folder of the tokenizer: as the options say, inside the checkpoint, or as it names."""
    if kind not in files.ASSETS:
        return None
    inside = folder / files.ASSETS[kind]
    named = [s["config"].get("tokenizer_name") for s in preprocessor["steps"] if "config" in s]
    name = options.vlm or (str(inside) if inside.is_dir() else "") or table.get("vlm_model_name")
    name = name or next((n for n in named if n), _default_vlm(kind))
    return files.assets_folder(kind, str(name), at=at)


@contextlib.contextmanager
def _tokenizer_of_pi(config: Any, vlm: Path | None) -> Generator[None]:
    """Gives LeRobot's pi0 pipelines a tokenizer folder instead of the hub name in their code."""
    if config.type not in ("pi0", "pi05") or vlm is None:
        yield
        return
    module = files.module_of(config, "processor")
    step = module.TokenizerProcessorStep
    with mock.patch.object(
        module, "TokenizerProcessorStep", lambda **values: step(**{**values, "tokenizer_name": str(vlm)})
    ):
        yield


def _assets(policy: Any, pre: Any, config: Any) -> files.Files:
    """Returns the files that tokenizer and VLM are built from, as their own classes write them."""
    asset = files.ASSETS.get(config.type)
    if asset is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="robot_rl-") as temporary, files.quiet():
        if config.type == "smolvla":
            vlm: Any = policy.model.vlm_with_expert
            vlm.config.save_pretrained(temporary)
            vlm.processor.save_pretrained(temporary)
        for step in pre.steps:
            if getattr(step, "input_tokenizer", None) is not None and config.type != "smolvla":
                step.input_tokenizer.save_pretrained(temporary)
        return files.pack(Path(temporary), asset)


def _json(table: Mapping[str, Any]) -> bytes:
    return json.dumps(table, indent=2).encode()
