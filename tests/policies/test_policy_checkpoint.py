"""Policy checkpoints: parity, strictness, and what a full disk or a kill leaves behind."""

import json
import resource
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from robot_rl.core import files
from robot_rl.core.errors import CheckpointError
from robot_rl.data.normalize import Normaliser
from robot_rl.policies import checkpoint
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig, DiffusionPolicy, FlowPolicy
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.policies.networks import initialise
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy
from robot_rl.policies.vla.config import SmallVLAConfig
from robot_rl.policies.vla.small import SmallVLA

META = PolicyMeta(
    task="pick_cube",
    robot="panda",
    control_hz=20.0,
    state_names=("q1", "q2", "cube_x"),
    action_names=("x", "y"),
    instruction="pick the cube up",
    n_exec=2,
)


def normaliser() -> Normaliser:
    rng = np.random.default_rng(0)
    state = rng.normal(3.0, 2.0, (50, 3)).astype(np.float32)
    return Normaliser.fit({"state": state}, rng.uniform(-0.5, 0.9, (50, 2)).astype(np.float32))


def flow(**options: Any) -> FlowPolicy:
    config = ChunkPolicyConfig(horizon=3, width=16, depth=2, time_dim=8, **options)
    return FlowPolicy(config, state_dim=3, action_dim=2, normaliser=normaliser())


def diffusion() -> DiffusionPolicy:
    config = ChunkPolicyConfig(
        kind="diffusion",
        process="ddim",
        horizon=3,
        width=16,
        time_dim=8,
        layernorm=True,
        residual=True,
    )
    return DiffusionPolicy(config, state_dim=3, action_dim=2, normaliser=normaliser())


def gaussian() -> GaussianPolicy:
    config = GaussianPolicyConfig(width=16, horizon=2)
    return GaussianPolicy(config, state_dim=3, action_dim=2, normaliser=normaliser())


def residual(base: torch.nn.Module) -> ResidualPolicy:
    policy = ResidualPolicy(base, ResidualHeadConfig(width=16, explore_std=0.02), 0.2)
    initialise(policy.head, torch.Generator().manual_seed(4))
    return policy


def small_vla() -> SmallVLA:
    config = SmallVLAConfig(
        horizon=3, width=16, depth=1, heads=2, context_depth=1, cameras=("front",), picture=(16, 16)
    )
    return SmallVLA(config, state_dim=3, action_dim=2, relative_to=(0, -1))


MAKERS = {
    "flow": flow,
    "camera": lambda: flow(cameras=("front",), image_features=8),
    "diffusion": diffusion,
    "gaussian": gaussian,
    "small_vla": small_vla,
    "residual": lambda: residual(flow()),
    "residual on diffusion": lambda: residual(diffusion()),
    "residual on small_vla": lambda: residual(small_vla()),
}


@pytest.mark.parametrize("name", MAKERS)
def test_actions_are_identical_after_loading(name: str, tmp_path: Path) -> None:
    policy = MAKERS[name]().eval()
    save_policy(tmp_path / "policy", policy, meta=META)
    loaded, meta = load_policy(tmp_path / "policy", expect=META)
    assert meta == META
    assert type(loaded) is type(policy)
    generator = torch.Generator().manual_seed(0)
    obs = {
        "state": torch.randn(7, 3, generator=generator),
        "front.rgb": torch.randint(0, 255, (7, 16, 16, 3), dtype=torch.uint8, generator=generator),
    }
    z = torch.randn(7, policy.horizon, 2, generator=generator)
    with torch.no_grad():
        before, after = (
            policy.sample(policy.encode(obs), z=z).actions,
            loaded.sample(loaded.encode(obs), z=z).actions,
        )
        assert torch.equal(before, after)
        draws = [
            p.refine(p.encode(obs), before[:, 0], mode="explore", generator=torch.Generator().manual_seed(1))
            for p in (policy, loaded)
        ]
        assert torch.equal(*draws)


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    save_policy(tmp_path / "policy", flow(), meta=META)
    save_policy(tmp_path / "policy", gaussian(), meta=META)
    assert isinstance(load_policy(tmp_path / "policy")[0], GaussianPolicy)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    files = sorted(path.name for path in (tmp_path / "policy").iterdir())
    assert files == ["policy.json", "policy.safetensors"]


