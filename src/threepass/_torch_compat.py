"""Every private name of torch that the library uses, each with the torch versions in which it was seen.

"Private" is what torch may move or drop without a word: a name with a leading underscore, or one below such a module or
below `torch.fx.experimental`. A new torch that breaks the library breaks it here. `make test-versions` runs the tests
on each version; a test refuses such names elsewhere.
"""

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

# seen in 2.10 to 2.13: TensorGuards compares the metadata of many tensors (shape, strides, dtype, device, ...) in one
# call. seen in 2.11 and 2.13: dict_version gives a number that is another one after every change of a dict's entries
from torch._C._dynamo.guards import TensorGuards, dict_version

# seen in 2.10 to 2.13: tensors without contents, for shapes and strides
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributions import Distribution
from torch.fx import Graph, GraphModule, Node

# seen in 2.10 to 2.13: the tracer that is at work, or None; a function as a graph of ATen operations
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.modules import module as _module

# seen in 2.10 to 2.13: the base class of all convolutions, transposed ones included
from torch.nn.modules.conv import _ConvNd as ConvNd

# seen in 2.10 to 2.13: the TorchFunctionModes at work, the innermost one last
from torch.overrides import _get_current_function_mode_stack as function_modes

# seen in 2.10 to 2.13: a mode that is shown every ATen operation
from torch.utils._python_dispatch import TorchDispatchMode

# seen in 2.10 to 2.13: hides an operation from all dispatch modes, such as a tracer
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

# seen in 2.10 to 2.13: nested containers, flat and back
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "DICTS_HAVE_VERSIONS",
    "GLOBAL_HOOKS",
    "MODULE_HOOKS",
    "MODULE_HOOK_FLAGS",
    "MODULE_MEMBERS",
    "MODULE_OTHERS",
    "PRIVATE_ATTRIBUTES",
    "SCRIPT_DTYPES",
    "ConvNd",
    "DisableTorchFunction",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "ScriptArgument",
    "TensorGuards",
    "TorchDispatchMode",
    "TreeSpec",
    "arguments_of",
    "aten_foreach_copy",
    "aten_log_softmax",
    "aten_softmax",
    "batch_norm_backward",
    "batch_norm_forward",
    "batch_norm_functional",
    "batch_norm_legit",
    "checkpoint_generator",
    "compile_by_inductor",
    "cpu_attention",
    "cpu_attention_backward",
    "cross_entropy_loss",
    "dict_version",
    "entry_of",
    "fake_mode_with_symbols",
    "foreach_add",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul",
    "foreach_norm",
    "fsdp_groups",
    "fsdp_initialize",
    "fsdp_register_backward",
    "fsdp_state",
    "function_modes",
    "function_modes_enabled",
    "get_proxy_mode",
    "gradient_edge",
    "grouped_mm",
    "has_dispatch_modes",
    "has_gradient_hooks",
    "has_saved_tensor_hooks",
    "index_select",
    "innermost_function_mode",
    "innermost_transform",
    "is_dynamo_imported",
    "is_traced",
    "is_wrapped_by_compile",
    "keep_for_inductor",
    "kernel_switches",
    "leaky_relu",
    "leaky_relu_",
    "local_scalar_dense",
    "make_fx",
    "make_symbolic_fx",
    "native_function",
    "nested_from_mask",
    "no_dispatch_modes",
    "number_of_dispatch_modes",
    "number_of_function_modes",
    "overload_of",
    "python_function_of",
    "safe_softmax",
    "script_operation",
    "set_checkpoint_generator",
    "set_compiling",
    "set_mkldnn_enabled",
    "set_trace_switches",
    "silu",
    "softmax_backward",
    "split",
    "tensordot",
    "to_copy",
    "trace_switches",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unsafe_index",
    "unsafe_index_put",
    "unsafe_view",
    "with_symbols",
    "without_fsdp_backward",
]

# seen in 2.10 to 2.13: what torch.tensordot calls, and what torch.index_select is until PyTorch Geometric replaces it
_FUNCTIONS: Any = torch._C._VariableFunctions
tensordot, index_select = _FUNCTIONS.tensordot, _FUNCTIONS.index_select

