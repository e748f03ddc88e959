"""How numba compiles kernels: without the interpreter lock, with C arithmetic (no checks for division by zero).

`_nrt=False` leaves out numba's reference counting, which kernels do not need, since they only borrow arrays and never
make any. Measured on the serving loop at batch 128: 0.79 us a row with it, 73% of that in atomic increments and
decrements, 0.24 us without.
"""

import ctypes
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir as llvm_ir
from llvmlite.binding import Linkage, address_of_symbol
from numba import _dynfunc, njit, typeof, types
from numba.core import ir
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags, _LowerResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.core.ir_utils import get_definition, guard
from numba.core.typed_passes import NativeLowering, NopythonRewrites
from numba.core.untyped_passes import DeadBranchPrune, InlineClosureLikes

from windtunnel.compiled.convention import Convention, KernelLower, call_of, packer_of
from windtunnel.compiled.machine_code import RESULT_WORDS, SYMBOL, MachineCode

LEFT_OUT = (InlineClosureLikes, NopythonRewrites)
"""Passes of numba's that find nothing in kernels, which have no closures and make no arrays."""


class KernelFlags(Flags):
    """Compilation flags that are hashed and compared by what is set.

    Numba looks up every operator by its caller's flags, 31,000 times for the serving loop, and compares all 22 flags of
    both each time.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(KernelFlags)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelFlags) and self._values == other._values


class Part(JITCodeLibrary):
    """The code of a function that only kernels call, as it is linked into theirs.

    Numba optimises every function together with all that it calls and emits machine code for each; a callee five levels
    down was optimised and emitted five times. Only an entry's is ever run, so only that is finished: the serving loop's
    68 functions took 3.6 s of LLVM's time and take 1.2 s.
    """

    def _optimize_final_module(self) -> None:
        """Leave that to the entry that this is linked into."""

    def _finalize_final_module(self) -> None:
        """Keep the module out of the machine code."""
        self._finalized = True


class Whole(JITCodeLibrary):
    """The code of an entry and of all that it calls, which nobody else can call.

    Numba links the callees in as functions that others may want. As its own, LLVM inlines those that are called once
    and drops the arguments that the others do not use: the per-request loop takes half the time, the serving loop two
    thirds where outputs differ in length, and neither takes longer to compile.
    """

    machine_code = b""

    def _optimize_final_module(self) -> None:
        for function in self._final_module.functions:
            if not function.is_declaration and function.name != SYMBOL:
                function.linkage = Linkage.internal
        super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        """Emit the machine code, which `windtunnel.compiled.machine_code` loads."""
        self._verify_declare_only_symbols()
        self.machine_code = self._codegen._tm.emit_object(self._final_module)
        self._finalized = True


class KernelLowering(NativeLowering):
    """Lowers a function without making machine code that numba could call."""

    library: type[JITCodeLibrary]
    lowering_class = KernelLower

    def run_pass(self, state: Any) -> bool:
        flags = state.flags
        state.library = self.library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags = flags.copy()
        state.flags.no_compile = True
        super().run_pass(state)
        state.flags = flags
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class WholeLowering(KernelLowering):
    """Lowers an entry to a `Whole`, with a function that takes its arguments from an array of words."""

    _name = "whole_lowering"
    library = Whole

    def run_pass(self, state: Any) -> bool:
        super().run_pass(state)
        description = state["cr"].fndesc
        convention = Convention(state.targetctx, packer_of(description.argtypes))
        kind = convention.get_function_type(description.restype, description.argtypes)
        module = state.library.create_ir_module("words")
        callee = llvm_ir.Function(module, kind, description.llvm_func_name)
        word = llvm_ir.IntType(64)
        result = llvm_ir.FunctionType(llvm_ir.IntType(32), [word.as_pointer()])
        function = llvm_ir.Function(module, result, SYMBOL)
        builder = llvm_ir.IRBuilder(function.append_basic_block())
        values = [builder.bitcast(function.args[0], kind.args[0]), builder.alloca(kind.args[1].pointee)]
        for index, argument in enumerate(kind.args[2:], RESULT_WORDS):
            address = builder.gep(function.args[0], [llvm_ir.Constant(llvm_ir.IntType(32), index)])
            values.append(builder.load(builder.bitcast(address, argument.as_pointer())))
        # As one function, the loop of 400,000 requests takes 5% longer.
        builder.ret(builder.call(callee, values, attrs=("noinline",)))
        state.library.add_ir_module(module)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class PartLowering(KernelLowering):
    """Lowers a function to a `Part`; callers know it by a function object that cannot be called."""

    _name = "part_lowering"
    library = Part

    def run_pass(self, state: Any) -> bool:
        super().run_pass(state)
        lowered = state["cr"]
        name, module = lowered.fndesc.qualname, lowered.fndesc.lookup_module()
        function = _dynfunc.make_function(module, name, "part of kernels", 0, lowered.env, (state.library,))
        call = call_of(lowered.fndesc, state.library)
        state.targetctx._defns[function].append(call, lowered.fndesc.argtypes)
        state["cr"] = _LowerResult(lowered.fndesc, lowered.call_helper, function, lowered.env)
        return True


@register_pass(mutates_CFG=False, analysis_only=False)
class NoneTests(FunctionPass):
    """Decides `x is None` where `x` is a field of an argument, so that numba leaves out the branch not taken.

    Numba does so only where `x` is an argument itself. With this pass optional tables can travel inside a named tuple.
    """

    _name = "none_tests"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        changed = False
        for block in state.func_ir.blocks.values():
            for statement in block.body:
                test: Any = statement.value if isinstance(statement, ir.Assign) else None
                if getattr(test, "op", None) != "binop" or test.fn not in (operator.is_, operator.is_not):
                    continue
                kinds = self._type(state, test.lhs), self._type(state, test.rhs)
                if types.none in kinds and None not in kinds:
                    constant = ir.Const((kinds[0] == kinds[1]) == (test.fn is operator.is_), statement.loc)
                    definitions = state.func_ir._definitions[statement.target.name]
                    definitions[definitions.index(test)] = constant
                    statement.value, changed = constant, True
        return changed

    def _type(self, state: Any, variable: Any) -> Any:
        """Return the type of None, of an argument, or of its field at any depth; None where it is none of these.

        `a, b = x.a, x.b` makes a tuple and takes it apart; its items are followed to their fields.
        """
        definition = guard(get_definition, state.func_ir, variable)
        if isinstance(definition, ir.Arg):
            return state.args[definition.index]
        if isinstance(definition, ir.Const) and definition.value is None:
            return types.none
        kind = getattr(definition, "op", None)
        if kind == "getattr":
            owner = self._type(state, definition.value)
            if isinstance(owner, types.NamedTuple) and definition.attr in owner.fields:
                return owner[owner.fields.index(definition.attr)]
        if kind == "static_getitem":
            items = guard(get_definition, state.func_ir, definition.value)
            if getattr(items, "op", None) == "exhaust_iter":
                items = guard(get_definition, state.func_ir, items.value)
            if getattr(items, "op", None) == "build_tuple":
                return self._type(state, items.items[definition.index])
        return None


def pipeline(state: Any, lowering: type[NativeLowering]) -> list[PassManager]:
    """Return numba's own pipeline with another way of lowering, `NoneTests` before branches are pruned, and without the
    passes that are `LEFT_OUT`.
    """
    builder, passes = DefaultPassBuilder, PassManager("kernels")
    for stage in (
        builder.define_untyped_pipeline,
        builder.define_typed_pipeline,
        builder.define_nopython_lowering_pipeline,
    ):
        for step, description in stage(state).passes:
            if step is DeadBranchPrune:
                passes.add_pass(NoneTests, "comparisons with None")
            if step not in LEFT_OUT:
                passes.add_pass(lowering if step is NativeLowering else step, description)
    passes.finalize()
    return [passes]


class WholeCompiler(CompilerBase):
    """Compiles entries."""

    def define_pipelines(self) -> list[PassManager]:
        return pipeline(self.state, WholeLowering)


class PartCompiler(CompilerBase):
    """Compiles what they call."""

    def define_pipelines(self) -> list[PassManager]:
        return pipeline(self.state, PartLowering)


def dispatcher_of(function: Callable[..., Any], is_entry: bool, options: Mapping[str, Any]) -> Any:
    """Return numba's own object for a kernel, which compiles it with `KernelFlags`."""
    dispatcher = njit(
        _nrt=False,
        nogil=True,
        error_model="numpy",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        pipeline_class=WholeCompiler if is_entry else PartCompiler,
        **options,
    )(function)
    dispatcher._compiler._customize_flags = KernelFlags
    return dispatcher


def compile_entry(dispatcher: Any, arguments: Sequence[Any]) -> MachineCode:
    """Compile an entry for arguments of the types of these, with all that it calls."""
    with global_compiler_lock:
        compiled = dispatcher._compiler.compile(tuple(typeof(argument) for argument in arguments), None)
        compiled.library.finalize()
    module, result = compiled.library._final_module, compiled.signature.return_type
    num_results = {types.none: 0, types.int64: 1}.get(result)
    if num_results is None:
        assert isinstance(result, types.UniTuple)
        assert result.dtype == types.int64
        num_results = result.count
    called = (function.name for function in module.functions if function.is_declaration)
    process = ctypes.CDLL(None)
    symbols = {name: address_of_symbol(name) for name in called if not name.startswith("llvm.")}
    own = {name: address for name, address in symbols.items() if address and not hasattr(process, name)}
    return MachineCode(compiled.library.machine_code, num_results, own)
