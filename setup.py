"""Installs gshard_exp: a small core, and extras for what not everybody needs.

The top-level folders `gin/`, `tasks/` and `experiments/` are installed inside the package, so
that a wheel finds its gin files and task modules from any folder.
"""

from setuptools import setup

CORE = [
    "jax>=0.10,<0.13",
    "flax>=0.12",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12",
    "clu>=0.0.12",
    "etils[epath]>=1.10",
    "gin-config>=0.5",
    "fiddle>=0.3",
    "jaxtyping>=0.3",
    "numpy>=2",
    "rich>=13",
]
DATA = [
    "seqio>=0.0.20",
    "sentencepiece>=0.2",
    "sacrebleu>=2.4",
    "tensorboard>=2.20",  # clu.metric_writers imports it and does not ask for it
]
# Only their catalogs are read, by the file list of the installed package (tasks/m4.py).
CORPUS = [
    "django>=5.2,<5.3",
    "plone.app.locales>=7,<8",
    "trac>=1.6,<1.7",
    "django-allauth>=65,<66",
    "djangorestframework>=3.16,<4",
    "django-cms>=5,<6",
    "django-tinymce>=5,<6",
    "django-ckeditor-5>=0.2.18,<0.3",
    "django-ckeditor>=6.7,<7",
]
VISION = ["scikit-learn>=1.5"]  # for its digits
TPU_COMPILER = ["libtpu"]  # for plans; 200 MB. On a TPU install jax[tpu] instead
# For --runner=t5x and gin/t5x/ only (README.md, "Under t5x"). t5x's trainer is on no package index,
# and asks for no grain, which it imports.
T5X = [
    *DATA,
    "t5x @ git+https://github.com/google-research/t5x@cc342d419ec3e3e9c4bf1df33c82330cafdc1e16",
    "grain>=0.2.12",
]
BENCH = ["matplotlib>=3.8"]
SLURM = ["submitit>=1.5"]  # hands the points of a sweep to a cluster
REPORT = BENCH  # its plots as files; page and tables need nothing
TEST = [
    "pytest>=8",
    "pytest-xdist>=3.6",
    "hypothesis>=6",
    "ruff>=0.12",
    "mypy>=1.15",
    "selenium>=4.20",  # opens the page of a report, where there is a Chromium
    *REPORT,
    *VISION,
    *SLURM,
]

ROOMS = [
    "sharding",
    "moe",
    "model",
    "data",
    "train",
    "score",
    "plan",
    "config",
    "use",
    "sweep",
    "t5x_runner",
]

setup(
    name="gshard_exp",
    version="0.1.0",
    description="GShard experiments: MoE Transformers from gin files, on any mesh.",
    python_requires=">=3.11",
    packages=[
        "gshard_exp",
        *(f"gshard_exp.{room}" for room in ROOMS),
        "gshard_exp.tasks",
        "gshard_exp.gin",
        "gshard_exp.experiments",
    ],
    package_dir={
        "gshard_exp.tasks": "tasks",
        "gshard_exp.gin": "gin",
        "gshard_exp.experiments": "experiments",
    },
    package_data={
        "gshard_exp.sweep": ["*.js", "*.css", "*.json"],
        "gshard_exp.tasks": ["*.tsv"],
        "gshard_exp.gin": ["**/*.gin"],
        "gshard_exp.experiments": ["**/*.gin", "**/*.md"],
    },
    install_requires=CORE,
    extras_require={
        "data": DATA,
        "corpus": CORPUS,
        "vision": VISION,
        "t5x": T5X,
        "tpu-plan": TPU_COMPILER,
        "bench": BENCH,
        "slurm": SLURM,
        "report": REPORT,
        "test": TEST,
    },
    entry_points={"console_scripts": ["gshard-exp=gshard_exp.cli:main"]},
)