# seen in 2.10 to 2.13: torch.library gives objects of these classes, and no public name for them
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket

# seen in 2.10 to 2.13: what `checkpoint(use_reentrant=False)` runs around its function
checkpoint_generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator

# seen in 2.10 to 2.13: no torch function mode or override sees what runs inside
DisableTorchFunction = torch._C.DisableTorchFunction

# seen in 2.10 to 2.13: the transform of torch.func (grad, jvp, vmap) that is running, or None
innermost_transform = torch._C._functorch.peek_interpreter_stack

# seen in 2.10 to 2.13: whether the modes on the stack are asked at all (not inside DisableTorchFunction)
function_modes_enabled = torch._C._is_torch_function_mode_enabled

# seen in 2.10 to 2.13: how many TorchFunctionModes are on the stack; a default device is one
number_of_function_modes = torch._C._len_torch_function_stack
number_of_dispatch_modes = torch._C._len_torch_dispatch_stack

# seen in 2.10 to 2.13: what F.silu calls, and what a mode is shown of it
silu = torch._C._nn.silu

# seen in 2.10 to 2.13: what F.leaky_relu calls
leaky_relu, leaky_relu_ = torch._C._nn.leaky_relu, torch._C._nn.leaky_relu_

# seen in 2.10 to 2.13: what Tensor.split calls for parts of one size
split: Any = getattr(torch._VF, "split")  # noqa: B009

# seen in 2.10 to 2.13: what F.cross_entropy calls
cross_entropy_loss = torch._C._nn.cross_entropy_loss

# seen in 2.10 to 2.13: one operation on each of many tensors, in one launch
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_norm = torch._foreach_norm

# seen in 2.10 to 2.13: softmax, zero in a row that is masked as a whole
safe_softmax = torch.ops.aten._safe_softmax

# seen in 2.10 to 2.13: the backward of softmax, given its result
softmax_backward = torch.ops.aten._softmax_backward_data.default

# seen in 2.10 to 2.13: what softmax and log_softmax are in a graph; their last argument is for half formats
aten_softmax = torch.ops.aten._softmax
aten_log_softmax = torch.ops.aten._log_softmax

# seen in 2.10 to 2.13: what `Tensor.to` is in a graph where it copies
to_copy = torch.ops.aten._to_copy

# seen in 2.10 to 2.13: a view whose source has no other user; indexing without a check of the indices
unsafe_view = torch.ops.aten._unsafe_view
unsafe_index = torch.ops.aten._unsafe_index
unsafe_index_put = torch.ops.aten._unsafe_index_put

# seen in 2.13: what `torch.nn.functional.grouped_mm` is in a graph
grouped_mm = torch.ops.aten._grouped_mm.default

# seen in 2.10 to 2.13: operations that read the contents of a tensor: `item`; whether a mask is aligned to the left
local_scalar_dense = torch.ops.aten._local_scalar_dense
nested_from_mask = torch.ops.aten._nested_tensor_from_mask_left_aligned

# seen in 2.10 to 2.13: batch norm with the choice of its implementation, and the backward pass of that choice
batch_norm_forward = torch.ops.aten._batch_norm_impl_index.default
batch_norm_backward = torch.ops.aten._batch_norm_impl_index_backward.default

# seen in 2.10 to 2.13: batch norm whose schema says that it writes to the running statistics, or returns them
batch_norm_legit = torch.ops.aten._native_batch_norm_legit
batch_norm_functional = torch.ops.aten._native_batch_norm_legit_functional

# seen in 2.10 to 2.13: copies to many tensors in one call, as a node of a graph
aten_foreach_copy = torch.ops.aten._foreach_copy_.default

# seen in 2.10 to 2.13: the fused attention of CPUs
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# seen in 2.10 to 2.13: entries of a module's `__dict__` that hold its members, the hooks that a call runs, the flags
# of those hooks, and others: what belongs to its state dict, and whether its backward hooks are full ones
MODULE_MEMBERS = ("_parameters", "_buffers", "_modules")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MODULE_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
MODULE_OTHERS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    "_non_persistent_buffers_set", "_is_full_backward_hook",
)  # fmt: skip

