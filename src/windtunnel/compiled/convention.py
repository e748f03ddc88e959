"""How kernels call each other: an array travels as its address and shape, and as its strides where it has gaps.

Numba passes seven numbers for an array of one dimension, of which kernels use two. The serving loop's functions take
tens of arrays, so most of the code that LLVM was given took arguments apart and put them together again. With two
numbers the loop of pools with prefix caches and adapters compiles in 47 s of CPU in place of 73, and runs as fast.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.callconv import CPUCallConv
from numba.core.datamodel import ArgPacker, DataModelManager, default_manager
from numba.core.datamodel.models import ArrayModel
from numba.core.lowering import Lower
from numba.np.numpy_support import as_dtype


class PassedArray(ArrayModel):
    """An array as kernels pass it."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind)
        self.item_bytes = as_dtype(kind.dtype).itemsize
        names = ("data", "shape") if kind.layout == "C" else ("data", "shape", "strides")
        self.passed = [self.get_field_position(name) for name in names]

    def get_argument_type(self) -> tuple[Any, ...]:
        return tuple(self.get_model(position).get_argument_type() for position in self.passed)

    def as_argument(self, builder: Any, value: Any) -> tuple[Any, ...]:
        return tuple(self.get_model(k).as_argument(builder, self.get(builder, value, k)) for k in self.passed)

    def from_argument(self, builder: Any, value: Any) -> Any:
        word = ir.IntType(64)
        item_bytes, num_items = ir.Constant(word, self.item_bytes), ir.Constant(word, 1)
        strides: list[Any] = []
        for size in reversed(value[1]):
            strides.insert(0, builder.mul(num_items, item_bytes))
            num_items = builder.mul(num_items, size)
        strides = value[2] if len(value) == 3 else strides
        array = ir.Constant(self.get_value_type(), None)
        packed = (cgutils.pack_array(builder, each, word) for each in (value[1], strides))
        # The fields of `ArrayModel` behind its two owners.
        for place, member in enumerate((num_items, item_bytes, value[0], *packed), 2):
            array = self.set(builder, array, member, place)
        return array


MODELS = DataModelManager({types.Array: PassedArray}).chain(default_manager)
"""Numba's models of data, but for how arrays are passed."""


class Convention(CPUCallConv):
    """Numba's way to call a function, with arrays as kernels pass them."""

    def __init__(self, context: Any, packer: ArgPacker) -> None:
        super().__init__(context)
        self.packer = packer

    def _get_arg_packer(self, _argtypes: Sequence[Any]) -> ArgPacker:
        return self.packer

    def declare(self, module: Any, description: Any) -> Any:
        """Return the function of this description in `module`, declared if it is not there."""
        kind = self.get_function_type(description.restype, description.argtypes)
        function = cgutils.get_or_insert_function(module, kind, description.mangled_name)
        for argument in function.args[:2]:
            argument.add_attribute("captures(none)")
            argument.add_attribute("noalias")
        return function


def packer_of(argument_types: Sequence[Any]) -> ArgPacker:
    """Return what takes arguments of these types apart, and puts them together."""
    return ArgPacker(MODELS, argument_types)


class KernelLower(Lower):
    """Lowers a function that is called by this convention."""

    def init(self) -> None:
        super().init()
        self.convention = Convention(self.context, packer_of(self.fndesc.argtypes))

    @property
    def call_conv(self) -> Convention:
        return self.convention

    def setup_function(self, fndesc: Any) -> None:
        declare = self.context.declare_function
        self.context.declare_function = self.convention.declare
        try:
            super().setup_function(fndesc)
        finally:
            self.context.declare_function = declare


def call_of(description: Any, library: Any) -> Callable[..., Any]:
    """Return what writes a call of a kernel into another one."""
    packer = packer_of(description.argtypes)

    def write(context: Any, builder: Any, _signature: Any, arguments: Sequence[Any]) -> Any:
        convention = Convention(context, packer)
        callee = convention.declare(builder.module, description)
        status, result = convention.call_function(builder, callee, description.restype, description.argtypes, arguments)
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return result

    write.signature = description.argtypes  # type: ignore[attr-defined]
    write.libs = (library,)  # type: ignore[attr-defined]
    return write
