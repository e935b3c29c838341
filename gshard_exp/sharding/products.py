"""Counts what a product multiplies, from its instruction in a compiled program.

product = read(instruction, operands)   # None if it is none
product.flops                           # 2 for each multiply-add
product.padded(128)                     # of a matrix unit of 128 x 128, zeros included
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from gshard_exp.sharding.instructions import Instruction, Shape

_ROWS_AT_ONCE = 8  # sublanes of a TPU's registers


@dataclasses.dataclass(frozen=True)
class Product:
    """So many products [rows, summed] x [summed, columns]."""

    rows: int
    summed: int
    columns: int
    times: int = 1

    @property
    def flops(self) -> int:
        """Return the operations, 2 for each multiply-add."""
        return 2 * self.times * self.rows * self.summed * self.columns

    def padded(self, unit: int) -> int:
        """Return the operations of a matrix unit, with zeros where it is not filled.

        The unit holds `unit` x `unit` numbers of the right operand and takes rows of the left one
        eight at a time. The compiler's own cycles agree: a router's product with 8 columns is
        estimated at 16 times its operations (times the passes of its precision).
        """
        held = _up(self.summed, unit) * _up(self.columns, unit)
        return 2 * self.times * _up(self.rows, _ROWS_AT_ONCE) * held


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def read(instruction: Instruction, operands: tuple[tuple[Shape, ...], ...]) -> Product | None:
    """Read a product or a convolution; None if the instruction is neither."""
    attributes = instruction.attributes
    if instruction.opcode in ("dot", "ragged-dot"):
        summed = _integers(attributes, r"\blhs_contracting_dims=\{([\d,]*)\}")
        batch = _integers(attributes, r"\blhs_batch_dims=\{([\d,]*)\}")
    elif instruction.opcode == "custom-call" and "gemm" in instruction.target:  # of cuBLAS
        summed = _integers(attributes, r'"lhs_contracting_dimensions":\[([\d,"]*)\]')
        batch = _integers(attributes, r'"lhs_batch_dimensions":\[([\d,"]*)\]')
    elif instruction.opcode == "convolution":
        return _convolution(instruction, operands[0][0], operands[1][0])
    else:
        return None
    left, result = operands[0][0].dims, instruction.shapes[0].dims
    depth, times = (math.prod(left[d] for d in which) for which in (summed, batch))
    rows = math.prod(left) // max(1, depth * times)
    return Product(rows, depth, math.prod(result) // max(1, rows * times), times)


def _integers(text: str, pattern: str) -> tuple[int, ...]:
    found = re.search(pattern, text)
    listed = found.group(1).replace('"', "") if found else ""
    return tuple(map(int, listed.split(","))) if listed else ()


def _convolution(instruction: Instruction, image: Shape, kernel: Shape) -> Product:
    """Count the multiply-adds that meet no padding and no hole, as XLA's cost analysis does.

    On TPU products are convolutions, and batch dimensions of a product windows over padding, of
    which most is never multiplied.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        raise ValueError(f"{instruction.name}: a convolution without dim_labels")
    of_image, of_kernel, of_result = labels.groups()
    result = instruction.shapes[0].dims
    window = _window(instruction.attributes)
    spatial = sorted(label for label in of_result if label.isdigit())
    pairs = 1
    for index, label in enumerate(spatial):
        pairs *= _meetings(
            size=image.dims[of_image.index(label)],
            kernel=kernel.dims[of_kernel.index(label)],
            results=result[of_result.index(label)],
            window={key: values[index] for key, values in window.items()},
        )
    return Product(
        rows=result[of_result.index("b")],
        summed=kernel.dims[of_kernel.index("i")],
        columns=result[of_result.index("f")],
        times=pairs,
    )


def _window(attributes: str) -> dict[str, tuple[int, ...]]:
    """Read `window={size=3x3 stride=2x2 pad=0_1x0_1 ...}`: numbers by dimension."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in found.group(1).split()) if found else {}
    return {
        key: tuple(int(part.split("_")[0]) for part in fields[key].split("x"))
        for key in ("stride", "pad", "lhs_dilate", "rhs_dilate")
        if key in fields
    }


def _meetings(size: int, kernel: int, results: int, window: Mapping[str, int]) -> int:
    """Count the (result, kernel) positions along one dimension that meet an element."""
    stride, hole = window.get("stride", 1), window.get("lhs_dilate", 1)
    step, pad = window.get("rhs_dilate", 1), window.get("pad", 0)
    last = (size - 1) * hole
    return sum(
        0 <= position <= last and position % hole == 0
        for result in range(results)
        for position in (result * stride + k * step - pad for k in range(kernel))
    )
