"""Eight CPU devices before JAX starts; no implicit rank promotion; each program compiled once."""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# The workers of pytest-xdist keep all cores busy: to split a module for several threads of the
# compiler costs 6 % of the time here and gains nothing.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
    # Of this process alone: JAX does not write whole files at once, so that two that run at the
    # same time would read halves. Processes that tests start inherit it.
    compiled = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest

from gshard_exp import cli

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module")
def quick_compilation():
    """Compile with the least effort, also in processes that tests start.

    For modules that compile many programs and run each for a few steps, and that do not ask how
    well a program is compiled.
    """
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    os.environ[name.upper()] = "1"
    yield
    del os.environ[name.upper()]
    jax.config.update(name, before)


@pytest.fixture
def command(capsys):
    """Call the command line; return its exit status, output and error output."""

    def run(*argv):
        capsys.readouterr()
        status = cli.main([str(word) for word in argv])
        return status, *capsys.readouterr()

    return run
