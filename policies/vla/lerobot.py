"""LeRobot's policies through their own classes and processors: ACT, Diffusion, SmolVLA, pi0, pi0.5.

A policy here is LeRobot's model between LeRobot's two pipelines: observations in the dataset's own
units pass the preprocessor (renaming, tokenizer, normalisation), chunks come back through the
postprocessor. What a checkpoint holds is LeRobot's folder, so either side loads the other's.
B rows, H chunk length, A action dim, S state dim.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Generator as Yields
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor, nn

from robot_rl.core.errors import CheckpointError, ConfigError, nearest
from robot_rl.core.language import INSTRUCTION, decode_text
from robot_rl.core.names import ENVIRONMENT
from robot_rl.core.policy import Chain, ChunkSample, DemoBatch, Encoded, Mode
from robot_rl.data.facts import DatasetFacts
from robot_rl.data.normalize import STD_FLOOR as STATE_STD_FLOOR
from robot_rl.policies.spec import Unrefined, check_chunk, check_demonstration, check_mode, read_config
from robot_rl.policies.vla import lerobot_files as files
from robot_rl.policies.vla.lerobot_build import (
    FlowOptions,
    LeRobotOptions,
    Parts,
    check,
    describe,
    new_parts,
    open_parts,
)
from robot_rl.policies.vla.lerobot_fit import IMAGES, STATE
from robot_rl.policies.vla.lora import LoraOptions, add_adapters, merged_state, save_adapters


class LeRobotPolicy(Unrefined, nn.Module):
    """A LeRobot policy as it is: chunks and imitation loss are LeRobot's own."""

    kind: ClassVar[str] = "lerobot"

    def __init__(
        self,
        parts: Parts,
        *,
        instruction: str = "",
        lora: LoraOptions | None = None,
        flow: FlowOptions | None = None,
    ) -> None:
        """Wraps model and pipelines; `create`, `from_pretrained` and `load` make them.

        Raises:
            ConfigError: LoRA options that fit no layer, or flow options without a flow of ours.
        """
        super().__init__()
        if flow is not None and self.kind == LeRobotPolicy.kind:
            raise ConfigError("policy.flow: LeRobot's own sampling has no options; use 'lerobot_flow'.")
        self.policy: Any = parts.policy
        self.instruction = instruction
        self.lora, self.flow = lora, flow
        self.config: Any = parts.config
        self.policy_type: str = parts.config.type
        self.horizon: int = getattr(self.config, "chunk_size", 0) or self.config.horizon
        self.action_dim: int = self.config.action_feature.shape[0]
        self.state_dim: int = self.config.robot_state_feature.shape[0]
        self.cameras = parts.cameras()
        apart = (ENVIRONMENT,) if self.config.env_state_feature else ()
        self.observed: tuple[str, ...] = ("state", *apart, *(f"{camera}.rgb" for camera in self.cameras))
        """Observations that it reads."""
        self.takes_noise: bool = self.policy_type != "act"
        self._parts = parts
        if lora is not None:
            add_adapters(self.policy, lora)
        self.register_state_dict_post_hook(_drop_tied)
        self.hook_tied()

    def hook_tied(self) -> None:
        """Lets tied tensors be loaded under one of their names."""
        self.register_load_state_dict_pre_hook(_fill_tied)

    @classmethod
    def create(
        cls, facts: DatasetFacts, options: Mapping[str, Any], *, generator: Generator | None = None
    ) -> Self:
        """Makes a policy for a dataset: new, or from `options['pretrained']`; see `LeRobotOptions`.

        Raises:
            ConfigError: an option that does not exist, fit its type, or fit the dataset.
            CheckpointError: a checkpoint that is incomplete, damaged, of other cameras, or needs a
                file that is neither here nor on the hub.
        """
        chosen = read_options(options)
        instruction = chosen.instruction or (facts.instructions or (facts.meta.instruction,))[0]
        with seeded(generator, torch.device("cpu")):
            parts = open_parts(chosen, facts) if chosen.pretrained else new_parts(chosen, facts)
            return cls(parts, instruction=instruction, lora=chosen.lora, flow=chosen.flow)

    @classmethod
    def check(cls, facts: DatasetFacts, options: Mapping[str, Any]) -> None:
        """Refuses options that do not fit a dataset, whose statistics may still be missing.

        Raises:
            ConfigError: see `create`.
            CheckpointError: see `create`.
        """
        check(read_options(options), facts)

    @classmethod
    def from_pretrained(
        cls, path_or_id: str | Path, facts: DatasetFacts | None = None, **options: Any
    ) -> Self:
        """Opens a checkpoint folder or hub id, LeRobot's or ours, with every one of its tensors.

        Args:
            path_or_id: the folder, or a repository of the hub.
            facts: the dataset to go on with; None keeps everything as the checkpoint has it.
            options: the further fields of `LeRobotOptions`.

        Raises:
            CheckpointError: see `create`.
        """
        chosen = read_options({**options, "pretrained": str(path_or_id)})
        parts = open_parts(chosen, facts)
        instruction = chosen.instruction or parts.instruction
        if facts is not None and not instruction:
            instruction = (facts.instructions or (facts.meta.instruction,))[0]
        return cls(parts, instruction=instruction, lora=chosen.lora, flow=chosen.flow).eval()

    load = from_pretrained

    def save(self, folder: Path | str) -> None:
        """Writes a folder that LeRobot loads: adapters merged, tokenizer and VLM files inside.

        LeRobot takes paths as they stand, so the ones written are absolute: after moving the folder,
        LeRobot needs `lerobot_build.relocate` (our own loading does not).

        Raises:
            CheckpointError: the disk refused; an older folder is untouched.
        """
        folder = Path(folder).resolve()
        content = describe(self._parts, root=folder, instruction=self.instruction)
        state = merged_state(self.policy)
        spare = {name for group in files.tied_names(state) for name in group[1:]}
        files.write_folder(folder, content, {n: tensor for n, tensor in state.items() if n not in spare})

    def save_adapters(self, folder: Path | str) -> None:
        """Writes adapters and trained heads alone, in peft's format.

        Raises:
            CheckpointError: there are none, or the disk refused.
        """
        save_adapters(self.policy, self.lora, Path(folder), base=self._parts.origin)

    def spec(self) -> dict[str, Any]:
        """Returns everything but the weights: the files of the LeRobot folder, options of the adapters."""
        content = describe(self._parts, root=None, instruction=self.instruction)
        return {
            "files": {name: _as_text(value) for name, value in content.items()},
            "lora": None if self.lora is None else asdict(self.lora),
            "flow": None if self.flow is None else asdict(self.flow),
            "instruction": self.instruction,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], *, at: str) -> Self:
        lora = None if spec["lora"] is None else read_config(LoraOptions, spec["lora"], at=f"{at}: lora")
        flow = None if spec["flow"] is None else read_config(FlowOptions, spec["flow"], at=f"{at}: flow")
        with tempfile.TemporaryDirectory(prefix="robot_rl-") as temporary:
            folder = Path(temporary)
            files.unpack({name: _as_bytes(value) for name, value in spec["files"].items()}, folder)
            parts = open_parts(LeRobotOptions(pretrained=str(folder)), None, weights=False, at=at)
        return cls(parts, instruction=spec["instruction"], lora=lora, flow=flow)

    def encode(self, obs: dict[str, Tensor]) -> Encoded:
        """Returns the encoding of ACT or Diffusion; for a VLA the model's inputs, without `features`.

        The `features` (B, F) condition the action head. ACT decodes no noise: its encoding holds its chunk.

        Raises:
            ValueError: the observation lacks a camera or the state.
        """
        with self.acting():
            batch = self.preprocess(obs)
            if self.policy_type == "diffusion":
                return Encoded({"features": self.policy.diffusion._prepare_global_conditioning(batch)})
            if self.policy_type != "act":
                return Encoded({name: value for name, value in batch.items() if isinstance(value, Tensor)})
            read: list[Tensor] = []
            act = self.policy.model
            with act.encoder.register_forward_hook(lambda _m, _i, out: read.append(out)):
                pictures = [batch[key] for key in self.config.image_features]
                chunk = act({**batch, **({"observation.images": pictures} if pictures else {})})[0]
            return Encoded({"features": read[0].mean(dim=0), "chunk": chunk})

    def sample(
        self,
        encoded: Encoded,
        *,
        z: Tensor | None = None,
        mode: Mode = "ode",
        record: bool = False,
        generator: Generator | None = None,
    ) -> ChunkSample:
        """Returns LeRobot's chunk (B, H, A) in the dataset's units.

        Raises:
            ValueError: `explore` or a record, which need a process of ours (`lerobot_flow`), or
                noise `z` for ACT, which has none.
        """
        check_mode(mode)
        if mode == "explore" or record:
            raise ValueError(
                f"sample: LeRobot's {self.policy_type} has no recorded chain. Use policy 'lerobot_flow' with "
                "smolvla, pi0 or pi05, or one of `flow`, `diffusion`, `small_vla`."
            )
        if z is not None and self.policy_type == "act":
            raise ValueError("sample: ACT decodes no noise; leave out z.")
        with torch.no_grad(), self.acting(), seeded(generator, self.device):
            rows = len(next(iter(encoded.values())))
            noise = self._noise(rows, z, mode)
            if self.policy_type == "act":
                chunk = encoded["chunk"]
            elif self.policy_type == "diffusion":
                sample = self.policy.diffusion.conditional_sample
                chunk = sample(rows, global_cond=encoded["features"], noise=noise)
            else:
                predict = self.policy.predict_action_chunk
                chunk = predict(dict(encoded)) if noise is None else predict(dict(encoded), noise=noise)
            return ChunkSample(self.postprocess(chunk))

    def log_prob(self, encoded: Encoded, chain: Chain) -> tuple[Tensor, Tensor]:
        """Refuses: LeRobot's own sampling has no density."""
        raise ValueError(
            f"log_prob: LeRobot's {self.policy_type} has no density here. Use policy 'lerobot_flow' with "
            "smolvla, pi0 or pi05."
        )

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        """Returns the loss of LeRobot's own forward pass; `generator` seeds its noise and dropout.

        Padded steps are marked `action_is_pad`; pi0 and pi0.5 learn them all the same, and Diffusion
        unless `do_mask_loss_for_padding`.
        """
        check_demonstration(batch, self.horizon, self.action_dim)
        inputs = self.preprocess(batch.obs, batch.actions, batch.valid)
        with seeded(generator, self.device):
            return self.policy(inputs)[0]

    @property
    def feature_dim(self) -> int:
        """F, the length of the encoded `features`."""
        if self.policy_type == "diffusion":
            return self.policy.diffusion.unet.mid_modules[0].cond_encoder[-1].in_features - (
                self.config.diffusion_step_embed_dim
            )
        if self.policy_type != "act":
            raise ValueError(f"features: use policy 'lerobot_flow' with {self.policy_type}.")
        return self.config.dim_model

    def state_scale(self) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation (S,) of the state in the data that it was trained on.

        Raises:
            CheckpointError: its preprocessor has none.
        """
        table = self._parts.step("normalizer_processor").stats.get(STATE, {})
        if not {"mean", "std"} <= set(table):
            raise CheckpointError(
                f"{self._parts.origin}: the preprocessor has no mean and std of {STATE}, by which the state "
                "is scaled for what learns next to the policy. Take a folder that `lerobot-train` wrote."
            )
        mean, std = (torch.as_tensor(table[name], dtype=torch.float32).flatten() for name in ("mean", "std"))
        return mean, std.clamp_min(STATE_STD_FLOOR)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def preprocess(
        self, obs: Mapping[str, Tensor], actions: Tensor | None = None, valid: Tensor | None = None
    ) -> dict[str, Any]:
        """Returns LeRobot's model inputs: renamed, tokenized, normalised.

        Raises:
            ValueError: the observation lacks a camera or the state.
        """
        missing = [key for key in self.observed if key not in obs]
        if missing:
            raise ValueError(
                f"{self.policy_type}: the observation lacks {', '.join(missing)}; it has {', '.join(obs)}. "
                "Use the cameras that the policy was trained on."
            )
        batch: dict[str, Any] = {STATE: obs["state"].float()}
        if ENVIRONMENT in self.observed:
            batch[f"observation.{ENVIRONMENT}"] = obs[ENVIRONMENT].float()
        for camera in self.cameras:
            picture = obs[f"{camera}.rgb"].permute(0, 3, 1, 2)
            batch[IMAGES + camera] = picture.to(torch.float32).div(255.0)
        if actions is not None and valid is not None:
            batch |= {"action": actions.float(), "action_is_pad": ~valid.bool()}
        batch["task"] = self._instructions(obs, len(obs["state"]))
        self._parts.move(self.device)
        inputs = {
            k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in self._parts.pre(batch).items()
        }
        if self.policy_type == "diffusion":  # its models have a dimension of time, here of length 1
            for key in self.config.input_features:
                inputs[key] = inputs[key].unsqueeze(1)
            pictures = [inputs[key] for key in self.config.image_features]
            if pictures:
                inputs["observation.images"] = torch.stack(pictures, dim=-4)
        return inputs

    def postprocess(self, chunk: Tensor) -> Tensor:
        """Returns a chunk (B, H, A) of the model in the dataset's units, float32 whatever it computes in."""
        return self._parts.post(chunk.float()).to(chunk.device)

    @contextmanager
    def acting(self) -> Yields[None]:
        """Switches dropout off, and back on if it was: the density scored must be the sampler's."""
        was_training = self.training
        if was_training:
            self.eval()
        try:
            yield
        finally:
            if was_training:
                self.train()

    def _instructions(self, obs: Mapping[str, Tensor], rows: int) -> list[str]:
        if INSTRUCTION not in obs:
            return [self.instruction] * rows
        return decode_text(obs[INSTRUCTION].cpu().numpy())

    def _noise(self, rows: int, z: Tensor | None, mode: Mode) -> Tensor | None:
        if self.policy_type == "act" or (z is None and mode != "mean"):
            return None
        dim = getattr(self.config, "max_action_dim", self.action_dim)
        noise = torch.zeros(rows, self.horizon, dim, device=self.device)
        if z is not None and mode != "mean":
            if z.shape[-1] != dim:
                check_chunk("sample", "z", z, (rows, self.horizon, self.action_dim))
            noise[..., : z.shape[-1]] = z
        return noise


