"""Two lines of a training loop change: make a ThreePass, and call it in place of the forward and `loss.backward()`."""

import torch
from torch import nn

import threepass
from threepass.train.data import Batches, load

data = load("digits")
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = threepass.ThreePass(model, loss_fn, strength=0.1)  # the first line

batches = Batches(data.train, 64, normalise=(data.mean, data.std), seed=0)
for epoch in range(5):
    for x, y in batches.epoch(epoch):
        optimizer.zero_grad()
        r = step(x, y)  # the second, in place of: loss = loss_fn(model(x), y); loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {r.loss:.4f}, input loss {r.input_loss:.4f}")
