"""Federated averaging and local updates over the fused transport: `import fusion.federated as fed`.

Needs `fusion.torch.init()` first. docs/federated.md compares the methods.
"""

from __future__ import annotations

from coordinator.errors import ClientError
from fusion.federated.async_rules import FedAsync, FedBuff
from fusion.federated.asynchronous import AsyncFederation, AsyncReport
from fusion.federated.average import fedavg
from fusion.federated.clients import Client, ClientDropped
from fusion.federated.local_sgd import DiLoCo, LocalSGD
from fusion.federated.partition import dirichlet_split
from fusion.federated.rounds import FederatedAveraging, RoundReport
from fusion.federated.sampling import choose_clients
from fusion.federated.server_optimizers import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi
from fusion.federated.serving import Progress
from fusion.federated.staleness import Staleness
from fusion.federated.training import LocalTraining

__all__ = [
    "AsyncFederation",
    "AsyncReport",
    "Client",
    "ClientDropped",
    "ClientError",
    "DiLoCo",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedBuff",
    "FedYogi",
    "FederatedAveraging",
    "LocalSGD",
    "LocalTraining",
    "Progress",
    "RoundReport",
    "Staleness",
    "choose_clients",
    "dirichlet_split",
    "fedavg",
]
