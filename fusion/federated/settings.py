"""The settings of `scripts/train_federated.py`: names, defaults and bounds of `configs/federated.yaml`.

`load` is called once, before anything is started. Every part that can be wrong is
built once there, so a bad value is an error before the first round.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta, Struct

from coordinator.errors import ConfigError
from fusion.federated.async_rules import AsyncRule
from fusion.federated.async_rules import FedAsync as FedAsyncRule
from fusion.federated.async_rules import FedBuff as FedBuffRule
from fusion.federated.server_optimizers import FedAdagrad as FedAdagradServer
from fusion.federated.server_optimizers import FedAdam as FedAdamServer
from fusion.federated.server_optimizers import FedAvg as FedAvgServer
from fusion.federated.server_optimizers import FedAvgM as FedAvgMServer
from fusion.federated.server_optimizers import FedYogi as FedYogiServer
from fusion.federated.server_optimizers import ServerOptimizer
from fusion.federated.staleness import Staleness
from fusion.federated.uplink import compressor_of

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the file; a key it does not know is an error."""


class Data(_Section, frozen=True):
    """How the digits are split."""

    clients: Count = 8
    alpha: Positive = 0.5
    """Concentration of the Dirichlet distribution; smaller is less alike."""
    test_share: Annotated[float, Meta(gt=0, lt=1)] = 0.2


class Devices(_Section, frozen=True):
    """How fast the simulated devices are."""

    slowness: Annotated[float, Meta(ge=1, le=1e6)] = 1.0
    """Of all devices, relative to this machine."""
    slower: dict[int, Annotated[float, Meta(ge=1, le=1e6)]] = {}
    """Clients that are so many times slower than the others."""
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0


class Training(_Section, frozen=True):
    """What a client does with a model."""

    epochs: Count = 1
    batch_size: Count = 32
    lr: Positive = 0.1
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    proximal: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class Goal(_Section, frozen=True):
    """When a run is over."""

    accuracy: Share = 0.9
    seconds: Positive = 60.0


class FedAvg(_Section, frozen=True, tag_field="method", tag="fedavg"):
    """See `server_optimizers.FedAvg`."""

    lr: float = 1.0

    def build(self) -> ServerOptimizer:
        """The optimizer."""
        return FedAvgServer(self.lr)


class FedAvgM(_Section, frozen=True, tag_field="method", tag="fedavgm"):
    """See `server_optimizers.FedAvgM`."""

    lr: float = 1.0
    momentum: float = 0.9

    def build(self) -> ServerOptimizer:
        """The optimizer."""
        return FedAvgMServer(self.lr, self.momentum)


class _Adaptive(_Section, frozen=True):
    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3


class FedAdam(_Adaptive, frozen=True, tag_field="method", tag="fedadam"):
    """See `server_optimizers.FedAdam`."""

    def build(self) -> ServerOptimizer:
        """The optimizer."""
        return FedAdamServer(self.lr, self.beta1, self.beta2, self.tau)


class FedYogi(_Adaptive, frozen=True, tag_field="method", tag="fedyogi"):
    """See `server_optimizers.FedYogi`."""

    def build(self) -> ServerOptimizer:
        """The optimizer."""
        return FedYogiServer(self.lr, self.beta1, self.beta2, self.tau)


class FedAdagrad(_Section, frozen=True, tag_field="method", tag="fedadagrad"):
    """See `server_optimizers.FedAdagrad`."""

    lr: float = 0.1
    beta1: float = 0.0
    tau: float = 1e-3

    def build(self) -> ServerOptimizer:
        """The optimizer."""
        return FedAdagradServer(self.lr, self.beta1, self.tau)


Server = FedAvg | FedAvgM | FedAdam | FedYogi | FedAdagrad


class _Run(_Section, frozen=True):
    name: str
    compression: str | None = None


class Sync(_Run, frozen=True, tag_field="method", tag="sync"):
    """Rounds in which all chosen clients are waited for."""

    fraction: Share = 1.0
    server: Server = FedAvg()

    def build(self) -> ServerOptimizer:
        """The server optimizer."""
        return self.server.build()


class _Async(_Run, frozen=True):
    staleness: Staleness = Staleness()
    max_staleness: Annotated[int, Meta(ge=0)] | None = None
    concurrency: Count | None = None


class FedAsync(_Async, frozen=True, tag_field="method", tag="fedasync"):
    """See `async_rules.FedAsync`."""

    mixing: float = 0.6

    def build(self) -> AsyncRule:
        """The rule."""
        return FedAsyncRule(self.mixing, self.staleness)


class FedBuff(_Async, frozen=True, tag_field="method", tag="fedbuff"):
    """See `async_rules.FedBuff`."""

    size: Count = 4
    server: Server = FedAvg()

    def build(self) -> AsyncRule:
        """The rule."""
        return FedBuffRule(self.size, self.server.build(), self.staleness)


Run = Sync | FedAsync | FedBuff


class FederatedSettings(_Section, frozen=True):
    """The whole file."""

    seeds: Annotated[tuple[int, ...], Meta(min_length=1)] = (0,)
    """One training of every run for each; the table shows medians."""
    data: Data = Data()
    devices: Devices = Devices()
    training: Training = Training()
    goal: Goal = Goal()
    runs: Annotated[tuple[Run, ...], Meta(min_length=1)] = (Sync(name="synchronous"),)


def load(path: str | os.PathLike[str]) -> FederatedSettings:
    """Read and check the settings of a YAML file.

    Raises:
        ConfigError: it cannot be read, has a key that does not exist, or a value that cannot be used;
            names the file and the place.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            found = _read(yaml.SafeLoader(stream.read()), os.fspath(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {error}") from error
    return check(found if found is not None else {}, os.fspath(path))


def _read(loader: yaml.SafeLoader, place: str) -> Any:
    node = loader.get_single_node()
    if node is None:
        return None
    _require_single_keys(node, place)
    return loader.construct_document(node)


def _require_single_keys(node: yaml.Node, place: str) -> None:
    """YAML forbids a key twice in a mapping, but the library takes the last one."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"{place}:{line}: {key.value!r} is set twice; remove one")
            seen.add(key.value)
            _require_single_keys(value, place)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _require_single_keys(item, place)


def check(found: Any, place: str = "settings") -> FederatedSettings:
    """The settings in a mapping.

    Raises:
        ConfigError: as for `load`; names `place`.
    """
    try:
        settings = msgspec.convert(found, FederatedSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}") from None
    names = [run.name for run in settings.runs]
    if len(set(names)) < len(names):
        raise ConfigError(f"{place}: every run needs a name of its own; got {names}")
    absent = [client for client in settings.devices.slower if not 0 <= client < settings.data.clients]
    if absent:
        raise ConfigError(
            f"{place}: devices.slower names clients {absent}; there are 0 to {settings.data.clients - 1}"
        )
    for run in settings.runs:
        try:
            run.build()
            compressor_of(run.compression)
        except ValueError as error:
            raise ConfigError(f"{place}: run {run.name!r}: {error}") from error
    return settings
