"""Process sets: how they are made, and that every operation keeps to its set."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from mpi4py import MPI

from tests.conftest import RunRanks
from tests.mpi.plane import draw
from tests.ranks import ranks


@pytest.fixture
def halves(hvd: ModuleType) -> Iterator[list]:
    """The set of the even ranks and that of the odd ones, registered."""
    made = [hvd.add_process_set(range(start, hvd.size(), 2)) for start in (0, 1)]
    yield made
    for each in made:
        assert hvd.remove_process_set(each)


@pytest.fixture
def mine(hvd: ModuleType, halves: list) -> object:
    """The one of the two that this rank is in."""
    return halves[hvd.rank() % 2]


@ranks(1, 2)
def test_the_set_of_all_ranks_is_always_there(hvd: ModuleType) -> None:
    everyone = hvd.global_process_set
    assert everyone.process_set_id == 0
    assert everyone.ranks == list(range(hvd.size()))
    assert (everyone.rank(), everyone.size(), everyone.included()) == (hvd.rank(), hvd.size(), True)
    assert not hvd.remove_process_set(everyone)
    assert hvd.get_process_set_ids_and_ranks() == {0: everyone.ranks}


@ranks(3)
def test_a_set_knows_its_ranks_and_this_ones_place(hvd: ModuleType) -> None:
    outer = hvd.ProcessSet([2, 0])
    assert (outer.process_set_id, outer.size(), outer.rank()) == (None, None, None)
    assert outer.ranks == [0, 2]
    assert outer.included() == (hvd.rank() != 1)
    assert hvd.add_process_set(outer) is outer
    assert outer.size() == 2
    assert hvd.get_process_set_ids_and_ranks()[outer.process_set_id] == [0, 2]
    if outer.included():
        assert outer.rank() == hvd.rank() // 2
    else:
        with pytest.raises(ValueError, match="rank 1 is not in the process set of ranks \\[0, 2\\]"):
            outer.rank()
    assert hvd.remove_process_set(outer)
    assert not hvd.remove_process_set(outer)
    assert (outer.process_set_id, outer.size()) == (None, None)
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2]}


@ranks(2)
def test_sets_of_the_same_ranks_are_equal(hvd: ModuleType) -> None:
    assert hvd.ProcessSet([1, 0]) == hvd.ProcessSet(range(2)) == hvd.global_process_set
    assert hvd.ProcessSet([0]) != hvd.ProcessSet([1])
    assert len({hvd.ProcessSet([0]), hvd.ProcessSet([0])}) == 1
    single = hvd.ProcessSet([1])
    assert copy.deepcopy(single) is single
    assert pickle.loads(pickle.dumps(single)) == single
    assert pickle.loads(pickle.dumps(hvd.global_process_set)) is hvd.global_process_set


@ranks(2)
def test_what_is_no_set_of_ranks_is_refused(hvd: ModuleType) -> None:
    for wrong in (3, [0.5], ["a"], None):
        with pytest.raises(ValueError, match="list of ranks or an mpi4py communicator"):
            hvd.ProcessSet(wrong)
    for wrong in ([], [0, 0], [0, 2], [-1]):
        with pytest.raises(ValueError, match="different ranks from 0 to 1"):
            hvd.add_process_set(wrong)
    with pytest.raises(ValueError, match="ranks \\[0, 1\\] already"):
        hvd.add_process_set([0, 1])
    with pytest.raises(NotImplementedError, match="communicator"):
        hvd.add_process_set(hvd.ProcessSet(MPI.COMM_SELF))
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0]))
    with pytest.raises(TypeError, match="must be a ProcessSet, not list"):
        hvd.allreduce(torch.ones(1), process_set=[0])


@ranks(3)
def test_a_rank_outside_of_a_set_is_told_at_once(hvd: ModuleType, halves: list) -> None:
    foreign = halves[(hvd.rank() + 1) % 2]
    one = torch.ones(2)
    calls = [
        lambda: hvd.allreduce(one, process_set=foreign),
        lambda: hvd.grouped_allreduce_async([one], process_set=foreign),
        lambda: hvd.allgather(one, process_set=foreign),
        lambda: hvd.broadcast(one, 0, process_set=foreign),
        lambda: hvd.alltoall(one, process_set=foreign),
        lambda: hvd.reducescatter(one, process_set=foreign),
        lambda: hvd.barrier(process_set=foreign),
        lambda: hvd.broadcast_object(1, process_set=foreign),
        lambda: hvd.allgather_object(1, process_set=foreign),
        lambda: hvd.broadcast_parameters([one], 0, process_set=foreign),
        lambda: hvd.sparse_allreduce_async(one.to_sparse(), process_set=foreign),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"rank {hvd.rank()} is not in the process set"):
            call()


@ranks(2, 3, 4)
def test_every_operation_keeps_to_its_set(hvd: ModuleType, mine: object) -> None:
    members, place, size = mine.ranks, mine.rank(), mine.size()
    one = torch.tensor([float(hvd.rank())])
    assert hvd.allreduce(one, op=hvd.Sum, process_set=mine).item() == sum(members)
    assert hvd.allreduce(one, process_set=mine).item() == sum(members) / size
    assert [each.item() for each in hvd.grouped_allreduce([one, one], process_set=mine)] == [
        sum(members) / size
    ] * 2
    assert hvd.allgather(one, process_set=mine).tolist() == members
    assert hvd.broadcast(one, members[-1], process_set=mine).item() == members[-1]
    rows, received = hvd.alltoall(one.repeat(size), splits=[1] * size, process_set=mine)
    assert (rows.tolist(), received.tolist()) == (members, [1] * size)
    shared = hvd.reducescatter(torch.arange(size) * (hvd.rank() + 1), op=hvd.Sum, process_set=mine)
    assert shared.tolist() == [place * sum(rank + 1 for rank in members)]
    table = torch.sparse_coo_tensor([[hvd.rank()]], [2.0], (hvd.size(),))
    summed = hvd.synchronize(hvd.sparse_allreduce_async(table, process_set=mine))
    assert summed.to_dense().tolist() == [2 / size if r in members else 0 for r in range(hvd.size())]
    assert hvd.broadcast_object(hvd.rank(), members[0], process_set=mine) == members[0]
    assert hvd.allgather_object(hvd.rank(), process_set=mine) == members
    weight = torch.full((2,), float(hvd.rank()))
    hvd.broadcast_parameters({"w": weight}, members[-1], process_set=mine)
    assert weight.tolist() == [members[-1]] * 2
    hvd.barrier(process_set=mine)


@ranks(4)
def test_adasum_needs_a_power_of_two_of_ranks_in_the_set_only(hvd: ModuleType) -> None:
    sets = [hvd.add_process_set(members) for members in ([1, 3], [0, 1, 2])]
    two, three = sets
    if two.included():
        unit = torch.eye(4)[hvd.rank()]
        assert hvd.allreduce(unit, op=hvd.Adasum, process_set=two).tolist() == [0, 1, 0, 1]
    if three.included():
        with pytest.raises(NotImplementedError, match="there are 3"):
            hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=three)
    for each in sets:
        hvd.remove_process_set(each)


@ranks(3)
def test_gradients_are_those_of_the_set(hvd: ModuleType, mine: object) -> None:
    members, size = mine.ranks, mine.size()
    here = float(hvd.rank() + 1)

    def gradient(run: object) -> list[float]:
        leaf = torch.ones(size, requires_grad=True)
        (run(leaf) * here).sum().backward()
        return leaf.grad.tolist()

    total = sum(rank + 1 for rank in members)
    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=mine)) == [total] * size
    assert gradient(lambda x: hvd.allgather(x, process_set=mine)) == [total / size] * size
    root = members[0]
    expected = total / size if hvd.rank() == root else 0.0
    assert gradient(lambda x: hvd.broadcast(x, root, process_set=mine)) == [expected] * size
    assert gradient(lambda x: hvd.alltoall(x, process_set=mine)) == [rank + 1 for rank in members]
    scattered = [(rank + 1) * size for rank in members]
    assert gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=mine)) == scattered


@ranks(3)
def test_a_root_is_a_rank_among_all_ranks(hvd: ModuleType, halves: list) -> None:
    outer = halves[0]
    if outer.included():
        with pytest.raises(ValueError, match="root_rank is 1, but the process set has ranks \\[0, 2\\]"):
            hvd.broadcast(torch.ones(1), 1, process_set=outer)


@ranks(3)
def test_sets_overlap_and_share_names_without_waiting_for_each_other(hvd: ModuleType) -> None:
    sets = [hvd.add_process_set(members) for members in ([0, 1], [1, 2], [0])]
    order = sets if hvd.rank() else sets[::-1]
    handles = {}
    for each in order:
        if each.included():
            value = torch.tensor([1.0 + hvd.rank()])
            handles[each.process_set_id] = hvd.allreduce_async(
                value, name="same", op=hvd.Sum, process_set=each
            )
    everyone = hvd.allreduce(torch.ones(1), name="same", op=hvd.Sum).item()
    assert everyone == 3
    sums = [3.0, 5.0, 1.0]
    for each, total in zip(sets, sums, strict=True):
        if each.included():
            assert hvd.synchronize(handles[each.process_set_id]).item() == total
    for each in sets:
        hvd.remove_process_set(each)


@ranks(3)
def test_sets_may_be_nested(hvd: ModuleType) -> None:
    inner, outer = hvd.add_process_set([2]), hvd.add_process_set([1, 2])
    value = torch.tensor([2.0 ** hvd.rank()])
    if inner.included():
        value = hvd.allreduce(value, process_set=inner)
    if outer.included():
        value = hvd.allreduce(value, process_set=outer)
    assert hvd.allgather(value).tolist() == [1, 3, 3]
    for each in (inner, outer):
        hvd.remove_process_set(each)


@ranks(3)
def test_an_error_in_a_set_names_ranks_among_all(hvd: ModuleType) -> None:
    outer = hvd.add_process_set([0, 2])
    if outer.included():
        with pytest.raises(hvd.MismatchError, match=r"rank 0: shape .*; rank 2: shape") as caught:
            hvd.allreduce(torch.ones(hvd.rank() + 1), name="uneven", process_set=outer)
        assert "rank 1:" not in str(caught.value)
    hvd.remove_process_set(outer)


@ranks(2)
def test_what_is_pending_in_a_removed_set_fails_and_its_number_is_not_used_again(hvd: ModuleType) -> None:
    pair = hvd.add_process_set([1])
    number = pair.process_set_id
    other = hvd.add_process_set([0])
    lonely = None
    hvd.remove_process_set(other)
    again = hvd.add_process_set([0])
    assert again.process_set_id not in (number, other.process_set_id)
    if pair.included():
        lonely = hvd.allreduce(torch.ones(1), process_set=pair)
        assert lonely.item() == 1
    hvd.remove_process_set(pair)
    hvd.remove_process_set(again)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=pair)


@ranks(3)
@pytest.mark.parametrize("buckets", ["dynamic", "static"])
def test_an_optimizer_reduces_over_its_set_and_leaves_other_ranks_alone(
    hvd: ModuleType, halves: list, buckets: str
) -> None:
    outer = halves[0]
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    alone = [copy.deepcopy(model) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        process_set=outer,
        buckets=buckets,
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.rank() % 2, process_set=halves[hvd.rank() % 2])
    for seed in range(3):
        optimizer.zero_grad()
        model(draw(hvd.rank(), 8, 4, seed=seed)).square().mean().backward()
        optimizer.step()
        for rank, each in enumerate(alone):
            each.zero_grad()
            each(draw(rank, 8, 4, seed=seed)).square().mean().backward()
        for trio in zip(*(each.parameters() for each in alone), strict=True):
            average = (trio[0].grad + trio[2].grad) / 2
            for parameter, grad in zip(trio, (average, trio[1].grad, average), strict=True):
                parameter.data.sub_(grad, alpha=0.1)
    torch.testing.assert_close(model.state_dict(), alone[hvd.rank()].state_dict())


@ranks(2, 3)
def test_init_registers_sets_of_ranks_and_of_communicators(hvd: ModuleType) -> None:
    hvd.shutdown()
    size, parity = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank % 2
    comm = MPI.COMM_WORLD.Split(parity, MPI.COMM_WORLD.rank)
    split, last = hvd.ProcessSet(comm), hvd.ProcessSet([size - 1])
    assert split.ranks is None
    hvd.init(MPI.COMM_WORLD, process_sets=[split, last] if size == 3 else [split])
    evens, odds = list(range(0, size, 2)), list(range(1, size, 2))
    table = {0: list(range(size)), 1: evens, 2: odds}
    assert hvd.get_process_set_ids_and_ranks() == (table | {3: [2]} if size == 3 else table)
    assert split.ranks == (odds if parity else evens)
    assert split.process_set_id == 1 + parity
    assert hvd.global_process_set.mpi_comm == MPI.COMM_WORLD
    assert hvd.allgather(torch.tensor([hvd.rank()]), process_set=split).tolist() == split.ranks
    comm.Free()


@ranks(2)
def test_init_refuses_duplicates_and_may_be_called_again(hvd: ModuleType) -> None:
    hvd.shutdown()
    first, everyone, again = hvd.ProcessSet([1]), hvd.ProcessSet([1, 0]), hvd.ProcessSet([1])
    with pytest.raises(ValueError, match="entries \\[1, 2\\]"):
        hvd.init(process_sets=[first, everyone, again])
    assert again.process_set_id is None
    hvd.init(process_sets=[hvd.ProcessSet([0]), first])
    assert first.process_set_id == 1
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1], 1: [1], 2: [0]}
    with pytest.raises(TypeError, match="list of ProcessSet"):
        hvd.init(process_sets=[[0]])
    with pytest.raises(ValueError, match="different process sets as entry 0"):
        hvd.init(process_sets=[hvd.ProcessSet([hvd.rank()])])
    hvd.init(process_sets="dynamic")


@ranks(2)
def test_sets_end_with_their_runtime(hvd: ModuleType) -> None:
    single = hvd.ProcessSet([1])
    hvd.init(process_sets=[single])
    hvd.shutdown()
    hvd.init()
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1]}
    with pytest.raises(ValueError, match="not registered"):
        hvd.barrier(process_set=single)
    assert not hvd.remove_process_set(single)
    assert hvd.add_process_set([1]).process_set_id == 1


@ranks(2, 3)
def test_scripts_can_ask_what_there_is(hvd: ModuleType) -> None:
    assert hvd.mpi_built()
    assert hvd.mpi_enabled()
    assert hvd.mpi_threads_supported()
    assert hvd.is_homogeneous() == (len(set(hvd.allgather_object(hvd.local_size()))) == 1)
    absent = (hvd.gloo_built, hvd.gloo_enabled, hvd.rocm_built, hvd.ddl_built, hvd.ccl_built)
    assert not any(each() for each in absent)
    assert type(hvd.nccl_built()) is int


UNSTARTED = """
import mpi4py
mpi4py.rc.initialize = False
import torch
import fusion.torch as hvd
last = hvd.ProcessSet([1])
hvd.init(process_sets=[last])
print(hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), last.process_set_id)
"""


def test_a_program_may_leave_starting_and_ending_mpi_to_init(run_ranks: RunRanks) -> None:
    done = run_ranks(UNSTARTED, 2, timeout=60)
    assert all("2.0 1" in output for output in done.outputs)


WITHOUT_THREADS = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
import fusion.torch as hvd
hvd.init()
assert not hvd.mpi_threads_supported()
try:
    hvd.add_process_set([0])
except hvd.FusionError as error:
    print(error)
"""


def test_a_set_needs_an_mpi_that_many_threads_may_call(run_ranks: RunRanks) -> None:
    done = run_ranks(WITHOUT_THREADS, 2, timeout=60)
    assert all("MPI_THREAD_MULTIPLE" in output for output in done.outputs)
