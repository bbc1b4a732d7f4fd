from __future__ import annotations

import threading

from trainer.reporting.backlog import Backlog


def test_items_that_are_put_back_come_before_newer_items() -> None:
    backlog: Backlog[int] = Backlog(10)
    backlog.add(range(4))
    taken = backlog.take(2)
    backlog.add([4])
    backlog.put_back(taken)
    assert backlog.take(10) == [0, 1, 2, 3, 4]
    assert (len(backlog), backlog.dropped) == (0, 0)


def test_the_oldest_items_are_dropped_and_counted_even_if_they_were_put_back() -> None:
    backlog: Backlog[int] = Backlog(3)
    backlog.add(range(5))
    taken = backlog.take(2)
    assert (taken, backlog.dropped) == ([2, 3], 2)
    backlog.add([5, 6])
    backlog.put_back(taken)
    assert backlog.take(10) == [4, 5, 6]
    assert backlog.dropped == 4


def test_no_item_is_lost_or_duplicated_between_two_threads() -> None:
    backlog: Backlog[int] = Backlog(10**6)
    done = threading.Event()

    def hand_over() -> None:
        for number in range(20_000):
            backlog.add([number])
        done.set()

    thread = threading.Thread(target=hand_over)
    thread.start()
    steps: list[int] = []
    while not done.is_set() or backlog:
        taken = backlog.take(100)
        # Half of the attempts fail and put their items back.
        if len(taken) % 2:
            backlog.put_back(taken)
            taken = backlog.take(1)
        steps += taken
    thread.join()
    assert steps == list(range(20_000))
