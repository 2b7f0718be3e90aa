"""Models of transformers and peft, from their configurations: exact mode is double backward, whatever is in use."""

import copy

import pytest
import torch
from adopters import Sentences, bert
from close import assert_close
from families import HUGGING_FACE, in_float64, make
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

import threepass
from threepass.bench.nets import recompute_layers

pytestmark = pytest.mark.filterwarnings("ignore::threepass.NormalizationWarning", "ignore::DeprecationWarning")

TEXT = {"bert_mask": "BertModel", "gpt2_mask": "GPT2Model", "llama_mask": "LlamaModel"}
ATTENTION = {"bert_mask": ["query", "value"], "gpt2_mask": ["c_attn"], "llama_mask": ["q_proj", "v_proj"]}


def problem(name: str):
    return in_float64(make(HUGGING_FACE[name]))


def double_backward(model: nn.Module, loss_fn, x, y) -> tuple[dict, dict]:
    """The gradients of the loss and of 1/2 |dl/dx|^2, x being the pixels or what the first embedding returns."""
    inputs = []

    def keep(module, args, out):
        if not inputs:
            inputs.append(out if out.requires_grad else out.requires_grad_())

    x = {name: z.clone().requires_grad_() if z.is_floating_point() else z for name, z in x.items()}
    hooks = [m.register_forward_hook(keep) for m in model.modules() if isinstance(m, nn.Embedding)]
    inputs += [z for z in x.values() if z.requires_grad]
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with sdpa_kernel(SDPBackend.MATH):
        loss = loss_fn(model(**x), y)
        (g,) = torch.autograd.grad(loss, inputs, create_graph=True)
        terms = [
            torch.autograd.grad(z, list(parameters.values()), retain_graph=True, allow_unused=True)
            for z in (loss, 0.5 * g.square().sum())
        ]
    for hook in hooks:
        hook.remove()
    back, third = (dict(zip(parameters, term, strict=True)) for term in terms)
    used = [n for n, z in back.items() if z is not None]
    return ({n: back[n] for n in used}, {n: torch.zeros_like(back[n]) if third[n] is None else third[n] for n in used})


def assert_exact(model: nn.Module, loss_fn, x, y) -> None:
    back, third = double_backward(model, loss_fn, x, y)
    r = threepass.three_pass(model, loss_fn, x, y, mode="exact", separate=True)
    assert_close(r.backprop_grads, back, 1e-12)
    assert_close(r.third_grads, third, 1e-11)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_exact_mode_is_double_backward(name):
    assert_exact(*problem(name))


def test_tied_embeddings_have_one_gradient():
    model, *rest = problem("gpt2_mask")
    assert model.lm_head.weight is model.transformer.wte.weight
    r = threepass.three_pass(model, *rest, mode="exact")
    assert "transformer.wte.weight" in r.grads
    assert "lm_head.weight" not in r.grads
    assert_exact(model, *rest)


def captured(model, loss_fn, x, y, mode) -> dict:
    """The gradients of a captured step, which must not run eagerly."""
    return threepass.ThreePass(model, loss_fn, alpha=0.3, mode=mode, compile="require")(x, y).grads


def with_lora(name: str):
    """Every layer of attention with a trained low-rank term; all other weights are frozen."""
    import peft

    model, *rest = problem(name)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=ATTENTION[name], fan_in_fan_out=name == "gpt2_mask")
    model = peft.get_peft_model(model, config).double().train()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    return model, *rest


@pytest.mark.parametrize("name", TEXT)
def test_lora_of_peft(name):
    model, *rest = with_lora(name)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in n for n in trained)
    assert_exact(model, *rest)


@pytest.mark.parametrize("mode", ["paper", pytest.param("exact", marks=pytest.mark.slow)])
def test_lora_of_peft_is_captured(mode, graph_only):
    model, *rest = with_lora("bert_mask")
    expected = threepass.three_pass(copy.deepcopy(model), *rest, alpha=0.3, mode=mode).grads
    assert_close(captured(model, *rest, mode), expected, 1e-10)


def checkpointed(name: str, reentrant: bool):
    """The model that recomputes its layers, one that does not, and the rest of the problem.

    In float32, because what makes Llama's own float32 parts float64 is not there when layers are recomputed.
    """
    model, *rest = make(HUGGING_FACE[name])
    model = getattr(model, "model", model) if name == "llama_mask" else model
    model.config.use_cache = False
    expected = copy.deepcopy(model).train()
    recompute_layers(model, reentrant)
    return model.train(), expected, rest


@pytest.mark.parametrize("mode", ["paper", "exact"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", [*TEXT, "hf_vit"])
def test_gradient_checkpointing(name, reentrant, mode):
    model, whole, rest = checkpointed(name, reentrant)
    expected = threepass.three_pass(whole, *rest, alpha=0.3, mode=mode)
    r = threepass.three_pass(model, *rest, alpha=0.3, mode=mode)
    assert_close(r.grads, expected.grads, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing_is_captured(reentrant, graph_only):
    model, whole, rest = checkpointed("bert_mask", reentrant)
    expected = threepass.three_pass(whole, *rest, alpha=0.3, mode="exact").grads
    assert_close(captured(model, *rest, "exact"), expected, 1e-5)


def test_the_models_own_loss():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x, labels=None):
            logits = self.layer(x).tanh()
            return {"logits": logits} | ({} if labels is None else {"loss": F.cross_entropy(logits, labels)})

    torch.manual_seed(0)
    model, x, labels = Model(), torch.randn(4, 3).double(), torch.randint(2, (4,))
    ours = threepass.three_pass(model, None, {"x": x, "labels": labels}, mode="exact").grads
    theirs = threepass.three_pass(
        model, lambda out, y: F.cross_entropy(out["logits"], y), {"x": x}, labels, mode="exact"
    )
    assert_close(ours, theirs.grads, 1e-14)
    with pytest.raises(ValueError, match=r"none: pass a loss_fn, or .*labels"):
        threepass.three_pass(model, None, {"x": x})


def test_the_first_scalar_of_a_tuple_is_the_models_own_loss():
    model = bert()
    batch = next(iter(DataLoader(Sentences(), 8)))
    expected = threepass.three_pass(model, None, batch, alpha=0.3).grads
    assert_close(threepass.three_pass(model, None, batch | {"return_dict": False}, alpha=0.3).grads, expected, 1e-14)


def test_embeddings_that_require_grad_are_not_warned_of(recwarn):
    """As `enable_input_require_grads` makes them: the Trainer calls it for checkpointed models of peft."""
    model = bert()
    for p in model.bert.embeddings.parameters():
        p.requires_grad_(False)
    model.enable_input_require_grads()
    threepass.three_pass(model, None, next(iter(DataLoader(Sentences(), 8))), mode="exact")
    assert not [w for w in recwarn if "not parameters of the model" in str(w.message)]
