"""A model and data of one's own: is the third pass the gradient here, which rules serve it, and training with `fit`."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import threepass
from threepass.train.data import from_dataset


class Wave(nn.Module):
    """A convolutional net with a norm, and a learned frequency."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.Linear(8 * 36, 3)
        self.frequency = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x):
        return self.head(torch.sin(self.frequency * self.norm(self.conv(x))).flatten(1))


torch.manual_seed(0)
x = torch.randn(300, 1, 8, 8)
y = (x.mean((1, 2, 3)) * 12).round().clamp(-1, 1).long() + 1
data = from_dataset(TensorDataset(x[:240], y[:240]), TensorDataset(x[240:], y[240:]), name="waves")

model, loss_fn = Wave(), nn.CrossEntropyLoss()
print(threepass.coverage(model, x[:16]))
print(f"paper against exact: cosine {threepass.alignment(model, loss_fn, x[:16], y[:16]).cosine:.2f}")

result = threepass.fit(model, data, epochs=5, batch_size=40, mode="exact", strength=0.05, lr=0.05)
print(f"E {result.E:.1f}, E_x {result.E_x:.2f}, validation error {result.history[-1]['val_error']:.0%}")
