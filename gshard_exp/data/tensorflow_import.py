"""Import TensorFlow without its start-up messages, and keep it off the accelerators."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


def load_tensorflow() -> Any:
    """Return the `tensorflow` module.

    TensorFlow only reads data and writes TensorBoard files here: JAX owns the accelerators. Its
    native libraries print to the process's standard error before any log level takes effect; that
    output is dropped while they load (an ImportError comes through as an exception).
    """
    if "tensorflow" not in sys.modules:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        with _native_stderr_dropped():
            import tensorflow  # noqa: F401
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    return tf


@contextlib.contextmanager
def _native_stderr_dropped() -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
