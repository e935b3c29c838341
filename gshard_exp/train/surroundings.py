"""Says in what surroundings a run takes place: its code, its packages, its machine."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from gshard_exp import __version__

# Those whose version may change a number or a file of a run.
PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "gin-config",
    "fiddle",
    "seqio",
    "tensorflow",
    "sentencepiece",
    "sacrebleu",
)


def code() -> dict[str, Any]:
    """Return version, commit and whether files differ from it; None where that is not known.

    A commit is known in a checkout, if there is git to ask.
    """
    # Not with files that git does not know: notes and outputs lie there too.
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "version": __version__,
        "commit": commit,
        "dirty": None if changed is None else bool(changed),
    }


def packages() -> dict[str, str]:
    """Return the versions of those of `PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that this machine has not
    return found


def machine(mesh: Mesh) -> dict[str, Any]:
    """Return processor, cores, memory (bytes), and the devices of a mesh; no name and no path."""
    device = mesh.devices.flat[0]
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory(),
        "platform": device.platform,
        "devices": mesh.devices.size,
        "device_kind": device.device_kind,
    }


def surroundings(mesh: Mesh) -> Mapping[str, Any]:
    """Return all of it, and the version of Python."""
    return {
        "code": code(),
        "python": platform.python_version(),
        "packages": packages(),
        "machine": machine(mesh),
        "mesh": {name: int(size) for name, size in mesh.shape.items()},
    }


def _git(*words: str) -> str | None:
    """Ask git about the checkout that this code lies in; None without one, or without git."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(checkout), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux; Python knows less
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
