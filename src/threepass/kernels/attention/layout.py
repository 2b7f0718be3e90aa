"""How the results of attention's kernels lie in memory."""

from torch import Tensor


def empty_packed(q: Tensor) -> Tensor:
    batch, heads, tokens, width = q.shape
    return q.new_empty((batch, tokens, 3, heads, width)).permute(2, 0, 3, 1, 4)


def empty(q: Tensor, tokens: int, width: int, by_token: bool) -> Tensor:
    batch, heads = q.shape[:2]
    if by_token:
        return q.new_empty((batch, tokens, heads, width)).transpose(1, 2)
    return q.new_empty((batch, heads, tokens, width))
