"""Has NIXL take the KV cache of SGLang's CPU engine for the main memory that it is.

SGLang 0.5.21 hands its KV cache to NIXL as "VRAM", wherever it lies; NIXL then looks for a GPU that
owns it and finds none. Here NIXL's agent reads "DRAM" instead, as no memory of a machine without a
GPU is anything else.

Lives in every Python process of the environment, through `dwe_nixl_dram.pth`; it acts only where
NIXL is imported, and changes nothing for those who say "DRAM" themselves.

Goes away when SGLang asks the KV cache's tensors for their device.
"""

import functools
import importlib.abc
import importlib.util
import sys

_MODULES = ("nixl_cu12._api", "nixl_cu13._api")
_METHODS = ("register_memory", "get_xfer_descs", "get_reg_descs", "prep_xfer_dlist")


def _to_dram(value):
    return "DRAM" if isinstance(value, str) and value == "VRAM" else value


def _reading_dram(method):
    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        return method(
            self,
            *(_to_dram(value) for value in args),
            **{name: _to_dram(value) for name, value in kwargs.items()},
        )

    return wrapped


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in _MODULES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        exec_module = spec.loader.exec_module

        def patched(module):
            exec_module(module)
            for method in _METHODS:
                setattr(
                    module.nixl_agent, method, _reading_dram(getattr(module.nixl_agent, method))
                )

        spec.loader.exec_module = patched
        return spec


sys.meta_path.insert(0, _Finder())
