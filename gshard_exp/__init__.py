"""GShard (arXiv 2006.16668) as an experiment that anyone can run, scale and extend.

Importing this package is cheap: no JAX, TensorFlow or seqio is loaded before a room that
needs it is imported.
"""

__version__ = "0.1.0"
