"""Lets a CUDA build of torchvision be imported beside a CPU build of torch.

torchvision's Linux wheels link CUDA libraries, so its C++ extension does not load under a CPU
torch. torchvision tolerates that, but for two operators (nms, qnms) whose fake kernels it
registers without asking whether they exist: "operator torchvision::nms does not exist".
Declaring their schemas is enough, because the image and video processors of transformers use
only the parts of torchvision that are plain torch.

Lives in every Python process of the environment: `dwe_torchvision_shim.pth` imports this module
at start-up, so spawned engine processes have it too. It costs nothing until torchvision's
registration module is imported, and does nothing where the extension loaded.

Goes away when torchvision (0.28.0 today) asks `extension._has_ops()` before registering the two,
or when a CPU wheel of it can be installed.
"""

import importlib.abc
import sys

_AFTER_EXTENSION = "torchvision._meta_registrations"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept = []  # a torch Library withdraws its schemas when it is collected


class _DeclareMissingOperators(importlib.abc.MetaPathFinder):
    """Declares the schemas once torchvision has tried to load its extension; finds nothing."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == _AFTER_EXTENSION:
            sys.meta_path.remove(self)
            _declare()
        return None


def _declare():
    import torch

    missing = [op for op in ("nms", "qnms") if not hasattr(torch.ops.torchvision, op)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for op in missing:
            library.define(op + _SCHEMA)
        _kept.append(library)


if _AFTER_EXTENSION not in sys.modules:
    sys.meta_path.insert(0, _DeclareMissingOperators())
