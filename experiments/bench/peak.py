"""What the machine can do: operations a second in a large matrix product, bytes a second in memory.

python experiments/bench/peak.py
"""

import argparse
import json

import jax
import jax.numpy as jnp
from timing import in_turn

SIZES = (1024, 2048, 4096)


def matmul_peak(dtype: str = "float32", *, sizes=SIZES, rounds: int = 5) -> float:
    """Return the most operations a second that JAX reaches in a square product, on one device.

    The best round of the best size: a ceiling, where timings of steps are medians.
    """
    things, flops = {}, {}
    for size in sizes:
        a, b = jnp.ones((size, size), dtype), jnp.ones((size, size), dtype)
        product = jax.jit(jnp.matmul)
        repeats = max(1, (max(sizes) // size) ** 2)
        things[f"{size}"] = lambda a=a, b=b, n=repeats, f=product: jax.block_until_ready(
            [f(a, b) for _ in range(n)]
        )
        flops[f"{size}"] = 2.0 * size**3 * repeats
    times = in_turn(things, rounds=rounds)
    return max(flops[name] / min(times[name].seconds) for name in things)


def memory_bandwidth(*, megabytes: int = 512, rounds: int = 5) -> float:
    """Return bytes a second, read, of sums over the rows of an array far larger than caches."""
    x = jnp.ones((1024, megabytes * 2**20 // 4 // 1024), jnp.float32)
    total = jax.jit(lambda x: jnp.sum(x, axis=1))
    times = in_turn({"sum": lambda: jax.block_until_ready(total(x))}, rounds=rounds)
    return x.nbytes / min(times["sum"].seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", type=int, action="append", help="of the product; repeatable")
    parser.add_argument("--megabytes", type=int, default=512, help="of the array that is read")
    arguments = parser.parse_args()
    print(
        json.dumps(
            {
                "device": jax.devices()[0].device_kind,
                "matmul_flops_per_s": matmul_peak(
                    arguments.dtype, sizes=tuple(arguments.size or SIZES)
                ),
                "memory_bytes_per_s": memory_bandwidth(megabytes=arguments.megabytes),
            }
        )
    )


if __name__ == "__main__":
    main()
