"""Modules of torch that know nothing of workers: what a plan is applied to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class CausalAttention(nn.Module):
    """Attention by one layer for queries, keys and values, in the manner of GPT-2."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.n_head, self.width = heads, width
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        q, k, v = (a.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for a in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / (k.size(-1) ** 0.5)
        mask = torch.tril(torch.ones(t, t, dtype=torch.bool)).view(1, 1, t, t)
        scores = scores.masked_fill(~mask, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class GroupedAttention(nn.Module):
    """Attention by a layer each for queries, keys and values, with fewer heads of these two, in the manner of Llama."""

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.num_heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q = self.q_proj(x).view(b, t, self.num_heads, self.size).transpose(1, 2)
        k, v = (p(x).view(b, t, self.kv_heads, self.size).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int | None):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalAttention(width, heads) if kv_heads is None else GroupedAttention(width, heads, kv_heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(
        self, letters: int = 11, positions: int = 7, width: int = 12, heads: int = 3, kv_heads: int | None = None
    ):
        super().__init__()
        self.embed, self.places = nn.Embedding(letters, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, text: torch.Tensor, following: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if following is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), following.view(-1), ignore_index=-1)


class Translator(nn.Module):
    """nn.Transformer, encoder and decoder, between embeddings and a head."""

    def __init__(self, letters: int = 11, width: int = 12, heads: int = 3):
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.transformer = nn.Transformer(width, heads, 1, 1, 20, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, letters)

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, following: torch.Tensor | None = None
    ) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = source == 0
        y = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        logits = self.head(y)
        return logits if following is None else F.cross_entropy(logits.transpose(1, 2), following)


class Residual(nn.Module):
    """The block of ResNet-18."""

    def __init__(self, channels: int, made: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, made, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(made)
        self.conv2 = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(made)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or channels != made:
            self.downsample = nn.Sequential(nn.Conv2d(channels, made, 1, stride, bias=False), nn.BatchNorm2d(made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += same
        return self.relu(y)


class ResNet(nn.Module):
    """ResNet-18 in shape, with few channels."""

    def __init__(self, width: int = 4, classes: int = 5):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu, self.maxpool = nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Residual(width, width, 1), Residual(width, width, 1))
        self.layer2 = nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Residual(2 * width, 4 * width, 2), Residual(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(Residual(4 * width, 8 * width, 2), Residual(8 * width, 8 * width, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        y = self.fc(torch.flatten(self.avgpool(x), 1))
        return y if labels is None else F.cross_entropy(y, labels)


def convolutions(channels: int, made: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(channels, made, 3, padding=1), nn.GroupNorm(2, made), nn.ReLU()),
        *(nn.Conv2d(made, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU()),
    )


class UNet(nn.Module):
    """Down and up again, with connections between equal resolutions."""

    def __init__(self, width: int = 4, classes: int = 3):
        super().__init__()
        self.enter, self.pool = convolutions(1, width), nn.MaxPool2d(2)
        self.low, self.bottom = convolutions(width, 2 * width), convolutions(2 * width, 4 * width)
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join1 = convolutions(4 * width, 2 * width)
        self.up2 = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2 * width, width, 1))
        self.join2, self.head = convolutions(2 * width, width), nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        a = self.enter(x)
        b = self.low(self.pool(a))
        c = self.bottom(self.pool(b))
        y = self.join1(torch.cat([self.up1(c), b], dim=1))
        y = self.head(self.join2(torch.cat([self.up2(y), a], dim=1)))
        return y if labels is None else F.cross_entropy(y, labels)


class SpectralConv(nn.Module):
    """The layer of a Fourier neural operator by `torch.fft` and `einsum`."""

    def __init__(self, width: int, modes: int):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, width, width, modes, modes, dtype=torch.cdouble) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = self.modes
        f = torch.fft.rfft2(x, norm="ortho")
        low = torch.einsum("bihw,iohw->bohw", f[:, :, :m, :m], self.weight[0])
        high = torch.einsum("bihw,iohw->bohw", f[:, :, -m:, :m], self.weight[1])
        middle = f.new_zeros(*low.shape[:2], f.shape[2] - 2 * m, m)
        kept = F.pad(torch.cat([low, middle, high], dim=2), (0, f.shape[3] - m))
        return torch.fft.irfft2(kept, s=x.shape[-2:], norm="ortho")


class FNO(nn.Module):
    """A Fourier neural operator (Li et al., 2021)."""

    def __init__(self, width: int = 4, modes: int = 3):
        super().__init__()
        self.lift, self.project = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        self.spectral = nn.ModuleList(SpectralConv(width, modes) for _ in range(2))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            h = F.gelu(spectral(h) + local(h))
        out = self.project(h)
        return out if y is None else F.mse_loss(out, y)
