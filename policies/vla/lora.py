"""Low-rank adapters (Hu et al. 2021) by peft, on any linear layer of a LeRobot policy.

Only adapters and the heads learn. A checkpoint for LeRobot holds the merged weights:
W + scale B A, exactly what the adapted layer computes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from robot_rl.core.errors import CheckpointError, ConfigError, require_fields
from robot_rl.policies.vla.lerobot_files import extra, quiet, verify, write_checksums

_HEADS = r"model\.(state_proj|action_in_proj|action_out_proj|(action_)?time_mlp_(in|out))"
_ADAPTER = "default"
_TENSORS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
"""What peft puts before the names of a wrapped model."""


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Which layers get an adapter, and its size."""

    rank: int = 16
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = 0.0
    targets: str = r".*\.(lm_expert|gemma_expert)\..*\.(q|v)_proj"
    """Regular expression on whole module names; those of the action expert's attention by default.

    `.*\\.(q|v)_proj` takes in the VLM.
    """
    heads: str = _HEADS
    """Regular expression of the modules that learn in full; '' for none."""

    def __post_init__(self) -> None:
        require_fields(self, "lora.", "1 or more", "rank")
        require_fields(self, "lora.", "0 to below 1", "dropout")
        for name in ("targets", "heads"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                raise ValueError(f"lora.{name}: {getattr(self, name)!r} is no pattern: {error}") from error


def add_adapters(policy: nn.Module, options: LoraOptions) -> None:
    """Puts adapters into the matching linear layers, and freezes all but them and the heads.

    Raises:
        ConfigError: no linear layer matches.
    """
    linear = _linear_layers(policy)
    targets = [name for name in linear if re.fullmatch(options.targets, name)]
    if not targets:
        shown = ", ".join(sorted({re.sub(r"\.\d+\.", ".N.", name) for name in linear})[:12])
        raise ConfigError(
            f"policy.lora.targets: {options.targets!r} matches none of the {len(linear)} linear layers, "
            f"such as {shown}."
        )
    peft = extra("peft")
    settings = peft.LoraConfig(
        r=options.rank, lora_alpha=options.alpha, lora_dropout=options.dropout, target_modules=targets
    )
    with quiet():
        peft.inject_adapter_in_model(settings, policy, adapter_name=_ADAPTER)
    for name, parameter in policy.named_parameters():
        module = name.rpartition(".")[0]
        parameter.requires_grad_(".lora_" in name or re.fullmatch(options.heads, module) is not None)


def merged_state(policy: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a policy under LeRobot's names, with adapters added to their layers."""
    state = policy.state_dict()
    for name, module in policy.named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        layer: Any = module
        state[f"{name}.weight"] = layer.base_layer.weight.detach() + layer.get_delta_weight(_ADAPTER).detach()
        if layer.base_layer.bias is not None:
            state[f"{name}.bias"] = layer.base_layer.bias.detach()
    return {n: t for n, t in state.items() if ".lora_" not in n and ".base_layer." not in n}


def save_adapters(policy: nn.Module, options: LoraOptions | None, folder: Path, *, base: str) -> None:
    """Writes adapters and heads in peft's format: `PeftModel.from_pretrained(policy, folder)` reads it.

    Raises:
        CheckpointError: the policy has no adapters, or the disk refused.
    """
    if options is None:
        raise CheckpointError(f"{folder}: the policy has no adapters; create it with lora options.")
    heads = [name for name, _ in policy.named_modules() if re.fullmatch(options.heads, name)]
    targets = [name for name, module in policy.named_modules() if hasattr(module, "get_delta_weight")]
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": base or None,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "target_modules": targets,
        "modules_to_save": heads or None,
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_adapter_tensors(policy), folder / _TENSORS, metadata={"format": "pt"})
        (folder / _CONFIG).write_text(json.dumps(settings, indent=2))
        write_checksums(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot write the adapters: {error}.") from error


def load_adapters(policy: nn.Module, folder: Path) -> None:
    """Loads what `save_adapters` wrote into a policy with the same adapters; every tensor or none.

    Raises:
        CheckpointError: the file is missing or damaged, or made for other layers.
    """
    verify(folder, at=str(folder))
    try:
        saved = load_file(folder / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: {_TENSORS} cannot be read: {error}.") from error
    own = _adapter_tensors(policy)
    shapes, expected = ({n: tuple(t.shape) for n, t in table.items()} for table in (saved, own))
    if shapes != expected:
        wrong = sorted(set(shapes.items()) ^ set(expected.items()))[0]
        raise CheckpointError(
            f"{folder}: the adapters are of other layers or another rank: {wrong[0]} {wrong[1]} is not on "
            "both sides. Create the policy with the lora options they were trained with."
        )
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _adapter_tensors(policy: nn.Module) -> dict[str, Tensor]:
    return {
        _PREFIX + name.replace(f".{_ADAPTER}.", "."): parameter.detach()
        for name, parameter in policy.named_parameters()
        if parameter.requires_grad
    }


def _linear_layers(policy: nn.Module) -> list[str]:
    """Returns the linear layers whose forward pass is called: attention in one piece reads past it."""
    inside = {
        f"{name}.{part}"
        for name, module in policy.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        for part, _ in module.named_modules()
    }
    return [n for n, m in policy.named_modules() if isinstance(m, nn.Linear) and n not in inside]
