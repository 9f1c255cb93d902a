"""What a program that computes on the CPU asks of it: its cores, and huge pages."""

import os
import sys

SETTING = "glibc.malloc.hugetlb"
VARIABLE = "GLIBC_TUNABLES"


def cores() -> int:
    """Returns the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_huge_pages() -> None:
    """Starts this program anew with huge pages, unless it was; on Linux only.

    Each update asks for hundreds of megabytes, which the kernel otherwise hands out in
    pieces of 4 KiB; with pieces of 2 MiB an update on a CPU takes a fifth less time.
    The C library reads the setting when a program begins, so the program takes the
    place of itself: same process, same arguments. What the user has set stays.
    """
    given = os.environ.get(VARIABLE, "")
    if sys.platform != "linux" or SETTING in given:
        return
    setting = ":".join(filter(None, [given, f"{SETTING}=1"]))
    environment = {**os.environ, VARIABLE: setting}
    try:
        os.execve(sys.executable, sys.orig_argv, environment)
    except OSError:
        return  # it is slower, no more
