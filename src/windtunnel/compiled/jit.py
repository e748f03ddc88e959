"""How kernels are compiled: without the interpreter lock, with C arithmetic (no checks for division by zero).

`_nrt=False` leaves out numba's reference counting, which kernels do not need, since they only borrow arrays and never
make any. Measured on the serving loop at batch 128: 0.79 us a row with it, 73% of that in atomic increments and
decrements, 0.24 us without.
"""

import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast
from uuid import uuid4

import numpy as np
from llvmlite.binding import Linkage
from numba import _dynfunc, config, njit, types
from numba.core import ir
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags, _LowerResult
from numba.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.core.ir_utils import get_definition, guard
from numba.core.typed_passes import NativeLowering, NopythonRewrites
from numba.core.untyped_passes import DeadBranchPrune, InlineClosureLikes

Function = TypeVar("Function", bound=Callable[..., Any])
"""Compiling keeps a function's signature, so that a type checker finds swapped arguments in calls between kernels."""


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
    and drops the arguments that the others do not use, of which every array has seven: the per-request loop takes half
        the time, the serving loop two thirds where outputs differ in length, and neither takes longer to compile.

    They get names of their own: whoever links machine code in a process takes a name for the function that it knows by
    it, and others, who call with all arguments, would run these.
    """

    def _optimize_final_module(self) -> None:
        own = uuid4().hex
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage is Linkage.linkonce_odr:
                function.linkage = Linkage.internal
                function.name = f"{function.name}.{own}"
        super()._optimize_final_module()


@register_pass(mutates_CFG=True, analysis_only=False)
class WholeLowering(NativeLowering):
    """Lowers an entry to a `Whole`."""

    _name = "whole_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = Whole(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return bool(super().run_pass(state))


@register_pass(mutates_CFG=True, analysis_only=False)
class PartLowering(NativeLowering):
    """Lowers a function to a `Part`; callers know it by a function object that cannot be called."""

    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        flags = state.flags
        state.library = Part(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags = flags.copy()
        state.flags.no_compile = True
        super().run_pass(state)
        state.flags, lowered = flags, state["cr"]
        name, module = lowered.fndesc.qualname, lowered.fndesc.lookup_module()
        function = _dynfunc.make_function(module, name, "part of kernels", 0, lowered.env, (state.library,))
        state.targetctx.insert_user_function(function, lowered.fndesc, [state.library])
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


class WholeCompiler(CompilerBase):
    """Compiles entries: numba's own pipeline with another way of lowering, `NoneTests` before branches are pruned, and
    without the passes that are `LEFT_OUT`.
    """

    lowering: type[NativeLowering] = WholeLowering

    def define_pipelines(self) -> list[PassManager]:
        builder, passes = DefaultPassBuilder, PassManager("kernels")
        for stage in (
            builder.define_untyped_pipeline,
            builder.define_typed_pipeline,
            builder.define_nopython_lowering_pipeline,
        ):
            for step, description in stage(self.state).passes:
                if step is DeadBranchPrune:
                    passes.add_pass(NoneTests, "comparisons with None")
                if step not in LEFT_OUT:
                    passes.add_pass(self.lowering if step is NativeLowering else step, description)
        passes.finalize()
        return [passes]


class PartCompiler(WholeCompiler):
    """Compiles what entries call."""

    lowering = PartLowering


class NamedApart(IndexDataCacheFile):
    """Files of machine code whose names no two processes can choose.

    Numba numbers them by an index. Two processes that compile an entry for unlike arguments at once take one number,
    and whoever loads by the index of one then runs the code of the other.
    """

    def _data_name(self, _number: int) -> str:
        return super()._data_name(uuid4().int)


class EntryCache(FunctionCache):
    """Numba's cache of a function, in such files."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = NamedApart(self._cache_path, self._impl.filename_base, stamp)


def kernel(function: Callable[..., Any], **options: Any) -> Any:
    """Compile a function without reference counting, with `KernelFlags`."""
    compiled = njit(_nrt=False, nogil=True, error_model="numpy", **options)(function)
    if not config.DISABLE_JIT:
        compiled._compiler._customize_flags = KernelFlags
    return compiled


def entry(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls; its machine code, callees included, is cached on disk."""
    compiled = kernel(function, pipeline_class=WholeCompiler)
    if not config.DISABLE_JIT:
        compiled._cache = EntryCache(function)
    return compiled


def inner(function: Function) -> Function:
    """Compile a function that only kernels call: called from Python it would crash, for it has no wrapper (use
    `.py_func`).
    """
    compiled = kernel(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=PartCompiler)
    return cast(Function, compiled)


def inlined(function: Function) -> Function:
    """Compile a function into its callers: it may return parts of arrays, which numba without reference counting
    allows only inside the caller.
    """
    return cast(Function, kernel(function, inline="always"))


def passed(*tables: Any) -> tuple[Any, ...]:
    """Record arrays in the form that a call takes fastest.

    Measured on the per-request loop, with seven of them: 25 us a call as `np.recarray`, which numba takes apart
    attribute by attribute, 3 us as plain arrays. Without a compiler their fields can be read as attributes only as
    `np.recarray`.
    """
    return tables if config.DISABLE_JIT else tuple(table.view(np.ndarray) for table in tables)