# seen in 2.10 to 2.13: the same for hooks that all modules run, in the order of MODULE_HOOKS
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(getattr(_module, f"_global{name}") for name in MODULE_HOOKS)

# Python 3.11 counts the changes of a dict itself. From 3.12 on torch watches dicts for `dict_version`, which does not
# see on 3.13 that an attribute of an object is assigned.
DICTS_HAVE_VERSIONS = sys.version_info < (3, 12)

# seen in 2.10 to 2.13: attributes of torch's objects that other files read, and operations that they know by name
PRIVATE_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "module": (*MODULE_MEMBERS, *MODULE_HOOKS, *MODULE_HOOK_FLAGS, *MODULE_OTHERS),
    "tensor": ("_backward_hooks", "_base", "_is_view", "_version"),
    "storage": ("_cdata",),
    "operation": ("_adaptive_avg_pool2d", "_sample_dirichlet", "_standard_gamma", "_unsafe_view"),
}


def overload_of(op: torch.library.CustomOpDef) -> Any:
    """The operation of `torch.library.custom_op`'s object; seen in 2.10 to 2.13."""
    return op._opoverload


def entry_of(operation: Any) -> Callable[..., Any]:
    """What an `OpOverload` calls, in C++; seen in 2.10 to 2.13."""
    return operation._op


def make_symbolic_fx(function: Callable[..., Any]) -> Callable[..., GraphModule]:
    """`make_fx` with symbolic sizes, of a function that may use real tensors too; seen in 2.10 to 2.13."""
    return make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)


def arguments_of(operation: Any) -> Sequence[Any]:
    """The arguments in the schema of an `OpOverload`; seen in 2.10 to 2.13."""
    return operation._schema.arguments


def set_checkpoint_generator(generator: Callable[..., Any]) -> None:
    """Replaces `checkpoint_generator`; seen in 2.10 to 2.13."""
    torch.utils.checkpoint._checkpoint_without_reentrant_generator = generator


def has_saved_tensor_hooks() -> bool:
    """Whether saved-tensor hooks are set, as a checkpoint does; seen in 2.10 to 2.13."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def innermost_function_mode() -> Any:
    """The TorchFunctionMode that a call is shown to, if there is one; seen in 2.10 to 2.13."""
    count = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(count - 1) if count and function_modes_enabled() else None


def is_traced() -> bool:
    """Whether a tracer writes down what runs. Without any dispatch mode the answer is quick."""
    return has_dispatch_modes() and get_proxy_mode() is not None


def has_dispatch_modes() -> bool:
    """Whether a mode is shown every ATen operation, a tracer or another; seen in 2.10 to 2.13."""
    return torch._C._len_torch_dispatch_stack() > 0


def gradient_edge(z: Tensor) -> GradientEdge:
    """`torch.autograd.graph.get_gradient_edge` of a tensor that is no leaf, at less cost; seen in 2.10 to 2.13.

    Nodes of Python functions need what that function does to keep them alive.
    """
    node = z.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(z)
    return GradientEdge(node, z.output_nr)


def has_gradient_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether `backward` would call a hook on the way into a parameter's `grad`; seen in 2.10 to 2.13."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)


def set_mkldnn_enabled(enabled: bool) -> bool:
    """Switches oneDNN's kernels on or off for all threads, and returns what was set; seen in 2.10 to 2.13.

    `torch.backends.mkldnn.flags` sets the precision of float32 products along with it.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    return before