def test_head_says_what_it_is(tmp_path: Path) -> None:
    save_policy(tmp_path / "policy", residual(flow()), meta=META)
    head = json.loads((tmp_path / "policy/policy.json").read_text())
    assert head["policy"]["kind"] == "residual"
    assert head["policy"]["base"]["kind"] == "flow"
    assert head["policy"]["base"]["config"]["steps"] == 4
    assert head["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task": "reach"}, "trained with task = 'pick_cube', here it is 'reach'"),
        ({"robot": "so_arm"}, "trained with robot = 'panda', here it is 'so_arm'"),
        ({"control_hz": 10.0}, "trained with control_hz = 20.0, here it is 10.0"),
        (
            {"state_names": ("q1", "q2")},
            r"state_names = \(3\) q1, q2, cube_x, here it is \(2\) q1, q2",
        ),
        ({"action_names": ("x", "z")}, r"action_names = \(2\) x, y, here it is \(2\) x, z"),
    ],
)
def test_another_task_or_robot_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_policy(tmp_path / "policy", gaussian(), meta=META)
    with pytest.raises(CheckpointError, match=message):
        load_policy(tmp_path / "policy", expect=replace(META, **changed))
    load_policy(tmp_path / "policy", expect=replace(META, n_exec=1, instruction="other words"))


def rewrite(folder: Path, change: Any) -> None:
    """Changes the tensors and mends the checksum, as a buggy exporter would."""
    tensors = load_file(folder / "policy.safetensors")
    change(tensors)
    save_file(tensors, folder / "policy.safetensors")
    head = json.loads((folder / "policy.json").read_text())
    del head["checksum"]
    head["crc32"] = zlib.crc32((folder / "policy.safetensors").read_bytes())
    (folder / "policy.json").write_text(json.dumps(head))


def test_nothing_is_left_untrained(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    save_policy(folder, residual(flow()), meta=META)
    rewrite(folder, lambda t: t.pop("base.encoder.normaliser.mean_state"))
    with pytest.raises(CheckpointError, match=r"base.encoder.normaliser.mean_state is missing"):
        load_policy(folder)
    save_policy(folder, residual(flow()), meta=META)
    rewrite(folder, lambda t: t.update(extra=torch.zeros(1)))
    with pytest.raises(CheckpointError, match=r"extra is unexpected"):
        load_policy(folder)
    save_policy(folder, gaussian(), meta=META)
    rewrite(folder, lambda t: t.update(log_std=torch.zeros(5)))
    with pytest.raises(CheckpointError, match=r"log_std is torch.float32 \(5,\), not torch.float32 \(2,\)"):
        load_policy(folder)
    save_policy(folder, flow(), meta=META)
    rewrite(folder, lambda t: t.clear())
    with pytest.raises(CheckpointError, match=r"is missing; .* and \d+ more"):
        load_policy(folder)


def with_earlier_names(tensors: dict[str, Any]) -> None:
    """Gives the tensors of a small VLA the names that they had before 2026-11-25."""
    for name in list(tensors):
        old = name.replace("image_encoders.", "eyes.").replace("text_encoder.", "ears.")
        tensors[old] = tensors.pop(name)


@pytest.mark.parametrize(("name", "prefix"), [("small_vla", ""), ("residual on small_vla", "base.")])
def test_tensors_of_earlier_names_are_loaded(name: str, prefix: str, tmp_path: Path) -> None:
    folder, policy = tmp_path / "policy", MAKERS[name]()
    save_policy(folder, policy, meta=META)
    rewrite(folder, with_earlier_names)
    saved = load_file(folder / "policy.safetensors")
    assert f"{prefix}eyes.front.position" in saved
    assert f"{prefix}ears.queries" in saved
    loaded: Any = load_policy(folder)[0]
    own = policy.state_dict()
    assert saved.keys() != own.keys()
    assert loaded.state_dict().keys() == own.keys()
    assert all(torch.equal(tensor, own[key]) for key, tensor in loaded.state_dict().items())
    twin: Any = MAKERS[name]()
    twin.load_state_dict(saved)  # as a resumed run does
    assert all(torch.equal(tensor, own[key]) for key, tensor in twin.state_dict().items())
    assert f"{prefix}eyes.front.position" in saved


def test_tensors_of_earlier_names_are_loaded_strictly(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    save_policy(folder, small_vla(), meta=META)
    rewrite(folder, lambda t: (with_earlier_names(t), t.pop("ears.queries")))
    with pytest.raises(CheckpointError, match=r"describes: text_encoder.queries is missing\.$"):
        load_policy(folder)
    with pytest.raises(RuntimeError, match=r"Missing key.* \"text_encoder.queries\""):
        small_vla().load_state_dict(load_file(folder / "policy.safetensors"))
    save_policy(folder, small_vla(), meta=META)
    rewrite(folder, lambda t: t.update({"ears.queries": t["text_encoder.queries"].clone()}))
    with pytest.raises(CheckpointError, match=r"describes: ears.queries is unexpected\.$"):
        load_policy(folder)
    with pytest.raises(RuntimeError, match=r"Unexpected key.* \"ears.queries\""):
        small_vla().load_state_dict(load_file(folder / "policy.safetensors"))


def edit(folder: Path, change: Any) -> None:
    head = json.loads((folder / "policy.json").read_text())
    change(head)
    del head["checksum"]  # as who changes it on purpose is told to
    (folder / "policy.json").write_text(json.dumps(head))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(format=9), "policy format 9, this version reads 1"),
        (lambda h: h["policy"].update(kind="flw"), "no policy named 'flw'. Did you mean 'flow'"),
        (lambda h: h.pop("policy"), "names no policy kind"),
        (lambda h: h["policy"].pop("config"), "policy 'flow' lacks 'config'"),
        (lambda h: h["policy"].update(config=3), "ChunkPolicyConfig is no table of keys: 3"),
        (lambda h: h["policy"]["config"].update(wdth=3), "has no 'wdth'. Did you mean 'width'"),
        (lambda h: h["policy"]["config"].update(width=0), "width: got 0, allowed: 1 or more"),
        (
            lambda h: h["policy"].update(state_dim="3"),
            "state_dim must be a positive integer, got '3'",
        ),
        (
            lambda h: h["policy"]["config"].update(kind="diffusion"),
            "needs kind 'flow', got 'diffusion'",
        ),
        (lambda h: h["meta"].pop("robot"), "meta: PolicyMeta lacks 'robot'"),
        (lambda h: h["meta"].update(control_hz=0), "control_hz: got 0, allowed: above 0"),
        (lambda h: h["meta"].update(n_exec=0), "n_exec: got 0, allowed: 1 or more"),
        (
            lambda h: h["policy"].update(state_dim=4),
            r"mean_state is .*\(3,\), not torch.float32 \(4,\)",
        ),
    ],
)
def test_a_damaged_head_is_named(change: Any, message: str, tmp_path: Path) -> None:
    save_policy(tmp_path / "policy", flow(), meta=META)
    edit(tmp_path / "policy", change)
    with pytest.raises(CheckpointError, match=message):
        load_policy(tmp_path / "policy")


