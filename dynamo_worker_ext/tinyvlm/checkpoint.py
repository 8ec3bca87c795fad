"""Makes the directory of one model: complete, or not there at all."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from dynamo_worker_ext.tinyvlm import vocabulary
from dynamo_worker_ext.tinyvlm.family import Family

MARKER = "tinyvlm.json"
"""The file by which a directory made here is known; it holds the family and the seed."""


def make(family: Family, out: Path, *, seed: int = 0, force: bool = False) -> None:
    """Make a model of `family` in the directory `out`.

    The same family and seed give the same bytes under the same versions of transformers and
    tokenizers. The files are written beside `out` and moved there at the end; a model made
    earlier in `out` stays usable until then, and for good if this fails.

    Args:
        family: what to make.
        out: the directory; its parents are made as needed.
        seed: chooses the weights.
        force: replace `out` whatever is in it.

    Raises:
        FileExistsError: if `out` holds something that was not made here and `force` is not set,
            or is a file, or is a directory that must never be replaced.
        ImportError: if torch or transformers is not installed.
    """
    out = out.resolve()
    _refuse_foreign(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        made = room / "made"
        made.mkdir()
        _write_model(family, made, seed)
        if out.exists():
            out.rename(room / "replaced")
        made.rename(out)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _refuse_foreign(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise FileExistsError(f"{out} is a file; give a directory")
    if out == Path.home() or Path.cwd().is_relative_to(out):
        raise FileExistsError(f"{out} is not a directory to replace; give one inside it")
    ours = (out / MARKER).is_file() or not any(out.iterdir())
    if not (ours or force):
        raise FileExistsError(
            f"{out} is not empty and has no {MARKER}, so it was not made here; "
            "give another directory, or --force to replace it"
        )


def _write_model(family: Family, directory: Path, seed: int) -> None:
    _keep_offline()
    form = family.vocabulary
    tokenizer = form.train(form.size, form.special_tokens)
    ids = {token: tokenizer.token_to_id(token) for token in form.special_tokens}
    config = family.config(ids)
    _write_json(directory / "config.json", config)
    family.write_weights(directory, seed, vocabulary.unspeakable(tokenizer))
    # Saving weights rewrites config.json in the form of the transformers version at hand; the
    # hub's form is the one that every version and both engines read.
    _write_json(directory / "config.json", config)

    vocabulary.save(tokenizer, directory, form, family.chat_template)
    if family.image_processor is not None:
        _write_json(directory / "preprocessor_config.json", family.image_processor)
    if family.video_processor is not None:
        _write_json(directory / "video_preprocessor_config.json", family.video_processor)
    if family.processor is not None:
        _write_json(directory / "processor_config.json", family.processor)
    for name in family.remote_code:
        shutil.copyfile(Path(__file__).parent / name, directory / Path(name).name)
    _write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": ids[form.bos],
            "do_sample": False,
            "eos_token_id": [ids[token] for token in form.ends],
            "pad_token_id": ids[form.ends[-1]],
        },
    )
    _write_json(directory / MARKER, {"family": family.name, "seed": seed})


def _keep_offline() -> None:
    """Nothing here is on the hub; a library that asks anyway would only wait for a time-out.

    Effective where transformers has not been imported yet, as in the command.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
