"""GShard (arXiv 2006.16668) as an experiment that anyone can run, scale and extend.

Importing this package is cheap: no JAX, TensorFlow or seqio is loaded before a room that
needs it is imported.
"""

__version__ = "0.1.0"

from pathlib import Path as _Path
from typing import Any as _Any

_checkout = _Path(__file__).resolve().parent.parent
if (_checkout / "setup.py").exists() and not (_Path(__file__).parent / "tasks").exists():
    # A wheel holds tasks/, gin/ and experiments/ inside the package; in a checkout they lie beside
    # it. `gshard_exp.tasks` is found there too, however the checkout was put on the path.
    __path__.append(str(_checkout))


def __getattr__(name: str) -> _Any:
    """Import what the package offers to Python code when it is first asked for."""
    if name == "load_translator":
        from gshard_exp.use.loading import load_translator

        return load_translator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