def test_damaged_or_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"policy.json: there is no such file. A policy is policy.json and"
    ):
        load_policy(tmp_path / "nowhere")
    folder = tmp_path / "policy"
    save_policy(folder, flow(), meta=META)
    weights = (folder / "policy.safetensors").read_bytes()
    (folder / "policy.safetensors").write_bytes(weights[:-1])
    with pytest.raises(CheckpointError, match=r"policy.safetensors was cut short or altered"):
        load_policy(folder)
    (folder / "policy.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"policy.json: damaged: Expecting property name .* copy both again"
    ):
        load_policy(folder)
    (folder / "policy.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"policy.json: damaged: not an object but list"):
        load_policy(folder)


def test_a_flipped_bit_of_the_head_is_refused(tmp_path: Path) -> None:
    """256 bins once became 216, and the policy was loaded."""
    folder = tmp_path / "policy"
    save_policy(folder, flow(), meta=META)
    content = (folder / "policy.json").read_text()
    assert content.count('"width": 16') == 1
    (folder / "policy.json").write_text(content.replace('"width": 16', '"width": 12'))
    with pytest.raises(CheckpointError, match=r"policy.json: damaged: it does not match its 'checksum'"):
        load_policy(folder)
    (folder / "policy.json").write_bytes(content.encode().replace(b'"width"', b'"wid\xf4h"'))
    with pytest.raises(CheckpointError, match=r"policy.json: damaged: 'utf-8' codec can't decode"):
        load_policy(folder)


@contextmanager
def no_file_above(size: int) -> Generator[None, None, None]:
    """Makes the system refuse larger files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_policy_whole(tmp_path: Path) -> None:
    folder, old = tmp_path / "policy", flow()
    with no_file_above(1000), pytest.raises(CheckpointError, match=r"There is no older checkpoint"):
        save_policy(folder, old, meta=META)
    save_policy(folder, old, meta=META)
    with (
        no_file_above(1000),
        pytest.raises(CheckpointError, match=r"File too large\)\. The older checkpoint is whole"),
    ):
        save_policy(folder, flow(), meta=META)
    loaded, _ = load_policy(folder)
    assert torch.equal(loaded.net.chunk_in.weight, old.net.chunk_in.weight)  # pyright: ignore
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_kill_between_the_renames_is_mended(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    save_policy(folder, gaussian(), meta=META)
    folder.rename(tmp_path / ".previous-policy")
    assert isinstance(load_policy(folder)[0], GaussianPolicy)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_failed_rename_puts_the_old_policy_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "policy"
    save_policy(folder, gaussian(), meta=META)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing-"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(files, "_RENAME_EXCHANGE", 1 << 30)  # as where there is no exchange
    monkeypatch.setattr(checkpoint.Path, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"No space left on device\)\. The older checkpoint is whole"):
        save_policy(folder, flow(), meta=META)
    monkeypatch.undo()
    assert isinstance(load_policy(folder)[0], GaussianPolicy)
