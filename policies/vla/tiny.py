"""What `robot-rl finetune size=tiny` makes: tiny VLAs with random weights; nothing is downloaded.

The tokenizer is trained on the spot and the VLM's files are written to a folder, which is then named
like any other: from there on, the code is the one that real weights take.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from robot_rl.core.errors import ConfigError, nearest
from robot_rl.policies.vla.lerobot_files import extra, quiet

_SENTENCES = ("pick up the bottle", "push the cube to the mark", "open the drawer", "put the peg in the hole")
_VOCABULARY = 320
_SPECIAL = ("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>")

CONFIGS: dict[str, dict[str, Any]] = {
    "act": {
        "chunk_size": 16,
        "pretrained_backbone_weights": None,
        "dim_model": 128,
        "n_heads": 4,
        "dim_feedforward": 256,
        "n_encoder_layers": 2,
        "n_vae_encoder_layers": 2,
        "latent_dim": 16,
    },
    "diffusion": {
        "horizon": 16,
        "pretrained_backbone_weights": None,
        "down_dims": [32, 64],
        "diffusion_step_embed_dim": 32,
        "spatial_softmax_num_keypoints": 8,
        "noise_scheduler_type": "DDIM",
        "num_inference_steps": 5,
    },
    "smolvla": {
        "chunk_size": 16,
        "num_steps": 4,
        "num_vlm_layers": 2,
        "resize_imgs_with_padding": [64, 64],
        "train_expert_only": False,
        "freeze_vision_encoder": False,
    },
    "pi0": {"chunk_size": 8, "num_inference_steps": 4, "image_resolution": [32, 32]},
    "pi05": {
        "chunk_size": 8,
        "num_inference_steps": 4,
        "image_resolution": [32, 32],
        "tokenizer_max_length": 64,
    },
}
"""Type -> fields of LeRobot's configuration."""


def options(policy_type: str, folder: Path | str) -> dict[str, Any]:
    """Returns options for `LeRobotPolicy.create` and `LeRobotFlowPolicy.create`, seconds to train.

    Args:
        policy_type: `act`, `diffusion`, `smolvla`, `pi0` or `pi05`; the last two only within
            `tiny_gemma`, because LeRobot writes their sizes into its code.
        folder: where the tokenizer and the VLM's files go, if the type has any; a folder that holds
            them already is taken as it is, and it is not needed once the policy exists.

    Raises:
        ConfigError: no such type.
    """
    if policy_type not in CONFIGS:
        raise ConfigError(f"policy.type: got {policy_type!r}.{nearest(policy_type, CONFIGS)}")
    chosen: dict[str, Any] = {"type": policy_type, "config": dict(CONFIGS[policy_type])}
    if policy_type in ("smolvla", "pi0", "pi05"):
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            write_vlm(folder)
        chosen["vlm"] = str(folder)
    return chosen


def write_vlm(folder: Path) -> None:
    """Writes tokenizer, processor and configuration of a SmolVLM of two layers, width 64."""
    transformers = extra("transformers")
    images = extra("transformers.models.smolvlm.image_processing_smolvlm").SmolVLMImageProcessor
    videos = extra("transformers.models.smolvlm.video_processing_smolvlm").SmolVLMVideoProcessor
    with quiet():
        tokenizer = _tokenizer(transformers)
        processor = transformers.SmolVLMProcessor(
            images(size={"longest_edge": 64}, max_image_size={"longest_edge": 64}),
            tokenizer,
            videos(),
            image_seq_len=4,
            chat_template="{{ messages }}",
        )
        config = transformers.SmolVLMConfig(
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            pad_token_id=tokenizer.pad_token_id,
            scale_factor=2,
            text_config={
                "model_type": "llama",
                "vocab_size": len(tokenizer),
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "pad_token_id": tokenizer.pad_token_id,
            },
            vision_config={
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 64,
                "patch_size": 16,
            },
        )
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        processor.save_pretrained(folder)


@contextmanager
def tiny_gemma() -> Generator[None]:
    """Patches LeRobot while it lasts, so that pi0 and pi0.5 are built small: width 32, two layers.

    LeRobot knows two Gemma sizes only, and one vocabulary of 257,152 words: nothing but a patch makes
    a pi0 that fits a test. Loading a tiny checkpoint needs it as well.
    """
    with ExitStack() as stack:
        for kind in ("pi0", "pi05"):
            module = extra(f"lerobot.policies.{kind}.modeling_{kind}")
            patches = {
                "get_gemma_config": partial(_gemma_size, module.GemmaConfig),
                "PaliGemmaForConditionalGenerationWithPiGemma": partial(
                    _small_paligemma, module.PaliGemmaForConditionalGenerationWithPiGemma
                ),
                "PiGemmaForCausalLM": partial(_small_gemma, module.PiGemmaForCausalLM),
            }
            for name, replacement in patches.items():
                stack.enter_context(mock.patch.object(module, name, replacement))
        yield


def _gemma_size(config_class: Any, _variant: str) -> Any:
    return config_class(width=32, depth=2, mlp_dim=64, num_heads=8, num_kv_heads=1, head_dim=16)


def _small_paligemma(model_class: Any, *, config: Any) -> Any:
    config.text_config.vocab_size = _VOCABULARY
    vision = config.vision_config
    vision.hidden_size, vision.intermediate_size, vision.projection_dim = 32, 64, 32
    vision.num_hidden_layers, vision.num_attention_heads, vision.patch_size = 2, 4, 16
    return model_class(config=config)


def _small_gemma(model_class: Any, *, config: Any) -> Any:
    config.vocab_size = _VOCABULARY
    return model_class(config=config)


def _tokenizer(transformers: Any) -> Any:
    """Trains a byte-level tokenizer: every text has tokens, common words few."""
    tokenizers = extra("tokenizers")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = bytes_(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<pad>", *_SPECIAL],
        initial_alphabet=bytes_.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token=_SPECIAL[0],
        eos_token=_SPECIAL[1],
        extra_special_tokens={
            "fake_image_token": _SPECIAL[2],
            "image_token": _SPECIAL[3],
            "global_image_token": _SPECIAL[4],
        },
    )
