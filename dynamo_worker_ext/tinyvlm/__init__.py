"""Tiny random vision-language models, made on the spot: what the demo and the engine tests run.

    python -m dynamo_worker_ext.tinyvlm --family qwen2_5_vl --out /tmp/model

A model made here has the layout, the special tokens, the chat template and the processors of its
real family, so engines, frontends and processors take the paths that they take for the real one;
only its weights are small and random. It says nothing sensible, but what it says depends on every
token and image of the prompt, and the same seed always makes the same bytes.

- `families.py`    what there is to make: one entry a family (`llama_families.py`: LLaVA, Phi-3)
- `chat.py`        the chat templates
- `vocabulary.py`  the tokenizers (`llama_vocabulary.py`: LLaVA's and Phi-3's)
- `weights.py`     the random weights
- `checkpoint.py`  puts them together in a directory, all or nothing

Importing this package imports neither torch nor transformers; making a model does.
"""

from dynamo_worker_ext.tinyvlm.checkpoint import make
from dynamo_worker_ext.tinyvlm.families import FAMILIES
from dynamo_worker_ext.tinyvlm.family import Family

__all__ = ["FAMILIES", "Family", "make"]
