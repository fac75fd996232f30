"""`DistributedOptimizer`: a torch optimizer whose gradients are reduced over all ranks before each step.

The wrapper is an instance of a class derived from the optimizer's own, and
shares its attributes with it, so `isinstance`, learning-rate schedulers, AMP and
checkpoints see the optimizer they know, whether they got hold of it before or
after it was wrapped. Used on the thread that trains.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from coordinator.messages import ReduceOp
from fusion import runtime
from fusion.torch.carrier import Wire
from fusion.torch.choice import Buckets, carrier_maker
from fusion.torch.compressed import real_shape
from fusion.torch.compressing import Compressing, compressing_of
from fusion.torch.ops import allreduce, allreduce_async_
from fusion.torch.process_sets import ProcessSet, global_process_set, group_of, number_of
from fusion.torch.slots import Slot, check_parameters, names_of, reducible
from fusion.torch.submission import check_op
from fusion.torch.window import Idle, Window


class _Distributed:
    """What a wrapper adds to the optimizer class it derives from."""

    _window: Window
    _parameter_names: dict[torch.Tensor, str]
    _explicit: bool
    """`synchronize` was called by the user, and no step has followed yet."""
    _skipping: bool
    _compressing: Compressing | None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups.

        Whoever reads these between `backward` and `step` (a gradient scaler, a
        clipping loop) is about to look at gradients, so reductions in flight are
        completed first.
        """
        window = self.__dict__.get("_window")
        if window is not None and window.reads_must_wait:
            window.settle(keep=True)
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes are added up before a gradient is reduced."""
        return self._window.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change `backward_passes_per_step`, from the next backward pass on."""
        _check_passes(passes)
        self._window.passes = passes

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, so that they can be read, clipped or changed.

        Every rank must call it. A step that follows inside `skip_synchronize()`
        uses the gradients as they then are.
        """
        if not self._window.settled:
            self._window.settle(keep=True)
        self._explicit = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this, `step` does not reduce gradients: `synchronize` has."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, unless that is done, and update the parameters.

        Args:
            closure: computes the loss and its gradients anew, as for the plain
                optimizer; the gradients are reduced after each call.
        """
        self._opt_called = True  # What a learning-rate scheduler looks for.
        if closure is not None:
            closure = self._reducing(closure)
        elif not self._skipping:
            if self._explicit and self._window.settled:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): the gradients are not reduced again. Put step() inside the "
                    "context to silence this",
                    stacklevel=2,
                )
            elif not self._window.settled:
                self._window.settle(keep=True)
        result = super().step() if closure is None else super().step(closure)  # type: ignore[misc]
        self._explicit = self._window.settled = False
        return result

    # torch patches `step` of a class when an optimizer is copied or loaded; the
    # base class's `step` runs the hooks already.
    step.hooked = True  # type: ignore[attr-defined]

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose gradients are reduced; for L-BFGS, which decides by the loss, the loss is too."""
        averages_loss = isinstance(self, torch.optim.LBFGS)

        def reducing() -> Any:
            loss = closure()
            self._window.settle(keep=True)
            if averages_loss and self._window.process_set.included():
                return allreduce(torch.as_tensor(loss).detach(), process_set=self._window.process_set)
            return loss

        return reducing

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw the gradients away, also those whose reduction is still in flight.

        Every rank must do so or none: parameters would differ afterwards.
        """
        self._window.forget()
        self._explicit = False
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are reduced from now on. Every rank must do so."""
        super().add_param_group(param_group)  # type: ignore[misc]
        number = len(self.param_groups) - 1
        new = names_of([{"params": []}] * number + [self.param_groups[number]], None)
        check_parameters(new)
        start = len(self._parameter_names)
        self._parameter_names.update(new)
        self._window.add(_slots(new, start))

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and, under "compression", what this rank remembers for error feedback."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        if self._compressing is not None:
            state["compression"] = self._compressing.state_dict(*self._place())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and forget gradients of before.

        Raises:
            ValueError: it is of another model.
        """
        self._window.forget()
        self._explicit = False
        plain = {key: value for key, value in state_dict.items() if key != "compression"}
        if self._compressing is not None and "compression" in state_dict:
            shapes = {name: real_shape(parameter) for parameter, name in self._parameter_names.items()}
            self._compressing.load_state_dict(state_dict["compression"], shapes, *self._place())
        elif self._compressing is not None:
            self._compressing.forget()
        super().load_state_dict(plain)  # type: ignore[misc]

    def _place(self) -> tuple[int, int]:
        """This rank among those that gradients are reduced over, and how many they are."""
        process_set = self._window.process_set
        if not process_set.included():
            return -1, process_set.size() or 0
        topology = group_of(process_set).topology
        return topology.rank, topology.size

    def __reduce__(self) -> Any:
        """A copy or a pickle is the plain optimizer: hooks belong to this process and these parameters."""
        plain_class: Any = type(self).__bases__[-1]
        plain = plain_class.__new__(plain_class)
        plain.__dict__.update({key: value for key, value in self.__dict__.items() if key not in _OWN})
        return plain_class.__new__, (plain_class,), plain.__getstate__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As `__reduce__`, whatever the protocol."""
        return self.__reduce__()


_OWN = ("_window", "_compressing", "_parameter_names", "_explicit", "_skipping", "_scope", "step")
_Distributed.__name__ = "DistributedOptimizer"


class _DistributedAdasum(_Distributed):
    """The same for Adasum: every rank steps by itself, and what the steps changed is combined.

    So momentum and the like stay each rank's own. Its window is idle.
    """

    _scope: tuple[Any, str] | None = None

    def synchronize(self) -> None:
        """Do nothing: gradients are not reduced, only what the step makes of them."""

    def skip_synchronize(self) -> NoReturn:
        """Not possible with Adasum.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "skip_synchronize() has no meaning with op=Adasum: gradients stay this rank's own and can be "
            "clipped without it; what step() changes is combined in step()"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by this rank's gradients, then combine the changes of all ranks."""
        slots = _slots(self._parameter_names, 0)
        slots = [slot for slot in slots if slot.parameter.requires_grad]
        starts = [slot.parameter.detach().clone() for slot in slots]
        result = super().step(closure)
        if self._window.process_set.included():
            with torch.no_grad():
                self._combine(slots, starts)
        return result

    step.hooked = True  # type: ignore[attr-defined]

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        return closure  # How often a local step calls it is its own affair.

    def _combine(self, slots: Sequence[Slot], starts: Sequence[torch.Tensor]) -> None:
        scope, process_set = self._names_scope(), self._window.process_set
        compression = self._window.compression
        under_way = []
        for slot, start in zip(slots, starts, strict=True):
            change = slot.parameter.detach() - start
            values = torch.view_as_real(change) if change.is_complex() else change
            sent, ctx = compression.compress(values)
            name = f"{scope}{slot.name}"
            handle = allreduce_async_(sent, name=name, op=ReduceOp.ADASUM, process_set=process_set)
            under_way.append((handle, sent, ctx))
        for (handle, sent, ctx), slot, start in zip(under_way, slots, starts, strict=True):
            handle.result()
            change = compression.decompress(sent, ctx)
            slot.parameter.copy_(start + (torch.view_as_complex(change) if start.is_complex() else change))

    def _names_scope(self) -> str:
        """First part of all names, unique to the optimizer in the runtime that runs."""
        current = runtime.current()
        if self._scope is None or self._scope[0]() is not current:
            unique = group_of(self._window.process_set).unnamed("adasum_optimizer", blocking=False)
            self._scope = weakref.ref(current), f"{unique}."
        return self._scope[1]


