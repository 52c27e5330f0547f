"""Large host arrays in pages of 2 MiB (Linux, glibc 2.35 or newer): a restart of the program with malloc told to ask for them.

XLA on a CPU allocates a program's temporaries anew at each call. In pages of 4 KiB that is 262,144 faults a GiB, 0.7 s of them on
the virtual machine of README's figures, and each product misses the TLB besides. malloc reads the setting only when a process
starts. Imports nothing of JAX.
"""

from __future__ import annotations

import os
import pathlib
import platform
import sys
from collections.abc import Mapping

NAME, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
SWITCH = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def with_huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, with malloc asking for huge pages where it says nothing of them; its other settings stay."""
    said = environ.get(NAME, "")
    if TUNABLE in said:
        return dict(environ)
    return {**environ, NAME: ":".join(filter(None, (said, f"{TUNABLE}=1")))}


def restart_with_huge_pages() -> None:
    """Restart the program once, before it has done anything; GLIBC_TUNABLES=glibc.malloc.hugetlb=0 in the environment: don't.

    Returns where the setting is there already or would do nothing: another C library, or a kernel that gives no such pages.
    """
    environ = with_huge_pages(os.environ)
    if environ == dict(os.environ) or not _can_help():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def _can_help() -> bool:
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(int(n) for n in version.split(".")[:2]) < (2, 35):
        return False
    try:
        return "[never]" not in SWITCH.read_text()
    except OSError:
        return False
