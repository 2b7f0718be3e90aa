"""What the user's code depends on, in every form that Python has for it: each change is noticed."""

import sys
import types
from collections.abc import Iterator

import pytest
import torch
from close import assert_close
from torch.nn import functional as F

import threepass
from threepass.compile.signature import Signature

HEAD = """
import collections, contextlib, dataclasses, enum, functools, operator, random, types
import torch
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F
class Config:
    pass
"""

NET = """
class Net(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.config = globals().get("config")
    def forward(self, x):
        return self.result(self.layer(x))
    def result(self, x):
        return {}
"""

CLOSURE = """
def made():
    value = 1.0
    def read(x):
        return {}
    def write(new):
        nonlocal value
        value = new
    return read, write
read, write = made()
"""

# what a script defines, what its net computes of x (and of `self`, in whose `config` is `config`), and a later change
CASES = {
    "global": ("gain = 1.0", "x * gain", "gain = 2.0"),
    "global that a library defines": ("act = torch.tanh", "act(x)", "act = torch.sin"),
    "global function of torch in Python": ("act = F.softplus", "act(x)", "act = F.gelu"),
    "global class of torch": ("Act = nn.Tanh", "Act()(x)", "Act = nn.Sigmoid"),
    "global built-in": ("pick = max", "x * pick(1, 2)", "pick = min"),
    "built-in that is hidden": ("", "x * max(1, 2)", "max = min"),
    "global that is defined later": (
        "def h(x):\n try: return x * gain\n except NameError: return x", "h(x)", "gain = 2.0",
    ),
    "global that is deleted": (
        "gain = 2.0\ndef h(x):\n try: return x * gain\n except NameError: return x", "h(x)", "del gain",
    ),
    "global of eval": ("gain = 1.0", "x * eval('gain')", "gain = 2.0"),
    "global by string": ("gain = 1.0", "x * [globals()[n] for n in ('gain',)][0]", "gain = 2.0"),
    "list comprehension": ("gain = 1.0", "sum([x * gain * i for i in (1, 2)])", "gain = 2.0"),
    "nested comprehensions": ("gain = 1.0", "sum([x * u for u in [v for v in [gain]]])", "gain = 2.0"),
    "dict comprehension": ("gain = 1.0", "sum({i: x * i * gain for i in (1, 2)}.values())", "gain = 2.0"),
    "set comprehension": ("gain = 1.0", "x * sum({i * gain for i in (1, 2)})", "gain = 2.0"),
    "condition of a comprehension": ("most = 1", "sum([x for i in range(4) if i > most])", "most = 2"),
    "generator": ("gain = 1.0", "sum(x * gain * i for i in (1, 2))", "gain = 2.0"),
    "lambda in a comprehension": ("gain = 1.0", "sum([f(x) for f in [lambda z: z * gain]])", "gain = 2.0"),
    "class body with a comprehension": (
        "gain = 1.0\ndef h(x):\n class Gains:\n  values = [gain for _ in range(2)]\n return x * Gains.values[0]",
        "h(x)", "gain = 2.0",
    ),
    "closure": (CLOSURE.format("x * value"), "read(x)", "write(2.0)"),
    "closure of a comprehension": (CLOSURE.format("sum([x * value * i for i in (1, 2)])"), "read(x)", "write(2.0)"),
    "closure of a generator": (CLOSURE.format("sum(x * value * i for i in (1, 2))"), "read(x)", "write(2.0)"),
    "closure of a lambda": (CLOSURE.format("(lambda: x * value)()"), "read(x)", "write(2.0)"),
    "closure over a comprehension": (
        "def made():\n return [lambda x: x * i * j for i in (1.0, 2.0) for j in [1.0]]\nfs = made()",
        "sum([f(x) for f in fs])", "fs[0].__closure__[0].cell_contents = 5.0",
    ),
    "function of torch in a closure": (
        CLOSURE.format("x if value == 1 else value(x)"), "read(x)", "write(torch.sin)",
    ),
    "walrus": ("gain = 1.0", "x * g if (g := gain) > 0 else x", "gain = 2.0"),
    "walrus in a comprehension": ("gain = 1.0", "x * [g := gain * i for i in (1, 2)][-1] * g", "gain = 2.0"),
    "formatted string": ("which = 1\nd = {'g1': 1.0, 'g2': 2.0}", "x * d[f'g{which}']", "which = 2"),
    "nested formatted string": ("which = 1\nd = {'g1': 1.0, 'g2': 2.0}", "x * d[f\"{f'g{which}'}\"]", "which = 2"),
    "match: value": ("mode = 'a'\ndef h(x):\n match mode:\n  case 'a': return x\n return 2 * x", "h(x)", "mode = 'b'"),
    "match: dotted name": (
        "class Mode:\n a = 1\ndef h(x):\n match 1:\n  case Mode.a: return x\n return 2 * x", "h(x)", "Mode.a = 3",
    ),
    "match: sequence": (
        "gains = [1, 2]\ndef h(x):\n match gains:\n  case [1, b]: return x * b\n  case [a, *_]: return x * a",
        "h(x)", "gains[0] = 5",
    ),
    "match: mapping": ("d = {'k': 1}\ndef h(x):\n match d:\n  case {'k': v}: return x * v", "h(x)", "d['k'] = 5"),
    "match: attribute": (
        "config = Config()\nconfig.gain = 1\ndef h(x, config):\n match config:\n  case Config(gain=v): return x * v",
        "h(x, self.config)", "config.gain = 5",
    ),
    "match: attribute by position": (
        "class Pair:\n __match_args__ = ('gain',)\nconfig = Pair()\nconfig.gain = 1\n"
        "def h(x, pair):\n match pair:\n  case Pair(v): return x * v",
        "h(x, self.config)", "config.gain = 5",
    ),
    "match: positions": (
        "class Pair:\n __match_args__ = ('a',)\n a, b = 1, 5\ndef h(x):\n match Pair():\n  case Pair(v): return x * v",
        "h(x)", "Pair.__match_args__ = ('b',)",
    ),
    "nested functions": (
        "gain = 1.0\ndef h(x):\n def f(x):\n  def g(x): return x * gain\n  return g(x)\n return f(x)",
        "h(x)", "gain = 2.0",
    ),
    "default of a nested function": ("g = 1\ndef h(x):\n def f(x, g=g): return x * g\n return f(x)", "h(x)", "g = 2"),
    "default": ("def h(x, g=1.0): return x * g", "h(x)", "h.__defaults__ = (2.0,)"),
    "default by name": ("def h(x, *, g=1.0): return x * g", "h(x)", "h.__kwdefaults__['g'] = 2.0"),
    "defaults by name": ("def h(x, *, g=1.0): return x * g", "h(x)", "h.__kwdefaults__ = {'g': 2.0}"),
    "list as a default": ("def h(x, g=[1.0]): return x * g[0]", "h(x)", "h.__defaults__[0][0] = 2.0"),
    "code of a function": ("def h(x): return x * 2.0", "h(x)", "h.__code__ = (lambda x: x * 3.0).__code__"),
    "code of a method": ("", "x * 2.0", "Net.result.__code__ = (lambda self, x: x * 3.0).__code__"),
    "function": ("def h(x): return x", "h(x)", "def h(x): return x * 2"),
    "method": ("", "x * 2", "Net.result = lambda self, x: x * 3"),
    "attribute of a function": ("def h(x): return x * h.gain\nh.gain = 1.0", "h(x)", "h.gain = 2.0"),
    "new attribute of a function": ("def h(x): return x * getattr(h, 'gain', 1.0)", "h(x)", "h.gain = 2.0"),
    "wrapped function": (
        "gain = 1.0\ndef wrap(f):\n return functools.wraps(f)(lambda x: f(x) * gain)\n@wrap\ndef h(x): return x",
        "h(x)", "gain = 2.0",
    ),
    "dispatched function": (
        "g = 1\n@functools.singledispatch\ndef h(x): return x\n@h.register(torch.Tensor)\ndef _(x): return x * g",
        "h(x)", "g = 2",
    ),
    "generator function": ("gain = 1.0\ndef h():\n yield gain\n yield from [1]", "x * sum(h())", "gain = 2.0"),
    "context manager": (
        "gain = 1.0\n@contextlib.contextmanager\ndef c(): yield gain\ndef h(x):\n with c() as g: return x * g",
        "h(x)", "gain = 2.0",
    ),
    "finally": ("gain = 1.0\ndef h(x):\n try: z = x\n finally: z = x * gain\n return z", "h(x)", "gain = 2.0"),
    "unpacked arguments": ("k = {'g': 1.0}\ndef h(x, g): return x * g", "h(x, **k)", "k['g'] = 2.0"),
    "annotation": ("g = 1\ndef h(x: 'Missing') -> 'Missing':\n k: int = g\n return x * k", "h(x)", "g = 2"),
    "class attribute": ("class Base(nn.Module):\n gain = 1.0", "x * self.gain", "Base.gain = 2.0"),
    "attribute of super()": ("class Base(nn.Module):\n gain = 1.0", "x * super().gain", "Base.gain = 2.0"),
    "attribute of __class__": ("class Base(nn.Module):\n gain = 1.0", "x * __class__.gain", "Base.gain = 2.0"),
    "method of super()": (
        "class Base(nn.Module):\n def h(self, x): return x", "super().h(x)", "Base.h = lambda self, x: 2 * x",
    ),
    "class of a class": ("class M(type):\n g = 1.0\nclass C(metaclass=M): pass", "x * C.g", "M.g = 2.0"),
    "class method": ("g = 1\nclass C:\n @classmethod\n def h(cls): return g", "x * C.h()", "g = 2"),
    "static method": ("g = 1\nclass C:\n @staticmethod\n def h(): return g", "x * C.h()", "g = 2"),
    "property": ("g = 1\nclass C:\n @property\n def h(self): return g\nc = C()", "x * c.h", "g = 2"),
    "descriptor": (
        "class D:\n g = 1\n def __get__(self, *_): return self.g\nclass C:\n h = D()", "x * C().h", "D.g = 2",
    ),
    "object that is called": ("class C:\n def __call__(self, x): return x * g\ng, c = 1, C()", "c(x)", "g = 2"),
    "object that is made": ("class C:\n def __init__(self, x): self.x = x * g\ng = 1", "C(x).x", "g = 2"),
    "object that is not made": ("class C:\n def __new__(cls, x): return x * g\ng = 1", "C(x)", "g = 2"),
    "data class that is made": (
        "@dataclass\nclass C:\n x: object\n def __post_init__(self): self.x = self.x * g\ng = 1", "C(x).x", "g = 2",
    ),
    "in-place operator": ("class C:\n def __imul__(self, x): return x * g\ng = 1", "operator.imul(C(), x)", "g = 2"),
    "reflected operator": ("class C:\n def __rmul__(self, x): return x * g\ng = 1\nc = C()", "2 * c * x", "g = 2"),
    "unary operator": ("class C:\n def __invert__(self): return g\ng = 1", "x * ~C()", "g = 2"),
    "item that is set": (
        "class C:\n def __setitem__(self, k, x): self.x = x * g\ndef h(x):\n c = C()\n c[0] = x\n return c.x\ng = 1",
        "h(x)", "g = 2",
    ),
    "missing item": ("class C(dict):\n def __missing__(self, k): return g\ng, c = 1, C()", "x * c['k']", "g = 2"),
    "item of a class": ("class C:\n def __class_getitem__(cls, k): return g\ng = 1", "x * C[0]", "g = 2"),
    "reversed": ("class C:\n def __reversed__(self): return iter([g])\ng = 1", "x * next(reversed(C()))", "g = 2"),
    "isinstance": (
        "class M(type):\n def __instancecheck__(cls, z): return g\nclass C(metaclass=M): pass\ng = True",
        "x * (2 if isinstance(x, C) else 3)", "g = False",
    ),
    "names in a constant": (
        "config = Config()\nconfig.a = config.b = 1",
        "x * sum([getattr(self.config, n) for n in ('a', 'b')])", "config.a = 2",
    ),
    "another __dict__": ("config = Config()\nconfig.a = 1", "x * self.config.a", "config.__dict__ = {'a': 2}"),
    "another __dict__ of a module": (
        "class Base(nn.Module):\n g = 1", "x * self.g", "model.__dict__ = {**vars(model), 'g': 2}",
    ),
    "another class of an object": (
        "class A:\n def g(self): return 1\nclass B:\n def g(self): return 2\nconfig = A()",
        "x * self.config.g()", "config.__class__ = B",
    ),
    "shared __dict__": (
        "class Shared:\n d = {'g': 1}\n def __init__(self): self.__dict__ = self.d\nconfig = Shared()",
        "x * self.config.g", "Shared().g = 2",
    ),
    "dict with attributes": (
        "class D(dict):\n def __init__(self, **k):\n  super().__init__(k)\n  self.__dict__ = self\nconfig = D(g=1)",
        "x * self.config.g", "config.g = 2",
    ),
    "slot": ("@dataclass(slots=True)\nclass C:\n g: int = 1\nconfig = C()", "x * self.config.g", "config.g = 2"),
    "slot beside __weakref__": (
        "@dataclass(slots=True, weakref_slot=True)\nclass C:\n g: int = 1\nconfig = C()",
        "x * self.config.g", "config.g = 2",
    ),
    "the only slot": ("class C:\n __slots__ = 'gain'\nc = C()\nc.gain = 1", "x * c.gain", "c.gain = 2"),
    "private slot": (
        "class C:\n __slots__ = ('__g',)\n def __init__(self): self.__g = 1\n def g(self): return self.__g\nc = C()",
        "x * c.g()", "c._C__g = 2",
    ),
    "named tuple": ("C = collections.namedtuple('C', 'g')\nc = C(1)", "x * c.g", "c = C(2)"),
    "frozen data class": (
        "@dataclass(frozen=True)\nclass C:\n g: int = 1\nc = C()", "x * c.g", "c = dataclasses.replace(c, g=2)",
    ),
    "enum": ("class E(enum.Enum):\n a = 1\n b = 2\ne = E.a", "x * e.value", "e = E.b"),
    "view of a dict": ("d = {'g': 1}\nview = types.MappingProxyType(d)", "x * view['g']", "d['g'] = 2"),
    "chain of dicts": ("d = {'g': 1}\nchain = collections.ChainMap({}, d)", "x * chain['g']", "d['g'] = 2"),
}  # fmt: skip
if sys.version_info >= (3, 12):
    CASES |= {
        "quotes in a formatted string": ("w = 1\nd = {'g1': 1.0, 'g2': 2.0}", "x * d[f'{f'g{w}'}']", "w = 2"),
        "generic function": (
            "g = 1\ntype V[T] = list[T]\ndef h[T](x: T, k: V[int] = ()) -> T: return x * g", "h(x)", "g = 2",
        ),
        "generic function in a function": (
            "g = 1\ndef h(x):\n def f[T: int](k: T = g) -> T: return x * k\n return f()", "h(x)", "g = 2",
        ),
        "generic class": (
            "class Base[T](nn.Module):\n g = 1\n def h(self, x: T) -> T: return x * self.g", "self.h(x)", "Base.g = 2",
        ),
        "generic class in a function": (
            "g = 1\ndef h(x):\n class C[T]:\n  k: T = g\n return x * C.k", "h(x)", "g = 2",
        ),
    }  # fmt: skip
