"""The names that SGLang imports from `sgl_kernel.mamba`; see the package's docstring."""

from sgl_kernel import __getattr__  # noqa: F401
