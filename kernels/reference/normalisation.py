"""Normalisation: of rows, and of channels.

x: (..., n) has rows along its last axis. x: (outer, channels, inner) has the entries of a channel along its outer and
inner dimensions: inner = 1 for a batch of vectors, the pixels for one of images.
"""

from __future__ import annotations

import numpy as np


def moments(x):
    """The mean of every channel, and its sum of squared distances from the mean: (2, channels).

    The mean is subtracted before the second sum, so that a large mean does no harm. Without entries both are 0.
    """
    count = max(1, x.shape[0] * x.shape[2])
    mean = np.sum(x, axis=(0, 2)) / count
    return np.stack([mean, np.sum((x - mean[:, None]) ** 2, axis=(0, 2))])


def channel_affine(x, mean, scale, shift):
    """(x - mean) * scale + shift, where the three have a number for each channel."""
    return (x - mean[:, None]) * scale[:, None] + shift[:, None]


def channel_sums(g, x, mean):
    """sum(g) and sum(g * (x - mean)) of every channel: (2, channels). The cotangents of shift and scale above."""
    return np.stack([np.sum(g, axis=(0, 2)), np.sum(g * (x - mean[:, None]), axis=(0, 2))])


def normalize(x, weight, bias, eps, centred):
    """(x - mean) * rstd * weight + bias for every row, with rstd = 1 / sqrt(mean((x - mean)^2) + eps); mean and rstd.

    weight, bias: (n,), or None. centred: whether the mean is subtracted; else it is 0 (RMS norm). mean, rstd: (...).
    """
    mean = np.mean(x, axis=-1) if centred else np.zeros_like(x[..., 0])
    z = x - mean[..., None]
    rstd = 1 / np.sqrt(np.mean(z * z, axis=-1) + eps)
    y = z * rstd[..., None]
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, rstd


def normalize_vjp(g, x, weight, mean, rstd, centred):
    """The cotangents of x, weight and bias, given that of the result of `normalize`.

    With u = g * weight and z = (x - mean) * rstd that of x is rstd * (u - mean(u) - z * mean(u * z)), without mean(u)
    where it is not centred. Those of weight and bias, (n,), are the sums of g * z and of g over all rows.
    """
    z = (x - mean[..., None]) * rstd[..., None]
    u = g if weight is None else g * weight
    dx = u - z * np.mean(u * z, axis=-1, keepdims=True)
    dx = dx - np.mean(u, axis=-1, keepdims=True) if centred else dx
    rows = tuple(range(x.ndim - 1))
    return dx * rstd[..., None], np.sum(g * z, axis=rows), np.sum(g, axis=rows)
