"""Models and data as users of other libraries have them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

LR = 0.1


def parameters(model: nn.Module) -> dict:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Sentences(Dataset):
    def __init__(self, count: int = 8):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, 11, (count, 5), generator=generator)
        self.labels = torch.randint(2, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict:
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(5, dtype=torch.long), "labels": self.labels[i]}


def bert() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.BertConfig(vocab_size=11, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    return transformers.BertForSequenceClassification(config).double()


def lightning_module(dictionary: bool):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
            self.logged = []

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            self.logged.append(batch_idx)
            return {"loss": loss, "other": y} if dictionary else loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), LR)

    return Module()
