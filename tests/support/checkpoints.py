"""A toy model with its training, and checkpoints of it: written, read and damaged."""

import random

import numpy as np
import torch
from torch import nn

from nlgrpo.runtime import checkpoint
from nlgrpo.runtime.checkpoint import Keep

SHARD = "shard-00001-model-00001-of-00001.safetensors"


class Toy(nn.Module):
    """Two layers, a parameter that never gets a gradient, one that is frozen, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.unused = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        self.count += 1
        return self.layers(inputs) + self.frozen


def make(seed=0):
    torch.manual_seed(seed)
    model = Toy()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def train(model, optimizer, steps, start=0):
    """Train for some steps that draw from all three generators, with a learning rate that depends on the step."""
    losses = []
    for step in range(start, start + steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        inputs = torch.randn(8, 5) * random.random() + np.random.normal()  # noqa: NPY002
        loss = model(inputs).square().mean() + random.gauss() * model.layers[0].bias.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def save(folder, step, model, optimizer, keep=2, every=0, **state):
    given = {"model": model, "optimizer": optimizer, "keep": Keep(keep, every)}
    return checkpoint.save(folder, step, state={"step": step, **state}, **given)


def load(folder, model, optimizer):
    return checkpoint.load(folder, model=model, optimizer=optimizer)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])
