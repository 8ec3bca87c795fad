"""LLaVA's form: what SGLang's processor makes of an image, given again in the image's place.

Of LLaVA in the form of its authors' checkpoints (SGLang 0.5.21 loads what transformers writes with
another vision tower than CLIP only). Dynamo's frontends process no media for it, so that all comes
raw, and only what comes again has this form. Unlike other families' it stands for one image, and
SGLang's scheduler expands the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from dynamo_worker_ext.wire import Modality

#: Those that SGLang (0.5.21) has one image processor for.
ARCHITECTURES: Final = frozenset(
    {"LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaQwenForCausalLM"}
)

#: Of several, SGLang's engine (0.5.21) looks at the first alone.
MAX_IMAGES: Final = 1

_ONE_TILE: Final = (None, "pad", "square")


@dataclass(frozen=True, slots=True, eq=False)
class LlavaImage:
    """One processed image.

    Attributes:
        data: SGLang's arguments for it: ``feature``, float16 [tiles, channels, height, width];
            ``image_sizes``, one (width, height); ``image_aspect_ratio``, how it was cut into tiles.
        tokens: what stands for it in the prompt that SGLang is given: one token.
    """

    modality: ClassVar[Modality] = "image"
    encoded: ClassVar = False  # never by an encode worker

    data: Mapping[str, Any]
    tokens: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Memory that it takes, nearly."""
        return int(self.data["feature"].nbytes) + 256

    def argument(self) -> dict[str, Any]:
        """What ``Engine.async_generate`` takes among its ``image_data``."""
        return dict(self.data)


@dataclass(frozen=True, slots=True)
class LlavaForm:
    """How one model's prompts and images look.

    Attributes:
        token: what stands for an image in a prompt.
        expanded: how many of it SGLang's scheduler makes of one; 1 where that depends on the image,
            because it is cut into tiles.
    """

    token: int
    expanded: int

    @classmethod
    def of(cls, config: Any) -> LlavaForm | None:
        """Of a model's config; None for a model of another form."""
        token = getattr(config, "image_token_index", None)
        known = (config.architectures or [""])[0] in ARCHITECTURES
        if not known or not isinstance(token, int):
            return None
        vision, count = getattr(config, "vision_config", None), 1
        if vision is not None and getattr(config, "image_aspect_ratio", None) in _ONE_TILE:
            count = (vision.image_size // vision.patch_size) ** 2
        return cls(token, count)

    def expand(self, tokens: Sequence[int]) -> list[int]:
        """A prompt as SGLang's scheduler expands it."""
        return [one for t in tokens for one in [t] * (self.expanded if t == self.token else 1)]

    def image(self, item: Any) -> LlavaImage | None:
        """What the engine's own item is; None if it is no image of this form."""
        more = item.model_specific_data
        if not isinstance(item.feature, np.ndarray) or "image_sizes" not in more:
            return None
        data = {
            "feature": item.feature,
            "image_sizes": list(more["image_sizes"]),
            "image_aspect_ratio": more.get("image_aspect_ratio"),
        }
        return LlavaImage(data, (self.token,))
