"""The MoE layer alone, forward and backward, against a dense layer with the same active work.

python experiments/bench/moe_layer.py [--experts=8 --experts=64 ...] [--method=NAME ...] [--json]

The dense layer is as wide as the K experts that a token may be sent to. Below that, what each part
of the MoE layer costs: gate (softmax, choice, queues), the cumulative sums of the queues alone
(part of the gate), dispatch, experts, combine. A method without buffers has no dispatch and combine
apart from its experts.
"""

import argparse
import json
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from ours import main
from timing import in_turn

from gshard_exp.config import components
from gshard_exp.model.layers import FeedForward
from gshard_exp.moe.dispatch import BufferedDispatch, Dispatch
from gshard_exp.moe.experts import Experts
from gshard_exp.moe.gating import Top2Gating
from gshard_exp.moe.layer import MoeLayer
from gshard_exp.moe.queues import one_hot, queue
from gshard_exp.moe.routing import Gating
from gshard_exp.sharding.mesh import MeshSpec

EXPERTS = (8, 16, 32, 64, 128, 256, 512)


def methods() -> dict[str, Callable[[], Dispatch]]:
    """Find the dispatch methods: those that `gshard-exp components` lists."""
    return {method.__name__: method for method in components.members(components.DISPATCH)}


def waiting(function: Callable, *arguments) -> Callable[[], object]:
    """Compile a function, and return a call of it that returns when it is done."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


def gradient(layer, x, valid, rows) -> Callable[[], object]:
    """Return one forward and backward pass of a layer, with respect to parameters and input."""
    keys = {name: jax.random.key(i) for i, name in enumerate(("params", "routing", "dropout"))}
    params = layer.init(keys, x, valid=valid, rows=rows, deterministic=False)["params"]

    # All that a batch brings is an argument: XLA would compute with constants beforehand.
    def loss(params, x, valid, rows, rngs):
        how = {"valid": valid, "rows": rows, "deterministic": False}
        y, _ = layer.apply({"params": params}, x, **how, rngs=rngs, mutable=["intermediates"])
        return jnp.sum(jnp.square(y))

    return waiting(jax.grad(loss, (0, 1)), params, x, valid, rows, keys)


def measure_size(experts: int, sizes: argparse.Namespace, found: dict) -> dict:
    """Time all methods and the dense layer at one number of experts."""
    gating = Top2Gating()
    x = jax.random.normal(jax.random.key(9), (sizes.rows, sizes.length, sizes.width), sizes.dtype)
    valid, rows = jnp.ones(x.shape[:2], bool), jnp.arange(sizes.rows)
    dense = FeedForward(mlp_dim=gating.num_choices * sizes.hidden)
    things = {"dense": gradient(dense, x, valid, rows)}
    for name, method in found.items():
        layer = MoeLayer(experts, sizes.hidden, sizes.group_size, gating, method())
        things[name] = gradient(layer, x, valid, rows)
    times = in_turn(things, rounds=sizes.rounds)
    base = times["dense"].median
    return {
        "experts": experts,
        "capacity": gating.capacity(sizes.group_size, experts, 1.0),
        "dense_ms": 1e3 * base,
        "times_of_dense": {name: times[name].median / base for name in found},
        "ms": {name: 1e3 * times[name].median for name in found},
        "spread": {name: timing.spread for name, timing in times.items()},
        "parts_ms": {
            name: measure_parts(experts, sizes, gating, method()) for name, method in found.items()
        },
    }


def measure_parts(experts: int, sizes: argparse.Namespace, gating: Gating, method) -> dict:
    """Time the parts of the layer, each forward and backward with a gradient of ones."""
    group = sizes.group_size
    groups = sizes.rows * sizes.length // group
    capacity = gating.capacity(group, experts, 1.0)
    normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, sizes.dtype)  # noqa: E731
    x_GSM = normal(0, groups, group, sizes.width)
    router_ME = normal(1, sizes.width, experts) / math.sqrt(sizes.width)
    valid_GS = jnp.ones((groups, group), bool)
    uniform_GS = jax.random.uniform(jax.random.key(2), (groups, group))
    wi_EMH = normal(3, experts, sizes.width, sizes.hidden) / math.sqrt(sizes.width)
    wo_EHM = normal(4, experts, sizes.hidden, sizes.width) / math.sqrt(sizes.hidden)

    def route(x_GSM, router_ME):
        logits_GSE = jnp.einsum("GSM,ME->GSE", x_GSM.astype(jnp.float32), router_ME)
        return gating(logits_GSE, valid_GS, capacity, uniform_GS)

    routing = jax.jit(route)(x_GSM, router_ME)

    def queues(expert_GSK):
        ahead_GE = jnp.zeros((groups, experts), jnp.int32)
        for choice in range(expert_GSK.shape[-1]):
            slot_GS, ahead_GE = queue(one_hot(expert_GSK[..., choice], experts), ahead_GE)
        return slot_GS, ahead_GE

    def gate(x_GSM, router_ME):
        found = route(x_GSM, router_ME)
        return found.weight, found.aux_loss, jnp.sum(found.slot).astype(jnp.float32)

    things = {"gate": both_ways(gate, x_GSM, router_ME), "cumsum": waiting(queues, routing.expert)}
    if not isinstance(method, BufferedDispatch):
        things["experts"] = both_ways(
            lambda x, wi, wo, routing: method(x, routing, Experts(wi, wo), capacity),
            *(x_GSM, wi_EMH, wo_EHM),
            fixed=routing,
        )
    else:
        y_GECM = jax.jit(lambda x: method.dispatch(x, routing, experts, capacity))(x_GSM)
        things["dispatch"] = both_ways(
            lambda x, routing: method.dispatch(x, routing, experts, capacity), x_GSM, fixed=routing
        )
        things["experts"] = both_ways(
            lambda y, wi, wo: Experts(wi, wo).of_buffers(y), y_GECM, wi_EMH, wo_EHM
        )
        things["combine"] = both_ways(
            lambda y, weight, routing: method.combine(y, routing._replace(weight=weight)),
            *(y_GECM, routing.weight),
            fixed=routing,
        )
    times = in_turn(things, rounds=sizes.rounds)
    return {name: 1e3 * timing.median for name, timing in times.items()}


def both_ways(function: Callable, *arguments, fixed=None) -> Callable[[], object]:
    """Return a call of a function and of its gradient, with ones for the gradient of its result.

    Args:
        function: of `arguments`, and of `fixed` if that is given.
        arguments: those that have a gradient.
        fixed: what has none, and must not be a constant of the program either.
    """

    def run(fixed, *arguments):
        last = () if fixed is None else (fixed,)
        result, back = jax.vjp(lambda *arguments: function(*arguments, *last), *arguments)
        return result, back(jax.tree.map(jnp.ones_like, result))

    return waiting(run, fixed, *arguments)


def table(result: dict) -> str:
    """Lay a result out as Markdown."""
    names = result["methods"]
    lines = [
        f"{result['tokens']} tokens of width {result['width']}, hidden {result['hidden']}, groups "
        f"of {result['group_size']}; times of the dense layer, forward and backward",
        "",
        f"| E | C | dense ms | {' | '.join(names)} |",
        "|---" * (3 + len(names)) + "|",
    ]
    for size in result["sizes"]:
        shares = " | ".join(f"{size['times_of_dense'][name]:.2f}" for name in names)
        lines.append(
            f"| {size['experts']} | {size['capacity']} | {size['dense_ms']:.1f} | {shares} |"
        )
    parts = ("gate", "cumsum", "dispatch", "experts", "combine")
    lines += ["", f"| E | method | {' | '.join(f'{part} ms' for part in parts)} |"]
    lines += ["|---" * (2 + len(parts)) + "|"]
    for size in result["sizes"]:
        for name in names:
            of_parts = size["parts_ms"][name]
            costs = " | ".join(f"{of_parts[p]:.1f}" if p in of_parts else "-" for p in parts)
            lines.append(f"| {size['experts']} | {name} | {costs} |")
    return "\n".join(lines)


def run() -> None:
    found = methods()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, action="append")
    parser.add_argument("--method", action="append", choices=sorted(found))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--group_size", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    MeshSpec().build()  # starts JAX as training does
    chosen = {name: found[name] for name in arguments.method or found}
    result = {
        "methods": list(chosen),
        "tokens": arguments.rows * arguments.length,
        "width": arguments.width,
        "hidden": arguments.hidden,
        "group_size": arguments.group_size,
        "sizes": [
            measure_size(experts, arguments, chosen) for experts in arguments.experts or EXPERTS
        ],
    }
    print(json.dumps(result, indent=1) if arguments.json else table(result))


if __name__ == "__main__":
    main(run)
