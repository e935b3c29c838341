"""Freed memory of a step is there for the next one."""

import importlib.util
import os
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


def test_a_compiler_for_tpus_without_a_tpu_leaves_the_cpu_in_peace(tmp_path):
    """Libtpu may be there for plans; JAX would try to start a TPU, and say that there is none."""
    if importlib.util.find_spec("libtpu") is None:
        (tmp_path / "libtpu").mkdir()
        module = "def get_library_path():\n    return 'libtpu.so'\n"  # all that JAX asks for
        (tmp_path / "libtpu" / "__init__.py").write_text(module)
    code = "from gshard_exp.sharding.mesh import MeshSpec; print(MeshSpec(2).build().devices.size)"
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.getcwd()])
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2\n", "")
