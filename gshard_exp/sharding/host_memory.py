"""Memory of the host, where the devices are its CPUs."""

import ctypes
import functools
import logging
import platform

logger = logging.getLogger(__name__)

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_LARGEST_INT = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Have glibc keep the memory that is freed, for the next to ask for it.

    XLA allocates the temporaries of a program each time it runs. By default glibc maps blocks of
    that size afresh and unmaps them afterwards, so that the kernel clears every page in every
    step: 220,000 page faults and 0.4 s of system time in a step of 1.4 s, measured for a model of
    42 million parameters on two cores. With one arena, no mapped blocks and no trimming (below
    2 GiB of free memory) they are cleared once.

    Call it early: threads that allocated before keep the arenas that they have.

    Returns:
        Whether it could be set; False (and nothing changed) without glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _LARGEST_INT))
    done = all(libc.mallopt(parameter, value) == 1 for parameter, value in settings)
    logger.debug("freed memory is kept: %s", done)
    return done
