"""Freed memory of a step is there for the next one."""

import subprocess
import sys

# 256 MiB is allocated, touched and freed four times, as a step's temporaries are; prints the page
# faults of the last time.
_PROGRAM = """
import ctypes, resource, sys
from gshard_exp.sharding.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(2**28)
    ctypes.memset(block, 1, 2**28)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(what: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, what]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_memory_that_was_freed_costs_no_page_faults_again():
    assert _faults("drop") > 100  # huge pages, where the kernel gives them: 128 of 2 MiB
    assert _faults("keep") < 10
