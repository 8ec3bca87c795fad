"""Tokenizers as LLaVA and Phi-3-vision have them: SentencePiece's BPE, with bytes to fall back to.

A space is written as U+2581, one is put before each stretch of text between special tokens, and
the beginning of a prompt is marked by `<s>`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dynamo_worker_ext.tinyvlm.vocabulary import CORPUS, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNK, _BOS, _EOS = "<unk>", "<s>", "</s>"
_SPACE = "\u2581"

_CONFIG: dict[str, Any] = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": _BOS,
    "legacy": False,
    "unk_token": _UNK,
}

LLAVA = Vocabulary(
    train=lambda size, special_tokens: _train(size, size - 2, special_tokens),
    size=640,
    special_tokens=(_UNK, _BOS, _EOS, "<image>", "<pad>"),
    tokenizer_class="LlamaTokenizer",
    bos=_BOS,
    ends=(_EOS, "<pad>"),
    config=_CONFIG,
)
"""LLaVA's: `<image>` and `<pad>` stand behind the text's pieces."""

_PHI3_NAMED = {
    32000: "<|endoftext|>",
    32001: "<|assistant|>",
    32006: "<|system|>",
    32007: "<|end|>",
    32010: "<|user|>",
    32044: "<|image|>",
}

PHI3 = Vocabulary(
    train=lambda size, special_tokens: _train(size, 32000, special_tokens),
    size=32045,
    special_tokens=(
        _UNK,
        _BOS,
        _EOS,
        *(_PHI3_NAMED.get(i, f"<|placeholder{i}|>") for i in range(32000, 32045)),
    ),
    tokenizer_class="LlamaTokenizer",
    bos=_BOS,
    ends=("<|end|>", "<|endoftext|>"),
    config=_CONFIG,
)
"""Phi-3-vision's, whose ids are the real ones: vLLM 0.31 has that of `<|image|>` in its code."""


def _train(size: int, first_special: int, special_tokens: Sequence[str]) -> Tokenizer:
    """The tokenizer; names that nothing is ever cut into fill what the sentences leave free.

    Args:
        size: how many tokens it has in the end.
        first_special: the id from which on the special tokens stand, but the first three.
        special_tokens: the first three have the ids 0 to 2.
    """
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")
    learner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, show_progress=False))
    learned = _bpe(learner)
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    names = [*special_tokens[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    if len(names) > first_special:
        raise ValueError(f"{len(names)} pieces do not fit below {first_special}")
    names += [f"{_SPACE}unused{i}" for i in range(len(names), first_special)]
    names += special_tokens[3:]
    if len(names) != size:
        raise ValueError(f"made {len(names)} tokens, not {size}")

    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[tuple(pair) for pair in learned["merges"]],
            unk_token=_UNK,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", pair=f"{_BOS} $A {_BOS} $B", special_tokens=[(_BOS, 1)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    )
    return tokenizer


def _bpe(tokenizer: Tokenizer) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model
