"""The data plane's thread uses one core for torch; no other thread is affected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from fusion.threads import use_one_thread


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_a_thread(work: Callable[[], int]) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def limited() -> int:
    use_one_thread()
    return torch.get_num_threads()


def test_the_calling_thread_gets_one() -> None:
    assert in_a_thread(limited) == 1


def test_the_calling_thread_gets_one_though_it_has_used_torch_before() -> None:
    def used_before() -> int:
        torch.ones(10**6).add_(1.0)
        return limited()

    assert in_a_thread(used_before) == 1


def test_threads_that_are_there_keep_theirs() -> None:
    in_a_thread(limited)
    assert torch.get_num_threads() == 3


def test_threads_that_come_later_get_the_default() -> None:
    in_a_thread(limited)
    assert in_a_thread(torch.get_num_threads) == 3


def test_a_second_thread_changes_nothing_either() -> None:
    in_a_thread(limited)
    assert in_a_thread(limited) == 1
    assert in_a_thread(torch.get_num_threads) == 3