def DistributedOptimizer(  # noqa: N802, PLR0917, the name and order that scripts use
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    buckets: Buckets | None = None,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Wrap an optimizer so that gradients are reduced over all ranks before each step.

    Gradients are reduced while the backward pass is still running. Every rank
    must construct its wrappers in the same order and step them equally often.
    A parameter that only some ranks used gets the sum of their gradients over
    all ranks' number; one that no rank used keeps the gradient it had.

    The gradients of several backward passes are added up, also by `step()` before
    all of them have run; divide the loss by their number for an average over the
    whole batch, or set `average_aggregated_gradients`.

    Args:
        optimizer: the optimizer. Its state and groups are shared with the wrapper.
        named_parameters: names for the parameters, usually `model.named_parameters()`.
        compression: a method of `fusion.compression` such as `topk(0.01)`, its specification "topk:0.01",
            or a `Policy` with rules and warm-up; or one of `Compression`. Default: the setting `compression`.
        backward_passes_per_step: passes that are added up before a reduction.
        op: `Average` or `Sum`; `Min`, `Max` and `Product` work too. `Adasum`: every rank
            steps by its own gradients, and the changes of the parameters are combined, so
            `step` must be called on every rank alike; gradients are not reduced, and
            `backward_passes_per_step`, `groups` and `sparse_as_dense` have no effect.
        gradient_predivide_factor: with `Average`, divide by this before the sum and
            by size / this after it.
        num_groups: older name of `groups`.
        groups: reduce gradients in this many groups, or in these lists of
            parameters, each as one request.
        sparse_as_dense: reduce sparse gradients as dense ones; cheaper if most rows
            are used.
        process_set: the ranks that take part; on the others the optimizer steps by its own
            gradients.
        buckets: "dynamic": what is ready at the same time is fused. "static": gradients
            live in fixed buckets of shared memory. Default: the setting `buckets`.
        average_aggregated_gradients: divide by `backward_passes_per_step`.

    Returns:
        An instance of a subclass of the optimizer's class, with `synchronize()`,
        `skip_synchronize()` and `set_backward_passes_per_step()` beside its methods.

    Raises:
        ValueError: names are not unique or not complete; parameters are sharded;
            options contradict each other.
    """
    number_of(process_set)
    if isinstance(optimizer, _Distributed):
        raise ValueError(  # noqa: TRY004, the value is wrong, not its type
            "this optimizer is wrapped already: wrapping it again would reduce twice"
        )
    _check_passes(backward_passes_per_step)
    if gradient_predivide_factor != 1.0 and op != ReduceOp.AVERAGE:
        raise ValueError(
            "gradient_predivide_factor splits the division of op=Average; leave it out with another op"
        )
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    size = process_set.size() or 1
    check_op(op, (), "DistributedOptimizer", size)
    if op == ReduceOp.ADASUM and size == 1:
        op = ReduceOp.AVERAGE  # Nothing to combine; a step is then exactly the plain optimizer's.
    names = names_of(optimizer.param_groups, named_parameters)
    check_parameters(names)
    passes = backward_passes_per_step if average_aggregated_gradients else 1
    predivide = float(gradient_predivide_factor)
    cast, compressing = compressing_of(compression, op)
    terms = "" if compressing is None else compressing.policy.terms
    wire = Wire(op, 1.0 / (predivide * passes), predivide, cast, process_set, terms)
    slots = _slots(names, 0)
    make_carrier = carrier_maker(wire, buckets, groups, slots, compressing)
    idle = op == ReduceOp.ADASUM or not process_set.included()
    window_class = Idle if idle else Window
    window = window_class(slots, wire, backward_passes_per_step, make_carrier, sparse_as_dense)
    addition = _DistributedAdasum if op == ReduceOp.ADASUM else _Distributed
    return _wrap(optimizer, names, window, compressing, addition)


def _wrap(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    window: Window,
    compressing: Compressing | None,
    addition: type[_Distributed],
) -> Any:
    plain_class: Any = type(optimizer)
    derived: Any = type(plain_class.__name__, (addition, plain_class), {"__module__": __name__})
    attributes = optimizer.__dict__
    earlier = attributes.get("_window")
    if earlier is not None:
        earlier.close()  # The optimizer had been wrapped before: the new wrapper replaces the old one.
    wrapper = derived.__new__(derived)
    wrapper.__dict__ = attributes
    attributes.update(
        _window=window, _parameter_names=names, _compressing=compressing, _explicit=False, _skipping=False
    )
    if "step" in attributes:
        attributes["step"] = _tracked_step(derived, optimizer, wrapper)
    return wrapper


def _tracked_step(derived: Any, optimizer: Any, wrapper: Any) -> Callable[..., Any]:
    """For a scheduler made before the wrapper: it put a counting `step` of the plain class on the instance.

    Wrapper and optimizer share their attributes, so either will do, and neither is kept alive.
    """
    references = weakref.ref(wrapper), weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        wrapper, optimizer = (reference() for reference in references)
        if wrapper is None:
            wrapper = derived.__new__(derived)
            wrapper.__dict__ = optimizer.__dict__
        return derived.step(wrapper, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _slots(names: dict[torch.Tensor, str], start: int) -> list[Slot]:
    return [
        Slot(parameter, name, start + position)
        for position, (parameter, name) in enumerate(names.items())
        if reducible(parameter)
    ]


def _check_passes(passes: int) -> None:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, not {passes}")
