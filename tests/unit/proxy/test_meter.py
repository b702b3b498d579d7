"""Busy stretches of nodes, by a clock of our own."""

from __future__ import annotations

from proxy.meter import BusyMeter


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_node_is_busy_while_at_least_one_generation_lives():
    clock = Clock()
    meter = BusyMeter(clock)
    for now, step in [(1.0, meter.enter), (2.0, meter.enter), (3.0, meter.leave), (5.0, meter.leave)]:
        clock.now = now
        step("run", "a")
    clock.now = 9.0
    assert meter.take() == [("run", "a", 1.0, 5.0)]
    assert meter.take() == []


def test_a_stretch_that_goes_on_is_given_with_the_same_start():
    clock = Clock()
    meter = BusyMeter(clock)
    meter.enter("run", "a")
    for now in (1.0, 2.0):
        clock.now = now
        assert meter.take() == [("run", "a", 0.0, now)]


def test_a_turn_round_between_two_generations_is_no_pause_and_a_real_pause_is():
    clock = Clock()
    meter = BusyMeter(clock)
    for now, step in [(0.0, meter.enter), (1.0, meter.leave), (1.01, meter.enter), (2.0, meter.leave)]:
        clock.now = now
        step("run", "a")
    assert meter.take() == [("run", "a", 0.0, 2.0)]
    clock.now = 3.0
    meter.enter("run", "a")
    clock.now = 4.0
    assert meter.take() == [("run", "a", 0.0, 2.0), ("run", "a", 3.0, 4.0)]
