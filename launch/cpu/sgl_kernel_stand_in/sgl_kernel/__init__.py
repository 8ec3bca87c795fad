"""Stands in for SGLang's kernel package on a CPU without AMX.

SGLang 0.5.21 takes CPU kernels by name while its modules are imported, and calls them only where
the processor has AMX. Here they exist and raise NotImplementedError when called. GPU kernels do
not exist here, because SGLang learns from their ImportError that there are none.

Goes away when SGLang publishes a CPU wheel of its kernels, or imports them where it uses them.
"""

from typing import NoReturn

import torch

# Read as attributes of torch.ops.sgl_kernel at import time. No others may be added: SGLang asks
# hasattr() for the rest and would then take the AMX path.
_OPERATORS = (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
)


def _stand_in(name):
    def kernel(*args, **kwargs) -> NoReturn:
        raise NotImplementedError(
            f"{name} was called, but sgl_kernel is a stand-in here (launch/cpu/README.md): "
            "this model or option needs SGLang's real CPU or GPU kernels"
        )

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


def __getattr__(name):
    if name.startswith("_") or not name.endswith("_cpu"):
        raise AttributeError(f"the stand-in for sgl_kernel has no {name!r}")
    return _stand_in(name)


for _name in _OPERATORS:
    setattr(torch.ops.sgl_kernel, _name, _stand_in(_name))
