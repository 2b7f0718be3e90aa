"""The nets: sizes, shapes, three passes through them, and nets by name."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import threepass
from threepass import models

SMALL = {
    "mlp": {"sizes": (3 * 16 * 16, 8, 10)},
    "plain8": {"width": 4},
    "resnet8": {"width": 4},
    "resnet18": {"width": 4},
    "vit": {"image": 16, "width": 24, "depth": 2},
}


def size(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mlp", 784 * 512 + 512 + 512 * 10 + 10),
        ("plain20", 269_034),
        ("plain32", 463_018),
        ("resnet20", 269_722),
        ("resnet-32", 464_154),
        ("resnet56", 853_018),
        ("resnet18", 11_173_962),
    ],
)
def test_parameter_counts(name, count):
    assert size(models.by_name(name)) == count


@pytest.mark.parametrize("depth", [8, 20, 32])
def test_plain_is_the_paper_s_table(depth):
    model = models.plain(depth, classes=100)
    convs = [m for m in model if isinstance(m, nn.Conv2d)]
    n = (depth - 2) // 3
    assert [m.out_channels for m in convs] == [16] * (n + 1) + [32] * n + [64] * n
    assert [i for i, m in enumerate(convs) if m.stride == (2, 2)] == [n + 1, 2 * n + 1]
    assert all(m.kernel_size == (3, 3) and not m.bias.any() for m in convs)
    assert [type(m) for m in model][: 2 * len(convs)] == [nn.Conv2d, nn.ReLU] * len(convs)
    assert [type(m) for m in model][2 * len(convs) :] == [nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear]
    sides = []
    for m in convs:
        m.register_forward_hook(lambda m, args, out: sides.append(out.shape[-1]))
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 100)
    assert sides == [32] * (n + 1) + [16] * n + [8] * n


def test_resnet_has_the_layers_of_plain_and_shortcuts():
    plain, resnet = (
        [(m.in_channels, m.out_channels, m.stride) for m in model.modules() if isinstance(m, nn.Conv2d)]
        for model in (models.plain(20), models.resnet(20))
    )
    assert plain == resnet
    block = models.resnet(8, width=4)[4].eval()  # the first of the second stage
    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        for norm in (m for m in block.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.weight.zero_()
        shortcut = block(x)
    assert torch.equal(shortcut[:, 2:6], x[:, :, ::2, ::2].relu())
    assert not shortcut[:, :2].any()
    assert not shortcut[:, 6:].any()


def test_plain_nets_without_biases():
    with_them, without = models.plain(20), models.plain(20, bias=False)
    lost = {name for name, _ in with_them.named_parameters()} - {name for name, _ in without.named_parameters()}
    convolutions = [name for name, m in with_them.named_modules() if isinstance(m, nn.Conv2d)]
    assert lost == {f"{name}.bias" for name in convolutions}


@pytest.mark.parametrize(("name", "count"), [("plain20", 19), ("resnet20", 19), ("resnet18", 17)])
def test_activations_by_name(name, count):
    kinds = [type(m) for m in models.by_name(name, activation="gelu").modules()]
    assert nn.ReLU not in kinds
    assert kinds.count(nn.GELU) == count
    by_default = [type(m) for m in models.by_name(name).modules()]
    assert by_default.count(nn.ReLU) == count


def test_mlp_activations():
    for activation, kind in [("relu", nn.ReLU), ("sigmoid", nn.Sigmoid), ("tanh", nn.Tanh), (nn.GELU, nn.GELU)]:
        model = models.mlp(4, 3, 3, 2, activation=activation)
        assert [type(m) for m in model] == [nn.Flatten, nn.Linear, kind, nn.Linear, kind, nn.Linear]
    with pytest.raises(ValueError, match="activation must be one of relu, gelu, sigmoid, tanh or a class, got 'swish'"):
        models.mlp(4, 2, activation="swish")
    with pytest.raises(ValueError, match="an input and an output size"):
        models.mlp(4)


@pytest.mark.parametrize(("channels", "side"), [(3, 16), (1, 28)])
@pytest.mark.parametrize("name", ["plain8", "resnet8", "resnet18", "vit"])
def test_other_images(name, channels, side):
    options = SMALL[name] | {"channels": channels, "classes": 7} | ({"image": side} if name == "vit" else {})
    assert models.by_name(name, **options)(torch.randn(2, channels, side, side)).shape == (2, 7)


@pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning")
@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("name", SMALL)
def test_three_passes(name, mode):
    """alpha-weighted terms for every parameter; the exact third pass against double backward."""
    torch.manual_seed(0)
    model = models.by_name(name, **SMALL[name]).double()
    x, y = torch.randn(4, 3, 16, 16).double(), torch.tensor([0, 1, 2, 3])
    r = threepass.three_pass(model, F.cross_entropy, x, y, mode=mode, separate=True)
    assert r.grads.keys() == dict(model.named_parameters()).keys()
    assert all(g.isfinite().all() for g in r.grads.values())
    if mode == "exact":
        x.requires_grad_()
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            (dx,) = torch.autograd.grad(F.cross_entropy(model(x), y), x, create_graph=True)
        expected = torch.autograd.grad(dx.square().sum() / 2, list(model.parameters()), materialize_grads=True)
        for g, e in zip(r.third_grads.values(), expected, strict=True):
            assert torch.allclose(g, e, rtol=1e-8, atol=1e-8 * max(z.abs().max() for z in expected))


def test_vit_mixes_patches():
    torch.manual_seed(0)
    model, x = models.vit(image=8, width=24, depth=1), torch.randn(1, 3, 8, 8)
    swapped = torch.cat([x[..., 4:], x[..., :4]], -1)
    assert not torch.allclose(model(x), model(swapped), atol=1e-6)  # positions are known
    with pytest.raises(ValueError, match="patch must divide image"):
        models.vit(image=30)
    with pytest.raises(ValueError, match="heads must divide width"):
        models.vit(heads=5)


USERS = """
from torch import nn

def net(width=3):
    return nn.Linear(width, 2)

def number():
    return 7

constant = 7
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_nets.py").write_text(USERS)
    (tmp_path / "users_broken.py").write_text("import no_such_package_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("users_nets", None)


@pytest.mark.usefixtures("users_module")
def test_a_function_of_the_users():
    assert models.by_name("users_nets:net", width=5).in_features == 5


@pytest.mark.usefixtures("users_module")
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("plain21", ValueError, "a plain net has 6n [+] 2 layers, such as 20 or 32, got 21"),
        ("resnet19", ValueError, "a ResNet has 6n [+] 2 layers, such as 20 or 32, got 19"),
        (
            "alexnet",
            ValueError,
            "unknown model 'alexnet': choose from mlp, vit, plain20, .*, or module:function",
        ),
        ("vit16", ValueError, "unknown model 'vit16'"),
        ("", ValueError, "unknown model ''"),
        (
            "no_such_module:net",
            ValueError,
            "importing 'no_such_module' failed: ModuleNotFoundError: .*'no_such_module'",
        ),
        ("users_broken:net", ValueError, "importing 'users_broken' failed: .*'no_such_package_at_all'"),
        ("users_nets:nothing", ValueError, "module 'users_nets' has no function 'nothing'"),
        ("users_nets:constant", ValueError, "module 'users_nets' has no function 'constant'"),
        (":net", ValueError, "importing '' failed"),
        ("users_nets:number", TypeError, "the function must return a torch.nn.Module, got int"),
    ],
)
def test_bad_names_are_one_line(name, error, message):
    with pytest.raises(error, match=message) as found:
        models.by_name(name)
    assert "\n" not in str(found.value)
