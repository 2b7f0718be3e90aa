"""A traced program without a compiler: its graph as one Python function, which calls the operations in order."""

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import entry_of
from .trace import Program

_CALL = re.compile(r"\btorch\.ops\.(\w+\.\w+\.\w+)(?=\()")


def eager_program(program: Program) -> Callable[[Sequence[Tensor]], Any]:
    """The function that FX writes for the graph, with the operations bound to names.

    In FX's own function each call looks an operation up by its dotted name, and then goes through a Python method: a
    quarter of the time that a call on small tensors takes.
    """
    code = program.graph.graph.python_code("self")
    bound: dict[str, Any] = {}

    def name_of(call: re.Match[str]) -> str:
        name = f"call_{call[1].replace('.', '_')}"
        bound[name] = entry_of(operator.attrgetter(call[1])(torch.ops))
        return name

    source = _CALL.sub(name_of, code.src)
    scope = code.globals | bound
    exec(compile(source, "<captured step>", "exec"), scope)
    forward = functools.partial(scope["forward"], program.graph)
    return lambda values: forward(*values)
