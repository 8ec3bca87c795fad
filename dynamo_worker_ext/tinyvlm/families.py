"""The families of models that can be made, one entry each.

A further family is one more entry: its special tokens, its chat template, its `config.json`, its
processors' configurations, and a way to write weights for that configuration (`weights.py` has
one for any model class of transformers).
"""

from collections.abc import Mapping
from typing import Any

from dynamo_worker_ext.tinyvlm import chat, weights
from dynamo_worker_ext.tinyvlm.family import (
    CONTEXT_TOKENS,
    HEAD,
    HIDDEN,
    Family,
    JsonObject,
    TokenIds,
)
from dynamo_worker_ext.tinyvlm.llama_families import LLAMA_FAMILIES
from dynamo_worker_ext.tinyvlm.vocabulary import QWEN


def _text(ids: TokenIds, **more: Any) -> JsonObject:
    """A language model of two layers, hidden size 64, in bfloat16."""
    return {
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": CONTEXT_TOKENS,
        "num_attention_heads": HIDDEN // HEAD,
        "num_hidden_layers": 2,
        "num_key_value_heads": HIDDEN // HEAD,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": QWEN.size,
        **more,
    }


def _vision_ids(ids: TokenIds) -> JsonObject:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
    }


_MROPE_SECTION = [4, 6, 6]  # time, height, width: together half of a head
_PATCHES_14 = {
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "temporal_patch_size": 2,
    # SGLang 0.5.21 reads in_chans, vLLM 0.31.0 and transformers in_channels.
    "in_chans": 3,
    "in_channels": 3,
}


def _qwen2(ids: TokenIds) -> JsonObject:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_text(ids)}


def _qwen2_vl(ids: TokenIds) -> JsonObject:
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        **_text(ids, rope_scaling={"type": "mrope", "mrope_section": _MROPE_SECTION}),
        **_vision_ids(ids),
        "vision_config": {
            **_PATCHES_14,
            "model_type": "qwen2_vl",
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": HIDDEN,
            "mlp_ratio": 2,
            "num_heads": 2,
        },
    }


def _qwen2_5_vl(ids: TokenIds) -> JsonObject:
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **_text(ids, rope_scaling={"type": "mrope", "mrope_section": _MROPE_SECTION}),
        **_vision_ids(ids),
        "vision_config": {
            **_PATCHES_14,
            "model_type": "qwen2_5_vl",
            "depth": 2,
            "fullatt_block_indexes": [1],
            "hidden_act": "silu",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "tokens_per_second": 2,
            "window_size": 112,
        },
    }


def _qwen3(
    ids: TokenIds, architecture: str, model_type: str, deepstack: list[int], **text: Any
) -> JsonObject:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **_vision_ids(ids),
        "text_config": {
            "model_type": f"{model_type}_text",
            **_text(ids, attention_bias=False, **text),
        },
        "vision_config": {
            "model_type": model_type,
            "deepstack_visual_indexes": deepstack,
            "depth": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 64,
            "in_channels": 3,
            "intermediate_size": 128,
            "num_heads": 2,
            "num_position_embeddings": 2304,
            "out_hidden_size": HIDDEN,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def _qwen3_vl(ids: TokenIds) -> JsonObject:
    return _qwen3(
        ids,
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        deepstack=[0, 1],
        head_dim=HEAD,
        rope_theta=5000000.0,
        rope_scaling={
            "mrope_interleaved": True,
            "mrope_section": _MROPE_SECTION,
            "rope_type": "default",
        },
    )


def _qwen3_5(ids: TokenIds) -> JsonObject:
    return _qwen3(
        ids,
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        deepstack=[],
        attn_output_gate=True,
        head_dim=2 * HEAD,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=2 * HEAD,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_value_head_dim=2 * HEAD,
        num_attention_heads=4,
        num_hidden_layers=4,
        num_key_value_heads=4,
        partial_rotary_factor=0.25,
        rope_parameters={
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000.0,
            "rope_type": "default",
        },
    )


_QWEN2_PIXELS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "max_pixels": 12845056,
    "merge_size": 2,
    "min_pixels": 3136,
    "patch_size": 14,
    "temporal_patch_size": 2,
}
_QWEN3_PIXELS = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "temporal_patch_size": 2,
}
_QWEN3_FRAMES = {"do_sample_frames": True, "fps": 2, "max_frames": 768, "min_frames": 4}
_VISION_CHAT = chat.chatml(
    image="<|vision_start|><|image_pad|><|vision_end|>",
    video="<|vision_start|><|video_pad|><|vision_end|>",
)


def _image(pixels: JsonObject, processor_class: str) -> JsonObject:
    return {
        **pixels,
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": processor_class,
    }


def _video(pixels: JsonObject, video_processor_type: str, processor_class: str) -> JsonObject:
    return {
        **pixels,
        "processor_class": processor_class,
        "video_processor_type": video_processor_type,
    }


_QWEN3_IMAGES = _image(
    {**_QWEN3_PIXELS, "size": {"longest_edge": 16777216, "shortest_edge": 65536}},
    "Qwen3VLProcessor",
)
_QWEN3_VIDEOS = _video(
    {
        **_QWEN3_PIXELS,
        **_QWEN3_FRAMES,
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    },
    "Qwen3VLVideoProcessor",
    "Qwen3VLProcessor",
)

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="qwen2_vl",
            summary="Qwen2-VL: text, images, videos; 14-pixel patches",
            config=_qwen2_vl,
            chat_template=_VISION_CHAT,
            write_weights=weights.of_transformers(),
            image_processor=_image(_QWEN2_PIXELS, "Qwen2VLProcessor"),
            video_processor=_video(_QWEN2_PIXELS, "Qwen2VLVideoProcessor", "Qwen2VLProcessor"),
        ),
        Family(
            name="qwen2_5_vl",
            summary="Qwen2.5-VL: text, images, videos; 14-pixel patches, window attention",
            config=_qwen2_5_vl,
            chat_template=_VISION_CHAT,
            write_weights=weights.of_transformers(),
            image_processor=_image(_QWEN2_PIXELS, "Qwen2_5_VLProcessor"),
            video_processor=_video(_QWEN2_PIXELS, "Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor"),
        ),
        Family(
            name="qwen3_vl",
            summary="Qwen3-VL: text, images, videos; 16-pixel patches, deepstack",
            config=_qwen3_vl,
            chat_template=_VISION_CHAT,
            write_weights=weights.of_transformers(),
            image_processor=_QWEN3_IMAGES,
            video_processor=_QWEN3_VIDEOS,
        ),
        Family(
            name="qwen3_5",
            summary="Qwen3.5: text, images, videos; three of four layers carry a state",
            config=_qwen3_5,
            chat_template=_VISION_CHAT,
            # Three layers of a fading state come before the one that looks back at the picture.
            write_weights=weights.of_transformers(
                {r"self_attn\.o_proj": 6.0, **weights.DECODER_GAINS}
            ),
            image_processor=_QWEN3_IMAGES,
            video_processor=_QWEN3_VIDEOS,
        ),
        Family(
            name="qwen2",
            summary="Qwen2: text only, for serving without media",
            config=_qwen2,
            chat_template=chat.chatml(),
            write_weights=weights.of_transformers(),
        ),
        *LLAMA_FAMILIES,
    )
}
"""By the name that `--family` takes."""
