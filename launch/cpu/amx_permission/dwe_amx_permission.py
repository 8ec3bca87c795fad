"""Asks Linux for the AMX tile registers before anything uses them.

A process may use AMX only after it asked for the permission (`arch_prctl`, Linux 5.16 and later);
without it the first tile instruction ends the process with SIGILL. vLLM's CPU attention kernel
(0.31.0) uses tiles on machines that have them and leaves the asking to oneDNN, which does so with
its own first AMX primitive. Where attention comes first, as it can with tiny models, the engine's
worker dies on its first request ("exit code: -4").

Lives in every Python process of the environment, through `dwe_amx_permission.pth`; threads and
children inherit the permission. One system call; it fails harmlessly on machines without AMX.

Goes away when vLLM's kernel asks for itself.
"""

import ctypes
import platform

_SYS_ARCH_PRCTL = 158  # x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18

if platform.system() == "Linux" and platform.machine() == "x86_64":
    ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