if sys.version_info >= (3, 14):
    CASES |= {
        "template": ("g = 1", "x * t'{g}'.values[0]", "g = 2"),
        "annotation that cannot be evaluated": ("g = 1\ndef h(x: Missing) -> Missing: return x * g", "h(x)", "g = 2"),
    }


@pytest.fixture
def script() -> Iterator[dict]:
    module = types.ModuleType("script")
    sys.modules["script"] = module
    try:
        yield vars(module)
    finally:
        del sys.modules["script"]


def execute(source: str, script: dict) -> None:
    exec(compile(source, "<script>", "exec", dont_inherit=True), script)


def started(script: dict, definitions: str, expression: str):
    """A net of a script, and a function that compares its captured step with the eager one and returns a gradient."""
    torch.manual_seed(0)
    execute(HEAD + definitions, script)
    script.setdefault("Base", torch.nn.Module)
    execute(NET.format(expression), script)
    model = script["model"] = script["Net"]().double()
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.randint(3, (4,))
    step = threepass.ThreePass(model, F.cross_entropy, alpha=0.3, compile="trace")

    def check() -> torch.Tensor:
        expected = threepass.three_pass(model, F.cross_entropy, x, y, alpha=0.3).grads
        for _ in range(2):
            assert_close(step(x, y).grads, expected, 1e-10)
        return expected["layer.weight"]

    return step, check


