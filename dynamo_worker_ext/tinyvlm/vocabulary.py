"""The tokenizers: BPEs of a few hundred pieces, trained here on a few sentences.

They differ from the real families' in size only: same pre-tokenizer, same normaliser, same special
tokens. Every text can be encoded (all 256 bytes are pieces) and comes back unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and what its `tokenizer_config.json` says.

    Attributes:
        train: makes the tokenizer of this many tokens with these special ones.
        size: tokens in all.
        special_tokens: they get the highest ids, in this order, unless `train` has its own.
        ends: tokens that end an answer, the chat's own first; the last one pads.
        config: more of `tokenizer_config.json`.
        has_files: whether `vocab.json` and `merges.txt` are written as well.
    """

    train: Callable[[int, Sequence[str]], Tokenizer]
    size: int
    special_tokens: tuple[str, ...]
    tokenizer_class: str
    bos: str
    ends: tuple[str, ...]
    config: dict[str, Any]
    has_files: bool = False


QWEN_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CORPUS = (
    "You are a helpful assistant. The user shows an image and asks a question about it.",
    "Describe the image in detail, please. What is in this picture, and where is it?",
    "How many objects are there? Which one is larger, and which colour does it have?",
    "There are two pictures: the first shows a red square, the second a blue circle.",
    "The video begins with a green field under a clear sky; a small dog runs after a ball.",
    "Compare both images and explain what has changed between the first and the last frame.",
    "Read the text on the sign and repeat it word for word, then answer yes or no.",
    "A worker takes the request, looks up the cache, and streams the answer token by token.",
    "Between morning and evening the light over the harbour turns from silver to orange.",
    "Numbers such as 0 1 2 3 4 5 6 7 8 9 10 42 100 2048 stand for themselves.",
    "hello world, this is a tiny tokenizer: it only has to cut text into pieces",
)


def train_qwen(size: int, special_tokens: Sequence[str]) -> Tokenizer:
    """A byte-level BPE; the same arguments always give the same one.

    Args:
        size: how many tokens it has in the end, the special ones included.
        special_tokens: they get the highest ids, in this order.

    Raises:
        ValueError: if the sentences here do not hold that many different pieces.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    )
    if tokenizer.get_vocab_size() != size:
        raise ValueError(
            f"the corpus of {__name__} gives {tokenizer.get_vocab_size()} tokens, not {size}: "
            "ask for fewer, or add sentences"
        )
    return tokenizer


def unspeakable(tokenizer: Tokenizer) -> list[int]:
    """The ids that a model should never say: special tokens and pieces of a character.

    Without them greedy text is always printable, and runs until its length limit.
    """
    specials = set(tokenizer.get_added_tokens_decoder())
    return [
        token_id
        for token_id in range(tokenizer.get_vocab_size())
        if token_id in specials
        or not tokenizer.decode([token_id]).isprintable()
        or "\ufffd" in tokenizer.decode([token_id])
    ]


def save(tokenizer: Tokenizer, directory: Path, vocabulary: Vocabulary, template: str) -> None:
    """Write the tokenizer's and the template's files into `directory`, in the hub's layout."""
    tokenizer.save(str(directory / "tokenizer.json"))
    if vocabulary.has_files:
        bpe = json.loads(tokenizer.to_str())["model"]
        _write(directory / "vocab.json", json.dumps(bpe["vocab"], ensure_ascii=False))
        _write(directory / "merges.txt", "".join(f"{a} {b}\n" for a, b in bpe["merges"]))
    _write(directory / "chat_template.jinja", template)

    added = tokenizer.get_added_tokens_decoder()
    config = {
        "added_tokens_decoder": {
            str(token_id): {
                "content": token.content,
                "lstrip": token.lstrip,
                "normalized": token.normalized,
                "rstrip": token.rstrip,
                "single_word": token.single_word,
                "special": token.special,
            }
            for token_id, token in sorted(added.items())
        },
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": vocabulary.ends[0],
        "model_max_length": 32768,
        "pad_token": vocabulary.ends[-1],
        "tokenizer_class": vocabulary.tokenizer_class,
        **vocabulary.config,
    }
    _write(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


QWEN = Vocabulary(
    train=train_qwen,
    size=512,
    special_tokens=QWEN_SPECIAL_TOKENS,
    tokenizer_class="Qwen2Tokenizer",
    bos="<|endoftext|>",
    ends=("<|im_end|>", "<|endoftext|>"),
    config={
        "add_prefix_space": False,
        "additional_special_tokens": list(QWEN_SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "errors": "replace",
        "split_special_tokens": False,
        "unk_token": None,
    },
    has_files=True,
)
