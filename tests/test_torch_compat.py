"""Private names of torch stand in `_torch_compat.py` alone."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import threepass
from threepass import _torch_compat
from threepass.numerics.precision import seed_op

SOURCE = Path(threepass.__file__).parent
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if path.stem != "_torch_compat")

OWNERS = {
    "module": nn.Module(),
    "tensor": torch.empty(0),
    "storage": torch.empty(0).untyped_storage(),
    "operation": torch.ops.aten,
}
OBJECTS = (
    *OWNERS.values(),
    torch.ops.aten.relu,
    torch.ops.aten.relu.default,
    seed_op,
    torch.distributions.Normal(0, 1),
)


def private_names(tree: ast.AST) -> set[str]:
    """The private names of torch in a file, by the dotted names that imports and assignments give its own names."""
    known: dict[str, str] = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                bound = name.asname or name.name.partition(".")[0]
                known[bound] = name.name if name.asname else bound
                found.add(name.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Assign):
            for target, value in assigned(node.targets[0], node.value):
                if isinstance(target, ast.Name) and (name := dotted(value, known)):
                    known[target.id] = name
        elif isinstance(node, ast.Attribute) and (name := dotted(node, known)):
            found.add(name)
    return {name for name in found if name.partition(".")[0] == "torch" and is_private(name)}


def assigned(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value, known)):
        return f"{owner}.{node.attr}"
    return None


def is_private(name: str) -> bool:
    parts = name.split(".")
    return any(p.startswith("_") and not p.endswith("__") for p in parts) or parts[1:3] == ["fx", "experimental"]


def private_attributes(tree: ast.AST) -> set[str]:
    """Private attributes of torch's objects that a file reads or writes down as a string, except those of `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    private = {name for name in names if re.fullmatch(r"_[A-Za-z]\w*(?<!__)", name)}
    return {name for name in private if any(hasattr(owner, name) for owner in OBJECTS)}


@pytest.mark.parametrize("file", FILES)
def test_private_names_of_torch_stand_in_one_file(file):
    assert private_names(ast.parse((SOURCE / file).read_text())) == set()


def private_keywords(tree: ast.AST) -> set[str]:
    """Keywords of calls that begin with an underscore: functions of this library take none."""
    return {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and (node.arg or "").startswith("_")}


@pytest.mark.parametrize("file", FILES)
def test_private_keywords_of_torch_stand_in_one_file(file):
    assert private_keywords(ast.parse((SOURCE / file).read_text())) == set()


def test_which_keywords_count_as_private():
    assert private_keywords(ast.parse("make_fx(f, *a, tracing_mode=_x, _allow_non_fake_inputs=True, **_z)")) == {
        "_allow_non_fake_inputs"
    }


@pytest.mark.parametrize("file", FILES)
def test_private_attributes_are_listed(file):
    listed = {name for names in _torch_compat.PRIVATE_ATTRIBUTES.values() for name in names}
    assert private_attributes(ast.parse((SOURCE / file).read_text())) <= listed


@pytest.mark.parametrize("owner", OWNERS)
def test_listed_attributes_exist(owner):
    assert [name for name in _torch_compat.PRIVATE_ATTRIBUTES[owner] if not hasattr(OWNERS[owner], name)] == []


def test_every_owner_is_known():
    assert _torch_compat.PRIVATE_ATTRIBUTES.keys() == OWNERS.keys()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch\ntorch.relu(x)\nx._base\ntorch.__version__", set()),
        ("import torch\ntorch._foreach_add_(x)", {"torch._foreach_add_"}),
        ("import torch\n_aten = torch.ops.aten\n_aten._to_copy.default", {"torch.ops.aten._to_copy"}),
        ("import torch\na, b = 1, torch.ops.aten\nb._to_copy", {"torch.ops.aten._to_copy"}),
        ("from torch.utils import _pytree as tree", {"torch.utils._pytree"}),
        ("def f():\n    from torch._inductor import config", {"torch._inductor.config"}),
        ("import torch._dynamo", {"torch._dynamo"}),
        ("import os\nos._exit(0)", set()),
        ("from torch.fx.experimental.proxy_tensor import make_fx", {"torch.fx.experimental.proxy_tensor.make_fx"}),
        ("from ._torch_compat import silu\nfrom .rules import _table\nfrom os import _exit", set()),
    ],
)
def test_what_counts_as_private(code, expected):
    found = private_names(ast.parse(code))
    assert {name.removesuffix(".default") for name in found} == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("self._version\nx._replace()\nx._ours\nx.__dict__\nx.shape", set()),
        ("x.y._base.shape", {"_base"}),
        ("model._buffers", {"_buffers"}),
        ("node.target._schema", {"_schema"}),
        ("KNOWN = {'relu', '_unsafe_view', '_ours'}", {"_unsafe_view"}),
    ],
)
def test_which_attributes_count_as_private(code, expected):
    assert private_attributes(ast.parse(code)) == expected


def test_names_are_exported():
    assert all(hasattr(_torch_compat, name) for name in _torch_compat.__all__)


def test_set_mkldnn_enabled_gives_what_was_set():
    before = _torch_compat.set_mkldnn_enabled(False)
    try:
        assert before == torch.backends.mkldnn.is_available()
        assert _torch_compat.set_mkldnn_enabled(True) is False
    finally:
        assert _torch_compat.set_mkldnn_enabled(before) is True


@pytest.mark.skipif(not _torch_compat.DICTS_HAVE_VERSIONS, reason="versions of dicts are not used on this Python")
def test_an_assigned_attribute_gives_its_dict_another_version():
    module = torch.nn.Dropout(0.5)
    versions = []
    for p in (0.1, 0.2, 0.2):
        module.p = p
        versions.append(_torch_compat.dict_version(vars(module)))
    assert versions[0] != versions[1] == versions[2]
