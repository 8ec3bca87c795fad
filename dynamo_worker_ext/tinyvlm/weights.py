"""Random weights under which a tiny model's greedy answer depends on its whole prompt.

Each tensor is drawn from a generator of its own, seeded by (seed, tensor name): neither the order
of a model's parameters nor a parameter that a later transformers version adds changes the others.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WeightWriter = Callable[[Path, int, Sequence[int]], None]
"""Writes the weights for a directory's config.json: (directory, seed, ids never to be said)."""


DECODER_GAINS = {r"\b(q_proj|k_proj|q_norm)\b": 1.5, r"\b(o_proj|down_proj)\b": 2.0}
"""Sharper attention, and layers that outweigh the embedding of the last token.

Chosen by trying: 24 prompts (12 images, 2 questions) gave 24 different answers, with 11 to 15
different tokens among 16; with gains of 1 answers run in circles, with larger ones bfloat16 and
float32 disagree more often.
"""


def of_transformers(
    gains: Mapping[str, float] = DECODER_GAINS, names: tuple[str, str] | None = None
) -> WeightWriter:
    """Weights for a family whose model class is in transformers.

    Args:
        gains: pattern of parameter names -> factor on these parameters. The first pattern that
            is found in a name counts.
        names: a prefix of transformers 5's names, and what the hub's files have in its place.

    Returns:
        A function that builds the model named by `architectures` in `config.json` and saves it
        in bfloat16 as `model.safetensors`.
    """

    def write(directory: Path, seed: int, unspeakable: Sequence[int]) -> None:
        import torch
        import transformers

        config = transformers.AutoConfig.from_pretrained(directory)
        model = getattr(transformers, config.architectures[0])(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _draw(name, parameter, seed, _gain(gains, name))
            # A logit of 0 is never the largest of hundreds that scatter around 0.
            model.lm_head.weight[list(unspeakable)] = 0.0
        with _no_progress_bar():
            model.to(torch.bfloat16).save_pretrained(directory)
        if names is not None:
            _rename(directory / "model.safetensors", *names)
        (directory / "model.safetensors").chmod(0o644)  # saved readable by its owner only

    return write


def _rename(path: Path, prefix: str, hub_prefix: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {
        hub_prefix + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def none(directory: Path, seed: int, unspeakable: Sequence[int]) -> None:
    """No weights: the engine draws its own (vLLM's ``--load-format dummy``)."""


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _draw(name: str, parameter: Any, seed: int, gain: float) -> None:
    """Overwrite a parameter with noise that keeps the scale of what passes through it.

    Biases and norms keep the 0 and 1 that they start with, times `gain`.
    """
    import torch

    if parameter.dim() < 2 and name.endswith((".weight", ".bias")):
        parameter.mul_(gain)
        return
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    fan_in = 1 if "embed_tokens" in name else math.prod(parameter.shape[1:])
    parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain / math.sqrt(fan_in))


def _gain(gains: Mapping[str, float], name: str) -> float:
    return next((gain for pattern, gain in gains.items() if re.search(pattern, name)), 1.0)