def kernel_switches() -> tuple[Hashable, ...]:
    """What `torch.backends` and `torch.use_deterministic_algorithms` have set; seen in 2.10 to 2.13.

    Read from C++ at once: a captured step asks at every call, and the public properties take several times as long.
    """
    c = torch._C
    return (
        c._get_fp32_precision_getter("generic", "all"),
        c._get_fp32_precision_getter("cuda", "matmul"),
        c._get_fp32_precision_getter("cuda", "conv"),
        c._get_fp32_precision_getter("cuda", "rnn"),
        c._get_fp32_precision_getter("mkldnn", "matmul"),
        c._get_fp32_precision_getter("mkldnn", "conv"),
        c._get_cublas_allow_fp16_reduced_precision_reduction(),
        c._get_cublas_allow_bf16_reduced_precision_reduction(),
        c._get_cudnn_enabled(),
        c._get_cudnn_benchmark(),
        c._get_cudnn_deterministic(),
        c._get_mkldnn_enabled(),
        c._get_deterministic_algorithms(),
        c._get_deterministic_algorithms_warn_only(),
        c._get_deterministic_fill_uninitialized_memory(),
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
    )


def trace_switches() -> tuple[bool, bool, Any]:
    """What `set_trace_switches` sets; seen in 2.10 to 2.13."""
    return torch.compiler._is_compiling_flag, Distribution._validate_args, torch._check_tensor_all_with


def set_trace_switches(compiling: bool, validate: bool, check: Any) -> None:
    """What `torch.compiler.is_compiling` returns, whether distributions validate, what `_check_tensor_all` runs."""
    torch.compiler._is_compiling_flag = compiling
    Distribution._validate_args = validate
    torch._check_tensor_all_with = check


def set_compiling(compiling: bool) -> bool:
    """Sets what `torch.compiler.is_compiling` returns; gives what it returned before. Seen in 2.10 to 2.13."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = compiling
    return before


def python_function_of(scripted: Any) -> Callable[..., Any] | None:
    """The Python function that `torch.jit.script` was given, which Dynamo runs too; seen in 2.10 to 2.13.

    None for functions of `torch.jit.trace`, which have the branches and numbers of their trace. Unlike those, scripted
    functions carry a `__name__` of their own.
    """
    return getattr(scripted, "_torchdynamo_inline", None) if "__name__" in vars(scripted) else None


# seen in 2.10 to 2.13: the dtypes that TorchScript has as numbers, in their order
SCRIPT_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.qint8, torch.quint8, torch.qint32,
    torch.bfloat16,
)  # fmt: skip


class ScriptArgument(NamedTuple):
    """An argument in the schema of an operation of TorchScript; kind: its type, without "Optional"."""

    name: str
    kind: str
    by_name: bool
    has_default: bool
    default: Any

    def is_default(self, value: Any) -> bool:
        plain = value is None or isinstance(value, (bool, int, float, str))
        return self.has_default and plain and type(value) is type(self.default) and value == self.default


def script_operation(node: Any) -> tuple[str, list[ScriptArgument], Callable[..., Any]]:
    """The name, the arguments and the operation of a node of TorchScript; seen in 2.10 to 2.13.

    Raises a `RuntimeError` for nodes without a schema, and for those of other namespaces than ATen's.
    """
    schema = torch._C.parse_schema(node.schema())
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten":
        raise RuntimeError(f"{schema.name} is no operation of ATen")
    packet: Any = getattr(torch.ops.aten, name, None)
    arguments = [
        ScriptArgument(
            a.name,
            str(a.real_type).removeprefix("Optional[").removesuffix("]"),
            a.kwarg_only,
            a.has_default_value(),
            a.default_value,
        )
        for a in schema.arguments
    ]
    return name, arguments, getattr(packet, schema.overload_name or "default", packet)


def native_function(name: str) -> Callable[..., Any] | None:
    """The function of torch, or the method of tensors, with the name of an operation; seen in 2.10 to 2.13."""
    c: Any = torch._C
    owners = (c._VariableFunctions, c._nn, c._linalg, c._special, c._fft, Tensor)
    return next((getattr(owner, name) for owner in owners if hasattr(owner, name)), None)


def is_dynamo_imported() -> bool:
    """Whether something may have been compiled by `torch.compile`; seen in 2.10 to 2.13."""
    return "torch._dynamo" in sys.modules


def is_wrapped_by_compile(model: nn.Module) -> bool:
    """Whether calls of the module run through `torch.compile(model)` or `model.compile()`; seen in 2.10 to 2.13."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def fake_mode_with_symbols() -> FakeTensorMode:
    """A fake mode whose tensors may have symbols for sizes; seen in 2.10 to 2.13.

    Symbols are imported only here, because that takes a second. Sizes that are equal by chance are different symbols.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)


def with_symbols(mode: FakeTensorMode, name: str, z: Tensor, dimensions: set[int]) -> Tensor:
    """A fake tensor like z, with a symbol for the size of each of these dimensions; seen in 2.10 to 2.13."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    kinds = [DimDynamic.DYNAMIC if i in dimensions else DimDynamic.STATIC for i in range(z.dim())]
    return mode.from_tensor(z, source=ConstantSource(name), symbolic_context=StatelessSymbolicContext(kinds))


