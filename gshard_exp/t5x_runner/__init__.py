"""A second runner: t5x's own training loop drives our experiment.

Only `train --runner=t5x`, and a gin file of t5x that names them, import the modules here that need
t5x. `layout` and `convert` need none: they read and write t5x's checkpoints with orbax alone.
"""
