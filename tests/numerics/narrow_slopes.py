"""How much of the third pass a captured step in bfloat16 keeps."""

import copy

import torch
from narrow import BATCH, WIDTH, loss_of_scale, net

import threepass
from threepass.compile.capture import capture
from threepass.compile.trace import trace
from threepass.core.engine import Task, run
from threepass.core.options import Options


def bf16_slopes(kind, alpha, ratio, compile_, draws=16, device="cpu"):
    """Over draws, all weights together. The loss is linear in the scores, so its factor sets |t| / |a|."""
    layout = torch.channels_last if kind == "conv" else torch.contiguous_format
    model = net(kind).bfloat16().to(device, memory_format=layout)
    options, weights = Options(alpha), torch.tensor([alpha, 1 - alpha], device=device)

    def step(x, r, scale, weights):
        task = Task(model, lambda out, y: scale * loss_of_scale(1.0)(out, y), x, r)
        return list(run(task, options, weights=tuple(weights)).grads.values())

    found, captured = [], None
    for seed in range(draws):
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape) / max(1, p[0].numel()) ** 0.5)
        x = torch.randn(BATCH, *((3, 8, 8) if kind == "conv" else (WIDTH,))).bfloat16()
        x, r = x.to(device, memory_format=layout), torch.randn(BATCH, 10).bfloat16().to(device)
        wide = copy.deepcopy(model).double()
        first = threepass.three_pass(wide, loss_of_scale(1.0), x.double(), r.double())
        scale = torch.tensor(ratio * float(x.abs().max() / first.input_grad.abs().max()), device=device)
        exact = threepass.three_pass(wide, loss_of_scale(float(scale)), x.double(), r.double(), separate=True)
        inputs = [x, r, scale, weights]
        if captured is None:
            captured = capture(step, inputs) if compile_ else trace(step, inputs)
        back = run(Task(model, loss_of_scale(float(scale)), x, r), Options(1.0)).grads
        pairs = []
        for g, name in zip(captured(*inputs), exact.grads, strict=True):
            third = (1 - alpha) * exact.third_grads[name]
            pairs.append(((g.double() - alpha * back[name].double()) * third, third.square()))
        found.append(sum(a.sum() for a, _ in pairs) / sum(b.sum() for _, b in pairs))
    return torch.stack(found)
