"""LLaVA-1.5, LLaVA-NeXT and Phi-3-vision: a CLIP tower before a Llama."""

from __future__ import annotations

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
from dynamo_worker_ext.tinyvlm.llama_vocabulary import LLAVA, PHI3

_IMAGE = 112
_PATCH = 14


def _text(**more: Any) -> JsonObject:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": CONTEXT_TOKENS,
        "num_attention_heads": HIDDEN // HEAD,
        "num_hidden_layers": 2,
        "num_key_value_heads": HIDDEN // HEAD,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **more,
    }


def _llava(ids: TokenIds, **more: Any) -> JsonObject:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "ignore_index": -100,
        "image_token_index": ids["<image>"],
        "pad_token_id": ids["<pad>"],
        "projector_hidden_act": "gelu",
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **_text(vocab_size=LLAVA.size, pad_token_id=ids["<pad>"]),
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_act": "quick_gelu",
            "hidden_size": 64,
            "image_size": _IMAGE,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "patch_size": _PATCH,
            "projection_dim": 64,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        **more,
    }


_PINPOINTS = [[112, 224], [224, 112], [224, 224], [336, 112], [112, 336]]


def _llava_next(ids: TokenIds) -> JsonObject:
    return _llava(
        ids,
        architectures=["LlavaNextForConditionalGeneration"],
        model_type="llava_next",
        image_grid_pinpoints=_PINPOINTS,
    )


def _phi3_v(ids: TokenIds) -> JsonObject:
    code = {
        "AutoConfig": "configuration_phi3_v.Phi3VConfig",
        "AutoProcessor": "processing_phi3_v.Phi3VProcessor",
    }
    return {
        "architectures": ["Phi3VForCausalLM"],
        "auto_map": code,
        "model_type": "phi3_v",
        **_text(vocab_size=PHI3.size, pad_token_id=ids["<|endoftext|>"]),
        "embd_layer": {
            "embedding_cls": "image",
            "hd_transform_order": "sub_glb",
            "projection_cls": "mlp",
            "use_hd_transform": True,
            "with_learnable_separator": True,
        },
        "img_processor": {
            "image_dim_out": 1024,
            "model_name": "openai/clip-vit-large-patch14-336",
            "name": "clip_vision_model",
            "num_img_tokens": 144,
        },
        "sliding_window": None,
    }


_CLIP = {
    "crop_size": {"height": _IMAGE, "width": _IMAGE},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "size": {"shortest_edge": _IMAGE},
}
_PROCESSOR = {
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
    "patch_size": _PATCH,
    "vision_feature_select_strategy": "default",
}

#: transformers 5 saves CLIP without the level that the hub's files have, and vLLM 0.31 wants.
_WEIGHTS = weights.of_transformers(names=("vision_tower.", "vision_tower.vision_model."))

LLAMA_FAMILIES = (
    Family(
        name="llava",
        summary="LLaVA-1.5: text, images; 64 tokens an image whatever its size",
        config=_llava,
        chat_template=chat.VICUNA,
        write_weights=_WEIGHTS,
        image_processor={
            **_CLIP,
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
        },
        processor={**_PROCESSOR, "processor_class": "LlavaProcessor"},
        vocabulary=LLAVA,
    ),
    Family(
        name="llava_next",
        summary="LLaVA-NeXT: text, images; tiles of 112 pixels, tokens by shape",
        config=_llava_next,
        chat_template=chat.VICUNA,
        write_weights=_WEIGHTS,
        image_processor={
            **_CLIP,
            "do_pad": True,
            "image_grid_pinpoints": _PINPOINTS,
            "image_processor_type": "LlavaNextImageProcessor",
            "processor_class": "LlavaNextProcessor",
        },
        processor={**_PROCESSOR, "processor_class": "LlavaNextProcessor"},
        vocabulary=LLAVA,
    ),
    Family(
        name="phi3_v",
        summary="Phi-3-vision: text, images; no weights (vLLM: --load-format dummy "
        "--trust-remote-code), a full-size CLIP tower",
        config=_phi3_v,
        chat_template=chat.PHI3,
        write_weights=weights.none,
        image_processor={
            "auto_map": {"AutoProcessor": "processing_phi3_v.Phi3VProcessor"},
            "num_crops": 4,
            "processor_class": "Phi3VProcessor",
        },
        vocabulary=PHI3,
        remote_code=("phi3_v/configuration_phi3_v.py", "phi3_v/processing_phi3_v.py"),
    ),
)
"""What `families.FAMILIES` has of these."""