def read_options(options: Mapping[str, Any]) -> LeRobotOptions:
    """Reads options from plain tables.

    Raises:
        ConfigError: an unknown key, or a value out of range.
    """
    values = dict(options)
    _check_names("", values, LeRobotOptions)
    try:
        for name, config in (("lora", LoraOptions), ("flow", FlowOptions)):
            if isinstance(values.get(name), Mapping):
                _check_names(f"{name}.", values[name], config)
                values[name] = read_config(config, values[name], at=f"policy.{name}")
        return read_config(LeRobotOptions, values, at="policy")
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _check_names(prefix: str, values: Mapping[str, Any], config_class: type[Any]) -> None:
    known = [prefix + f.name for f in fields(config_class)]
    for name in (prefix + key for key in values):
        if name not in known:
            own = "" if prefix else " LeRobot's own settings of the policy go into options.config.<name>."
            raise ConfigError(f"lerobot: no option {name!r}.{nearest(name, known)}{own}")


@contextmanager
def seeded(generator: Generator | None, device: torch.device) -> Yields[None]:
    """Seeds torch's global generator, which LeRobot draws from, by `generator`, and restores it afterwards.

    None leaves it alone.
    """
    if generator is None:
        yield
        return
    seed = torch.randint(2**62, (), generator=generator, device=generator.device).item()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield


def _drop_tied(module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    own = {name: tensor for name, tensor in state.items() if name.startswith(prefix)}
    for group in files.tied_names(own):
        for name in group[1:]:
            del state[name]


def _fill_tied(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    tensors = {**dict(module.named_parameters(remove_duplicate=False))}
    for group in files.tied_names(tensors):
        for name in group[1:]:
            if prefix + group[0] in state:
                state.setdefault(prefix + name, state[prefix + group[0]])


def _as_text(content: bytes) -> str | dict[str, str]:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def _as_bytes(text: str | Mapping[str, str]) -> bytes:
    return text.encode() if isinstance(text, str) else base64.b64decode(text["base64"])
