"""The configuration of a Phi-3-vision, which transformers has no class for."""

from typing import Any

from transformers import PretrainedConfig


class Phi3VConfig(PretrainedConfig):
    """`config.json` as it is."""

    model_type = "phi3_v"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
