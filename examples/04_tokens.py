"""A model of tokens has no gradient at its ids: `input_at` names the module whose output counts as the input."""

import torch
from torch import nn

import threepass


class Tagger(nn.Module):
    """Does a sequence hold its first token again?"""

    def __init__(self, tokens=12, width=16):
        super().__init__()
        self.embed, self.gru, self.head = (
            nn.Embedding(tokens, width),
            nn.GRU(width, 32, batch_first=True),
            nn.Linear(32, 2),
        )

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0][:, -1])


torch.manual_seed(0)
ids = torch.randint(0, 12, (256, 6))
labels = (ids[:, 1:] == ids[:, :1]).any(1).long()
model = Tagger()
step = threepass.ThreePass(model, nn.CrossEntropyLoss(), strength=0.5, input_at="embed")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for i in range(40):
    optimizer.zero_grad()
    r = step(ids, labels)
    optimizer.step()
    if i % 10 == 9:
        shape = tuple(r.input_grad.shape)
        print(f"step {i + 1}: loss {r.loss:.3f}, input loss {r.input_loss:.3f}, dl/de of shape {shape}")
