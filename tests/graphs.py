"""How many operations a traced graph has. Tests give upper bounds, so that a better fusion does not break them."""

from threepass.compile.trace import Program


def count(program: Program, *targets) -> int:
    return sum(node.target in targets for node in program.graph.graph.nodes)


def saved(program: Program, without: Program, *targets) -> int:
    """How many calls of the targets a program saves, compared with one without kernels: fewer if a fusion is missed."""
    return count(without, *targets) - count(program, *targets)
