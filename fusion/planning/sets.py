"""Sets of gradients to reduce: the shapes of real models, and the extremes.

Built into `fusion plan`, and what `scripts/bench` reduces. Pure; sizes are of
float32 but for sets that `DTYPES` names. Shapes come in the order of the model's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from coordinator.messages import ITEM_SIZE
from fusion.planning.workload import Tensor, Workload, make

Shape = tuple[int, ...]

MIB = 1 << 20


def resnet50() -> list[Shape]:
    """He et al. 2015, as torchvision builds it: 161 tensors, 97 MiB."""
    shapes = [*_convolution(64, 3, 7)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += _convolution(width, channels, 1)
            shapes += _convolution(width, width, 3)
            shapes += _convolution(4 * width, width, 1)
            if block == 0:
                shapes += _convolution(4 * width, channels, 1)
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def bert_large() -> list[Shape]:
    """Devlin et al. 2018, without the heads: 391 tensors, 1.2 GiB."""
    hidden, inner = 1024, 4096
    shapes: list[Shape] = [(30522, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    for _ in range(24):
        shapes += [(hidden, hidden), (hidden,)] * 4
        shapes += [(hidden,)] * 2
        shapes += [(inner, hidden), (inner,), (hidden, inner), (hidden,)]
        shapes += [(hidden,)] * 2
    return [*shapes, (hidden, hidden), (hidden,)]


def layer_7b() -> list[Shape]:
    """One of the 32 layers of a 7B language model (Touvron et al. 2023): 9 tensors, 772 MiB."""
    hidden, inner = 4096, 11008
    return [*[(hidden, hidden)] * 4, *[(inner, hidden)] * 2, (hidden, inner), *[(hidden,)] * 2]


SETS: dict[str, Callable[[], list[Shape]]] = {
    "resnet50": resnet50,
    # Its smaller tensors: 128, 3.9 MiB. Short steps, for what takes thousands of them.
    "resnet50-small": lambda: [shape for shape in resnet50() if prod(shape) <= 1 << 17],
    "tiny1000": lambda: [(256,)] * 1000,
    "one64mib": lambda: [(64 * MIB // ITEM_SIZE["float32"],)],
    "one64b": lambda: [(16,)],
    "tiny10000": lambda: [(16,)] * 10_000,
    "bert-large": bert_large,
    "layer-7b": layer_7b,
    "layer-7b-bf16": layer_7b,
}
DTYPES = {"layer-7b-bf16": "bfloat16"}
"""Of the sets that are not float32."""


def dtype_of(name: str) -> str:
    """The dtype of a set's tensors."""
    return DTYPES.get(name, "float32")


def workload(name: str) -> Workload:
    """A set as a step whose gradients are all there at once, the last parameter's first."""
    shapes = SETS[name]()
    dtype = dtype_of(name)
    tensors = [Tensor(f"{name}.{index}", prod(shape), dtype) for index, shape in enumerate(shapes)]
    return make(name, reversed(tensors))


def describe(name: str) -> str:
    """A set in words."""
    shapes = SETS[name]()
    count, nbytes, dtype = len(shapes), total_bytes(shapes, dtype_of(name)), dtype_of(name)
    size = f"{nbytes / MIB:.4g} MiB" if nbytes >= MIB else f"{nbytes / 1024:.3g} KiB"
    kind = f" of {dtype}" if dtype != "float32" else ""
    return f"{name}: {count} tensor{'s' if count != 1 else ''}{kind}, {size}"


def total_bytes(shapes: list[Shape], dtype: str = "float32") -> int:
    """Bytes of a set."""
    return ITEM_SIZE[dtype] * sum(map(prod, shapes))


def _convolution(out: int, into: int, kernel: int) -> list[Shape]:
    """A convolution without bias and its batch normalisation."""
    return [(out, into, kernel, kernel), (out,), (out,)]