@pytest.mark.parametrize("name", CASES)
def test_each_change_is_noticed(name, script):
    definitions, expression, change = CASES[name]
    step, check = started(script, definitions, expression)
    before = check()
    execute(change, script)
    assert not torch.allclose(before, check()), "the change has no effect"
    assert [entry.uses for entry in step.compiled.programs.entries] == [2, 2]


COUNTED = """
class Base:
    def h(self, x): return x
class Counted(Base):
    def __init__(self): self.calls = 0
    def h(self, x): return super().h(x)
c = Counted()
Base = nn.Module
"""


def test_random_numbers_of_a_global_method_are_no_constants(script):
    step, check = started(script, "draw = random.Random(0).random", "x + 0 * draw()")
    with pytest.warns(threepass.UncompiledWarning, match=r"the step changes script.draw.* while it runs"):
        [check() for _ in range(2)]
    assert not step.compiled.programs


def test_changed_code_is_named_in_words(script):
    execute("def h(x): return x\ndef other(x): return 2 * x", script)
    signature = Signature(torch.nn.Linear(4, 3), script["h"])
    before = signature.state()
    script["h"].__code__ = script["other"].__code__
    assert before.difference(signature.state()) == "loss_fn code (an object, then other code)"


def test_attributes_that_only_making_an_object_names_do_not_count(script):
    """Of an object that a method of `super()` makes no more: a counter that `__init__` starts."""
    step, check = started(script, COUNTED, "c.h(x)")
    check()
    script["c"].calls += 1
    check()
    assert len(step.compiled.programs) == 1
