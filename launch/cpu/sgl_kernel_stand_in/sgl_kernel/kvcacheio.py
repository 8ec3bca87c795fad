"""The names that SGLang up to 0.5.12.post1 imports from `sgl_kernel.kvcacheio` on every platform,
for a KV cache in two tiers; see the package's docstring. Later versions ask for GPUs first.
"""

from sgl_kernel import _stand_in


def __getattr__(name):
    if not name.startswith("transfer_kv_"):
        raise AttributeError(f"the stand-in for sgl_kernel.kvcacheio has no {name!r}")
    return _stand_in(name)
