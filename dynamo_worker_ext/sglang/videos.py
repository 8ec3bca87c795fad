"""Videos in SGLang's hands. Lives in the worker process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.multimodal_processor import get_mm_processor, import_processors
from sglang.srt.managers.schedule_batch import Modality as EngineModality
from sglang.srt.managers.tokenizer_manager import get_processor_wrapper
from sglang.srt.utils.video_decoder import VideoDecoderWrapper

from dynamo_worker_ext.errors import EngineError
from dynamo_worker_ext.sglang.features import Features, FieldNames
from dynamo_worker_ext.worker.encoder import Video


class Frames(np.ndarray, VideoDecoderWrapper):
    """Decoded frames in the place of SGLang's video decoder, which then need not decode.

    [frames, height, width, 3], uint8. SGLang 0.5.21 lets arrays through its loader and asks
    decoders for the frames that it wants: this is both.
    """

    _fps: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to open."""

    @classmethod
    def of(cls, frames: Any, metadata: Mapping[str, Any]) -> Frames:
        """Frames with the rate at which they follow each other."""
        array: Frames = np.ascontiguousarray(frames).view(cls)  # type: ignore[assignment]
        duration = float(metadata.get("duration") or 0.0)
        array._fps = len(array) / duration if duration > 0 else float(metadata.get("fps") or 1.0)
        return array

    def __array_finalize__(self, source: Any) -> None:
        self._fps = getattr(source, "_fps", 1.0)

    @property
    def avg_fps(self) -> float:
        return self._fps

    def get_frames_as_tensor(self, indices: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self)[list(indices)])

    def get_frames_at(self, indices: Sequence[int]) -> Any:
        return np.asarray(self)[list(indices)]

    def close(self) -> None:
        """Nothing to close."""


def as_video(video: Video) -> Frames | bytes:
    """A video as SGLang's processors take it: its file, or frames that are decoded already."""
    return video if isinstance(video, bytes) else Frames.of(*video)


class VideoProcessor:
    """What SGLang's aggregated workers process videos with, for an encode worker.

    `MMEncoder` has a way of its own, which differs (SGLang 0.5.21): it gives Qwen2.5-VL's frames
    other times, and does not make the tokens that go between Qwen3-VL's.

    Args:
        model_config: SGLang's, of the model.
        server_args: what the encoder was started with.
        names: what the family calls a video's tensors.
    """

    def __init__(self, model_config: Any, server_args: Any, names: FieldNames) -> None:
        import_processors("sglang.srt.multimodal.processors")
        self._processor = get_mm_processor(
            model_config.hf_config,
            server_args,
            get_processor_wrapper(),
            "default",
            model_config=model_config,
        )
        self._names = names

    async def process(self, video: Video) -> Features:
        """One video as the tower takes it; its tokens are what it becomes in the prompt.

        Raises:
            ValueError: the model's processor refuses it.
        """
        made = await self._processor.process_mm_data_async(
            image_data=[],
            audio_data=None,
            input_text=self._processor.mm_tokens.video_token,
            request_obj=SimpleNamespace(rid="video", video_data=[as_video(video)], audio_data=None),
        )
        items, names = made.mm_items, self._names
        if len(items) != 1 or items[0].modality != EngineModality.VIDEO:
            raise EngineError(f"SGLang's processor made {len(items)} items of one video")
        facts = items[0].model_specific_data
        return Features(
            "video",
            items[0].feature,
            torch.as_tensor(facts[names.grid], dtype=torch.int64).reshape(1, 3),
            tuple(made.input_ids),
            {name: float(torch.as_tensor(facts[name]).flatten()[0]) for name in names.scalars},
        )
