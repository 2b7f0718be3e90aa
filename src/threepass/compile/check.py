"""Whether a compiled step may be used: a check, at capture, that can tell rounding from error.

Compilers have bugs, and so may the rewrites before them. Results in low precision differ from run to run by more than
many a bug would change, so no fixed tolerance serves. The check therefore runs the traced graph three times:

    reference   every operation in float64, as far as it has one
    eager       operation by operation, in the step's own precision
    compiled    the program that is to be used

and compares the last two with the first, output by output. The program is refused when its error is several times that
of the eager run, or when it is not finite where the reference is. Three figures are taken of every output z:

    error   |z - ref| / |ref|
    row     the largest such error among the rows of z, relative to a row of average size
    slope   <z - ref, ref> / |ref|², in which rounding averages out: a factor of 1.1 stands out from larger errors

An output that is tiny beside the others is measured against them, because all that it has may be the rounding errors of
large terms that cancel. The input loss is a sum of terms that do not cancel: it is measured against its own size.

Gradients are affine in the weights of the two terms, g = back * B + third * T, and T is usually far smaller than B. So
the programs run at third = 0 and at third = k, with k such that k T is `AMPLIFIED` times as large as back * B, and
back * B and k T, the difference, are compared separately. What a step writes to (running statistics) is compared by
how far it moved.

One eager run is one draw of rounding errors. Where a net magnifies them (a batch norm over three numbers) another draw
may be ten times as large, so a program is refused only after further eager runs, on values that differ by one rounding
error, have not come close to its figures either.

Where a step is discontinuous (the sign in an l1 penalty, the derivative of a ReLU), a number within a rounding error of
the jump may come out on either side, and one that does changes results by far more than rounding. Few draws have the
same number on the other side, so for such graphs the last draws are of several rounding errors.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node, map_arg

from .._torch_compat import aten_log_softmax, aten_softmax, tree_leaves, tree_map
from ..errors import CaptureError, UncheckedWarning, warn_caller
from ..numerics.precision import HALF
from ..tape.inputs import is_float

MAX_ERROR_RATIO = 5  # a compiled error of more than so many times the eager one is refused
# Further eager runs, before a program is refused, on values that differ by so many rounding errors.
PERTURBATIONS = (1, 1, 1, 1)
LARGER_PERTURBATIONS = (8, 8, 64, 64, 64, 64)  # after the others, where the graph has jumps
_LARGEST_PERTURBATION = 2.0**-16  # of a value: in low precision single jumps are not larger than rounding
AMPLIFIED = 10  # by so much the third term is larger than the first one while it is compared
_SMALL_TERM_TOLERANCE = 0.01  # a third term of less than this part of the first one is measured against the first
# Entries of less than this part of those of the median output are measured against that part of them.
_SMALL_OUTPUT_TOLERANCE = 1e-3
# An output whose entries are less than this part of the largest output's, in the float64 reference, is zero but for
# rounding, as the gradient of a bias before a batch norm is. Rounding errors of the large terms that cancel in it are
# all that it has in lower precision, so that they are measured against the largest output.
_ZERO = 1e-9
_MAX_EAGER_ERROR = 0.5  # an eager error of this size: the output has no digits in this precision that could be compared
_DOUBLE = 1e-10  # in float64: far more than rounding, far less than a fault
# What a float32 sum of some thousand terms may lose if they are added one after another, as Inductor's loops do, where
# the eager kernel adds them in pairs: the gradient of a bias before a mean over tokens is a sum of equal terms.
_SUMMED = 2.0**-16

_aten, _ours = torch.ops.aten, torch.ops.threepass
Run = Callable[[list[Tensor]], Sequence[Tensor]]  # takes a graph's inputs, may write to the list and to its tensors


class Outputs(NamedTuple):
    """What is known of the tensors that a step returns. The step may fill in the lists while it is traced.

    names: of the first ones, for errors. penalties: the indices of those that are sums of terms which do not cancel.
    """

    names: Sequence[str] = ()
    penalties: Sequence[int] = ()


NOTHING = Outputs()  # where nothing is known of them


class Figures(NamedTuple):
    """Of one output, against the reference."""

    error: float
    row: float
    slope: float


def check(
    graph: GraphModule, run: Run, values: Sequence[Tensor], weights: int | None = None, outputs: Outputs = NOTHING
) -> float:
    """Raises a `CaptureError` if `run`, compiled from the graph, is wrong; gives the seconds that this took.

    Args:
        graph: functional, but for copies to its inputs at the end.
        run: the compiled program.
        values: the graph's inputs; they are copied, not written to.
        weights: which of them holds (back, third), as the first two entries of its last dimension.
        outputs: what is known of them.
    """
    began = time.perf_counter()
    epsilon = epsilon_of(graph)

    def eager(values: list[Tensor]) -> Sequence[Tensor]:
        return Interpreter(graph).run(*values)

    def reference(values: list[Tensor]) -> Sequence[Tensor]:
        if epsilon == _DOUBLE:
            return eager(values)
        values[:] = map(_wide, values)
        return InDouble(graph).run(*values)

    references = _terms(graph, reference, values, weights)
    k = _amplification(*references) if weights is not None else 1.0
    compiled = _terms(graph, run, values, weights, k)
    penalties = outputs.penalties
    parts = [Part("", references[0], compiled[0], epsilon, penalties)]
    if weights is not None:
        back, third = references
        sizes = [_SMALL_TERM_TOLERANCE * _norm([b]) for b in back]
        parts = [
            Part("backpropagation's part of ", back, compiled[0], epsilon, penalties),
            Part("the third pass's part of ", [t * k for t in third], compiled[1], epsilon, penalties, sizes),
        ]
    for part, found in zip(parts, _terms(graph, eager, values, weights, k), strict=True):
        part.compare_with(found)
    for seed, errors in enumerate(_perturbations(graph, epsilon)):
        if all(part.worst()[0] <= 1 for part in parts):
            break
        perturbed = _perturbed(values, errors * epsilon, seed, but=weights)
        for part, found in zip(parts, _terms(graph, eager, perturbed, weights, k), strict=True):
            part.compare_with(found)
    for part in parts:
        part.judge(outputs.names)
    return time.perf_counter() - began


def _amplification(back: Sequence[Tensor], third: Sequence[Tensor]) -> float:
    """k, such that k T is `AMPLIFIED` times as large as B, over the outputs that have a T: the gradients."""
    moving = [(b, t) for b, t in zip(back, third, strict=True) if _norm([t]) > 0]
    if not moving:
        return 1.0
    k = AMPLIFIED * _norm([b for b, _ in moving]) / _norm([t for _, t in moving])
    return k if 1e-30 < k < 1e30 else 1.0


def _perturbations(graph: GraphModule, epsilon: float) -> list[int]:
    """By how many rounding errors the values of further eager runs differ."""
    larger = LARGER_PERTURBATIONS if any(map(_jumps, graph.graph.nodes)) else ()
    return [*PERTURBATIONS, *(n for n in larger if n * epsilon < _LARGEST_PERTURBATION)]


_JUMPS = (
    _aten.sign, _aten.sgn, _aten.round, _aten.floor, _aten.ceil, _aten.trunc, _aten.threshold_backward,
    _aten.leaky_relu_backward, _aten.hardtanh_backward, _aten.hardswish_backward, _aten.hardsigmoid_backward,
    _aten.elu_backward, _aten.softshrink_backward, _aten.hardshrink_backward,
)  # fmt: skip


def _jumps(node: Node) -> bool:
    """Whether an operation is discontinuous: a comparison, an index of a largest number, or one of the list."""
    if getattr(node.target, "overloadpacket", None) in _JUMPS:
        return True
    results = [z for z in tree_leaves(node.meta.get("val")) if isinstance(z, Tensor)]
    takes_floats = any(is_float(n.meta.get("val")) for n in node.all_input_nodes)
    return takes_floats and any(not (z.is_floating_point() or z.is_complex()) for z in results)


def _perturbed(values: Sequence[Tensor], epsilon: float, seed: int, but: int | None) -> list[Tensor]:
    """The values, each entry multiplied by 1 +- epsilon at random."""
    generator = torch.Generator().manual_seed(seed)

    def perturb(z: Tensor) -> Tensor:
        signs = torch.randint(2, z.shape, generator=generator).to(z.device) * 2 - 1
        return z * (1 + epsilon * signs).to(z.dtype)

    return [perturb(z) if z.is_floating_point() and i != but else z for i, z in enumerate(values)]


def epsilon_of(graph: GraphModule) -> float:
    """The rounding error of the lowest precision that the graph computes in; of float64, what is far from any error."""
    values = [node.meta.get("val") for node in graph.graph.nodes]
    tensors = [z for z in values if isinstance(z, Tensor) and z.is_floating_point()]
    dtypes = {z.dtype for z in tensors}
    if dtypes & set(HALF):
        return 2.0**-9
    if torch.float32 not in dtypes:
        return _DOUBLE
    tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return 2.0**-12 if tf32 and any(z.is_cuda for z in tensors) else 2.0**-24


def _terms(
    graph: GraphModule, run: Run, values: Sequence[Tensor], weights: int | None, k: float = 1.0
) -> list[list[Tensor]]:
    """back * B and k T of every output; without weights, the outputs as they are."""
    if weights is None:
        return [_outcome(graph, run, values)]
    back, both = (_outcome(graph, run, values, weights, third) for third in (0.0, k))
    return [back, [z - b for z, b in zip(both, back, strict=True)]]


def _outcome(graph: GraphModule, run: Run, values: Sequence[Tensor], weights: int | None = None, third: float = 0.0):
    """The floating-point tensors that a run returns, and how far it moves each input that it writes to, in float64."""
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    written = [any(user.target is _aten.copy_.default and user.args[0] is n for user in n.users) for n in places]
    before = list(values)
    values = [z.clone() if written[i] or i == weights else z for i, z in enumerate(values)]
    if weights is not None:
        values[weights][..., 1] = third
    with torch.no_grad():
        outputs = [_wide(z) for z in run(values) if z.is_floating_point() or z.is_complex()]
    moved = [_wide(z) - _wide(b) for z, b, changes in zip(values, before, written, strict=True) if changes]
    return [torch.view_as_real(z) if z.is_complex() else z.double() for z in (*outputs, *moved)]


def _wide(z: Tensor) -> Tensor:
    if z.is_floating_point():
        return z.double()
    if z.is_complex():
        return z.to(torch.complex128)
    return z.byte() if z.dtype == torch.bool else z  # booleans cannot be subtracted


class Part:
    """A part of the outputs (backpropagation's, or the third pass's): the reference's, the compiled and eager ones.

    penalties: see `Outputs`. sizes: what the errors of an output are measured against where the reference is smaller.
    """

    def __init__(
        self,
        name: str,
        reference: Sequence[Tensor],
        compiled: Sequence[Tensor],
        epsilon: float,
        penalties: Sequence[int] = (),
        sizes: Sequence[float] | None = None,
    ):
        entries = [_norm([ref]) / math.sqrt(max(1, ref.numel())) for ref in reference]
        little = _SMALL_OUTPUT_TOLERANCE * sorted(entries)[len(entries) // 2] if entries else 0.0
        largest = max(entries, default=0.0)
        least = [largest if 0 < entry < _ZERO * largest else little for entry in entries]
        floors = [entry * math.sqrt(ref.numel()) for entry, ref in zip(least, reference, strict=True)]
        floors = [0.0 if i in penalties else floor for i, floor in enumerate(floors)]
        self.name, self.reference, self.epsilon = name, reference, epsilon
        self.sizes = list(map(max, sizes or floors, floors))
        self.compiled = self._figures(compiled)
        self.eager: list[Figures] = []

    def _figures(self, outputs: Sequence[Tensor]) -> list[Figures]:
        return [figures(z, ref, size) for z, ref, size in zip(outputs, self.reference, self.sizes, strict=True)]

    def compare_with(self, outputs: Sequence[Tensor]) -> None:
        """Takes the outputs of an eager run; of several runs the largest figures count."""
        found = self._figures(outputs)
        if self.eager:
            found = [Figures(*map(max, zip(e, f, strict=True))) for e, f in zip(self.eager, found, strict=True)]
        else:
            self.unknown = sum(
                not (_is_finite(z) and _is_finite(r)) for z, r in zip(outputs, self.reference, strict=True)
            )
        self.eager = found

    def worst(self) -> tuple[float, int, str]:
        """The largest of the compiled figures as a multiple of what is allowed, with its output and its name."""
        for i, (e, c) in enumerate(zip(self.eager, self.compiled, strict=True)):
            if math.isfinite(e.error) and not math.isfinite(c.error):
                return math.inf, i, "error"
        sizes = [ref.numel() for ref in self.reference]
        return max(excesses(self.eager, self.compiled, sizes, self.epsilon), default=(0.0, 0, ""))

    def judge(self, names: Sequence[str] = ()) -> None:
        """Raises a `CaptureError` for the worst output whose compiled figures are too far from the eager ones."""
        if self.unknown:
            warn_caller(
                f"{self.unknown} of {len(self.eager)} outputs of the captured step could not be checked, because the "
                "eager step or the float64 reference is not finite there",
                UncheckedWarning,
            )
        excess, i, figure = self.worst()
        what = self.name + (names[i] if i < len(names) else f"output {i}")
        if math.isinf(excess):
            raise CaptureError(f"{what} of the captured step is not finite, but that of the eager step is")
        if excess > 1:
            eager, compiled = getattr(self.eager[i], figure), getattr(self.compiled[i], figure)
            raise CaptureError(
                f"the captured step computes {what}, of shape {tuple(self.reference[i].shape)}, incorrectly: compared "
                f"with a float64 reference, its {_WORDS[figure]} is {compiled:.1e}, that of the eager step {eager:.1e}."
                " Please report this with your model: either a rewrite or the compiler has a bug, or this check is too "
                "strict"
            )


def excesses(
    eager: Sequence[Figures], compiled: Sequence[Figures], sizes: Sequence[int], epsilon: float
) -> list[tuple[float, int, str]]:
    """Of each output and figure, the compiled one as a multiple of what the eager ones allow.

    That is several times the eager figure of this output or, because one alone may be small by luck, of all together.
    """
    known = [f for f in eager if f.error < _MAX_EAGER_ERROR]
    usual = Figures(*(math.sqrt(sum(getattr(f, name) ** 2 for f in known) / max(1, len(known))) for name in _NAMES))
    least = 4 * epsilon + (0.0 if epsilon == _DOUBLE else _SUMMED)
    found = []
    for i, (e, c, size) in enumerate(zip(eager, compiled, sizes, strict=True)):
        if not math.isfinite(e.error):
            continue
        spread = e.error / math.sqrt(max(1, size))
        allowed = {"error": (e.error, usual.error), "row": (e.row, usual.row), "slope": (e.slope, usual.slope, spread)}
        for name, values in allowed.items():
            limit = MAX_ERROR_RATIO * (max(values) + least) if e.error < _MAX_EAGER_ERROR else 100.0 * max(1.0, e.error)
            found.append((getattr(c, name) / limit, i, name))
    return found


_NAMES = ("error", "row", "slope")
_WORDS = {
    "error": "relative error", "row": "largest relative error of a row",
    "slope": "relative error in the direction of the reference",
}  # fmt: skip


def figures(z: Tensor, reference: Tensor, size: float) -> Figures:
    """size: what the error is measured against if the reference is smaller. Where both are not finite, nothing is."""
    both = ~(torch.isfinite(z) | torch.isfinite(reference))
    z, reference = z.masked_fill(both, 0.0), reference.masked_fill(both, 0.0)
    scale = max(_norm([reference]), size)
    if scale == 0:
        scale = 1.0 if _norm([z]) > 0 else math.inf
    difference = z - reference
    rows = difference.flatten(1).norm(dim=1) if z.dim() > 1 else difference.norm()
    slope = abs(float((difference * reference).sum())) / scale**2
    return Figures(_norm([difference]) / scale, float(rows.max()) * math.sqrt(rows.numel()) / scale, slope)


def _is_finite(z: Tensor) -> bool:
    return bool(torch.isfinite(z).all())


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(z.square().sum()) for z in tensors))


class InDouble(Interpreter):
    """Runs a graph with every floating-point value in float64.

    An operation that has no float64 (fused attention, a kernel of our own) runs as it is, on rounded operands.
    """

    def run_node(self, node: Any) -> Any:
        if node.op != "call_function":
            return super().run_node(node)
        if node.target is _ours.round.default:
            return self.env[node.args[0]]
        if node.target is not _aten.view.dtype and not _is_narrow_attention(node):
            args, kwargs = tree_map(_in_double, self.fetch_args_kwargs_from_env(node))
            if node.target in _HALF_TO_FLOAT:
                args = (*args[:2], False)
            try:
                return node.target(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # whatever a library raises for an unknown dtype
                pass
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: _like(self.env[n], n.meta.get("val")))
        return tree_map(_wide_if_tensor, node.target(*args, **kwargs))


def _is_narrow_attention(node: Any) -> bool:
    """Fused attention of a narrower dtype. cuDNN's takes float64 without an error and returns NaN; others raise."""
    return "scaled_dot_product" in str(node.target) and node.args[0].meta["val"].dtype != torch.float64


_HALF_TO_FLOAT = (aten_softmax.default, aten_log_softmax.default)  # their last argument is for half dtypes


def _in_double(z: Any) -> Any:
    return torch.float64 if isinstance(z, torch.dtype) and z.is_floating_point else z


def _wide_if_tensor(z: Any) -> Any:
    return _wide(z) if isinstance(z, Tensor) else z


def _like(value: Any, example: Any) -> Any:
    """A value in the dtypes that the node had in the step itself."""
    if isinstance(value, Tensor) and isinstance(example, Tensor):
        return value.to(example.dtype)
    if isinstance(value, (tuple, list)) and isinstance(example, (tuple, list)):
        return type(value)(map(_like, value, example))
    return value
