"""How examples are spread over simulated clients."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def dirichlet_split(labels: Tensor, clients: int, alpha: float, *, seed: int) -> list[Tensor]:
    """Split examples so that every client has its own mixture of classes, and its own number of them.

    For each class, the clients' shares are drawn from a symmetric Dirichlet distribution, as
    in Hsu, Qi and Brown, arXiv 1909.06335, and Yurochkin et al., ICML 2019. A client may end
    up with nothing.

    Args:
        labels: shape (examples,), whole numbers.
        clients: 1 or more.
        alpha: concentration; 100 is nearly even, 0.1 gives most clients one or two classes.
        seed: of the split; the same split for the same seed.

    Returns:
        For each client the indices of its examples, ascending; every index is in exactly one.

    Raises:
        ValueError: a number out of range.
    """
    if clients < 1:
        raise ValueError(f"clients must be 1 or more; got {clients}")
    if not math.isfinite(alpha) or alpha <= 0:
        raise ValueError(f"alpha must be a finite number above 0; got {alpha}")
    generator = np.random.default_rng(seed)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    found = labels.numpy()
    for label in np.unique(found):
        members = generator.permutation(np.flatnonzero(found == label))
        ends = np.cumsum(generator.dirichlet([alpha] * clients))[:-1] * len(members)
        for part, chosen in zip(parts, np.split(members, ends.round().astype(int)), strict=True):
            part.append(chosen)
    return [torch.from_numpy(np.sort(np.concatenate(part))) for part in parts]