def compile_by_inductor(
    graph: GraphModule, inputs: Sequence[Tensor], rewrite: Callable[[Graph], None], key: str, settings: dict[str, Any]
) -> Any:
    """The graph compiled by Inductor, which is imported only here: that takes seconds; seen in 2.10 to 2.13.

    rewrite: called on the decomposed graph, before Inductor's own passes of that stage. key: stands for it in
    Inductor's cache on disk. settings: of Inductor's config.

    The cache is for tracing contexts whose fake mode may have symbols, as those of `torch.compile` do. Real inputs
    become fake ones of that mode here: AOTAutograd would take a symbol for each of their sizes.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Rewrite(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            rewrite(graph)

        def uuid(self) -> str:
            return key

    mode = next((z.fake_mode for z in inputs if isinstance(z, FakeTensor)), None)
    if mode is None:
        mode = fake_mode_with_symbols()
        inputs = [mode.from_tensor(z, static_shapes=True) for z in inputs]
    with config.patch(post_grad_custom_pre_pass=Rewrite(), **settings), tracing(TracingContext(mode)):
        return compile_fx(graph, inputs)


def keep_for_inductor(operations: set[Any]) -> None:
    """Tells Inductor that it calls these operations as they are, before it meets them; seen in 2.10 to 2.13.

    By itself it finds out when it meets the first of a kind: too late to know that the tensors before it have to be in
    memory, so that it computes them once more for each reader; and before torch 2.13 it then writes down everything
    that the operands are made of, of which there is twice as much with every layer.
    """
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import constrain_to_fx_strides, lowerings, make_fallback

    def in_memory(node: Node, *args: Any, **kwargs: Any) -> Any:
        tree_map_only(TensorBox, lambda z: z.realize(), (args, kwargs))
        return constrain_to_fx_strides(node, *args, **kwargs)

    for operation in operations - lowerings.keys():
        make_fallback(operation, layout_constraint=in_memory, warn=False)


def fsdp_state(module: Any) -> Any:
    """What FSDP2 keeps for a module that `fully_shard` was called on; seen in 2.10 to 2.13."""
    return module._get_fsdp_state()


def fsdp_groups(state: Any) -> list[Any]:
    """The groups of parameters that are gathered together; seen in 2.10 to 2.13, more than one since 2.12."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [g for g in [state._fsdp_param_group] if g is not None]


def fsdp_initialize(root: Any) -> None:
    """What FSDP2 does before the first forward: finds the modules below the root; seen in 2.10 to 2.13."""
    root._lazy_init()


def fsdp_register_backward(root: Any, output: Any) -> Any:
    """The output, whose backward pass will reduce gradients and reshard parameters; seen in 2.10 to 2.13."""
    return root._register_pre_backward_hook(output)


@contextlib.contextmanager
def without_fsdp_backward(state: Any) -> Iterator[None]:
    """The module's forward neither reshards nor registers hooks for a backward pass; seen in 2.10 to 2.13."""
    groups = fsdp_groups(state)
    state._register_pre_backward_hook = lambda output: output
    for group in groups:
        group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)
        group.reshard = lambda: None
    try:
        yield
    finally:
        del state._register_pre_backward_hook
        for group in groups:
            del group._register_post_backward_hook, group.reshard
