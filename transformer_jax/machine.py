"""What a program that computes on the CPU asks of it: its cores, and its memory."""

import os
import sys

VARIABLE = "GLIBC_TUNABLES"
SETTING = "glibc.malloc.hugetlb"
SETTINGS = {
    SETTING: 1,
    "glibc.malloc.mmap_max": 0,
    "glibc.malloc.trim_threshold": 1 << 40,
}


def cores() -> int:
    """Returns the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_memory() -> None:
    """Starts this program anew so that it keeps its memory, unless it was; Linux only.

    Each update asks for hundreds of megabytes and gives them back. The kernel hands
    them out in pieces of 4 KiB, each cleared, every time anew; here in pieces of 2 MiB,
    and what was given back is used again. An update on a CPU takes a fourth less time.
    The C library reads the settings when a program begins, so the program takes the
    place of itself: same process, same arguments. What the user has set stays.
    """
    given = os.environ.get(VARIABLE, "")
    if sys.platform != "linux" or SETTING in given:
        return
    ours = [f"{name}={value}" for name, value in SETTINGS.items() if name not in given]
    setting = ":".join(filter(None, [given, *ours]))
    environment = {**os.environ, VARIABLE: setting}
    try:
        os.execve(sys.executable, sys.orig_argv, environment)
    except OSError:
        return  # it is slower, no more
