"""What vLLM and a client ask of Phi-3-vision's processor, in the least code.

Text becomes tokens as the real one's does: cut at `<|image_1|>`, every stretch encoded by itself,
with a `<s>` of its own, and image number i as so many times -i. Pictures are simply scaled to the
grid of 336-pixel tiles that is nearest in shape, where the real one pads them.
"""

import re
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, BatchFeature, ProcessorMixin

TILE = 336
MEAN = np.array((0.48145466, 0.4578275, 0.40821073), dtype=np.float32)
STD = np.array((0.26862954, 0.26130258, 0.27577711), dtype=np.float32)


class Phi3VProcessor(ProcessorMixin):
    """Text and pictures to tensors.

    Args:
        tokenizer: the model's.
        num_crops: most tiles that a picture is cut into, besides the whole of it.
    """

    attributes = ("tokenizer",)
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer: Any = None, num_crops: int = 4, **kwargs: Any) -> None:
        self.num_crops = num_crops
        self.img_tokens = [f"<|image_{i}|>" for i in range(1, 1_000)]
        super().__init__(tokenizer)

    @classmethod
    def from_pretrained(cls, folder: Any, **kwargs: Any) -> "Phi3VProcessor":
        """The processor of a model's folder."""
        code = {"trust_remote_code": kwargs.get("trust_remote_code", False)}
        return cls(AutoTokenizer.from_pretrained(folder, **code), kwargs.get("num_crops", 4))

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles for a picture of this size."""
        shapes = [
            (columns, rows)
            for columns in range(1, self.num_crops + 1)
            for rows in range(1, self.num_crops // columns + 1)
        ]
        return min(shapes, key=lambda s: (abs(np.log(s[0] / s[1] * height / width)), -s[0] * s[1]))

    def calc_num_image_tokens_from_image_size(self, width: int, height: int) -> int:
        """Tokens of a picture: 12 x 12 a tile, one at the end of each row, one between."""
        columns, rows = self.grid(width, height)
        return 12 * rows * (12 * columns + 1) + 1 + 12 * 13

    def __call__(
        self, text: Any = None, images: Any = None, return_tensors: Any = None, **kwargs: Any
    ) -> BatchFeature:
        """One prompt with its pictures.

        Returns:
            `input_ids` [1, tokens]; with pictures `pixel_values` [images, 1 + num_crops, 3, 336,
            336] and `image_sizes` [images, 2], height and width of what was cut into tiles.
        """
        (text,) = [text] if isinstance(text, str) else text
        images = [images] if isinstance(images, Image.Image) else list(images or ())
        data: dict[str, Any] = {}
        counts = []
        if images:
            pixels, sizes = zip(*(self._tiles(image) for image in images), strict=True)
            data = {"pixel_values": torch.stack(pixels), "image_sizes": torch.tensor(sizes)}
            counts = [self.calc_num_image_tokens_from_image_size(*image.size) for image in images]
        ids: list[int] = []
        cut = re.split(r"<\|image_(\d+)\|>", text)
        for stretch, number in zip(cut[::2], [*cut[1::2], None], strict=True):
            ids += self.tokenizer(stretch).input_ids
            if number is not None:
                ids += [-int(number)] * counts[int(number) - 1]
        return BatchFeature({"input_ids": torch.tensor([ids]), **data})

    def _tiles(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        columns, rows = self.grid(*image.size)
        whole = _pixels(image, TILE, TILE)
        scaled = _pixels(image, columns * TILE, rows * TILE)
        tiles = scaled.unfold(1, TILE, TILE).unfold(2, TILE, TILE)
        tiles = tiles.permute(1, 2, 0, 3, 4).reshape(-1, 3, TILE, TILE)
        empty = torch.zeros(self.num_crops - len(tiles), 3, TILE, TILE)
        return torch.cat([whole[None], tiles, empty]), (rows * TILE, columns * TILE)


def _pixels(image: Image.Image, width: int, height: int) -> torch.Tensor:
    scaled = np.asarray(image.convert("RGB").resize((width, height)), dtype=np.float32) / 255
    return torch.from_numpy((scaled - MEAN) / STD).permute(2, 0, 1)
