"""Keep compiled programs on disk, so that the second start of an experiment compiles nothing."""

from pathlib import Path

# Seconds. Programs that compile faster than this are not worth a file.
_WORTH_KEEPING = 0.5


def keep_compiled_programs(folder: Path) -> str:
    """Turn JAX's persistent compilation cache on, unless JAX has been given a folder already.

    One folder serves several versions of JAX and several kinds of machine: JAX's key of a program
    covers the versions of jaxlib and of the platform's compiler, the flags, and the devices with
    the features of their processors. Nothing is ever deleted; the folder may be, at any time.

    Args:
        folder: is made if it is not there.

    Returns:
        A note for the user if programs cannot be kept there; else nothing.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is not None:
        return ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"compiled programs are not kept: {error}"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)
    return ""
