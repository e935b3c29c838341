"""Run Python code as if only the core install were there. Used by `test_imports.py`.

python core_install.py CODE
"""

import sys

EXTRAS = {
    "matplotlib",
    "sacrebleu",
    "sentencepiece",
    "seqio",
    "t5",
    "tensorboard",
    "tensorflow",
    "tensorflow_datasets",
    "tensorflow_text",
}


class _Without:
    """A finder that does not see the packages of the extras."""

    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in EXTRAS:
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)


if __name__ == "__main__":
    sys.meta_path[:] = [_Without(finder) for finder in sys.meta_path]
    code, sys.argv[1:] = sys.argv[1], []
    exec(compile(code, "<core install>", "exec"), {"__name__": "__main__"})
