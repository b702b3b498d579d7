"""An engine's closed forms against step-by-step decoding, and against queueing theory."""

from __future__ import annotations

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from simulated import MODEL

from simulator.engine import Engine
from simulator.measure import NodeClock
from simulator.service import Service, seconds_of, steps_in
from simulator.sessions import Session
from workflows.scheduling.devices import DEVICES

SERVICES = {name: Service(DEVICES[name], MODEL) for name in ("H800", "H20")}


def session(tokens: float, prompt: float = 0) -> Session:
    made = Session(0, 0, prompt, [tokens])
    made.begin_turn()
    return made


class Alone:
    """One engine and what it said."""

    def __init__(self, seats: int = 64, kv: int | None = None, device: str = "H800") -> None:
        self.env = simpy.Environment()
        self.ended: list[tuple[float, Session]] = []
        self.back: list[Session] = []
        self.clock = NodeClock("a", None)
        service = Service(DEVICES[device], MODEL, kv_limit=kv)
        self.engine = Engine(self.env, "a", service, seats, self.clock, self._end, self.back.append)
        self.engine.start(0)

    def _end(self, engine: Engine, sessions: list[Session]) -> None:
        for one in sessions:
            engine.part(one)
            self.ended.append((self.env.now, one))

    def join(self, *sessions: Session) -> None:
        for one in sessions:
            self.engine.join(one)
        self.engine.plan()


@given(
    device=st.sampled_from(sorted(SERVICES)),
    batch=st.integers(1, 256),
    context=st.floats(0, 300_000),
    steps=st.integers(1, 3000),
)
def test_many_steps_take_as_long_as_their_sum(device: str, batch: int, context: float, steps: int) -> None:
    service = SERVICES[device]
    one_by_one = sum(service.step_s(batch, context + batch * (i + 0.5)) for i in range(steps))
    line = service.line(batch)
    at_once = seconds_of(line, batch, context, steps)
    assert at_once == pytest.approx(one_by_one, rel=2e-4)
    assert steps_in(line, batch, context, at_once) == pytest.approx(steps, rel=1e-6)


def test_a_batch_that_shrinks_ends_when_stepping_through_it_says() -> None:
    lengths = [30, 80, 80, 200, 500]
    scene = Alone()
    scene.join(*(session(n) for n in lengths))
    scene.env.run()
    service, expected, now, context, done = SERVICES["H800"], [], 0.0, 0.0, 0
    for length in lengths:
        batch = len(lengths) - len(expected)
        for _ in range(length - done):
            now += service.step_s(batch, context + batch / 2)
            context += batch
        context -= length
        done = length
        expected.append(now)
    assert [at for at, _ in scene.ended] == pytest.approx(expected, rel=1e-3)


def test_what_is_cut_goes_on_from_its_tokens_and_every_token_is_written_once() -> None:
    scene = Alone()
    first, second = session(1000), session(400)
    scene.join(first, second)
    scene.env.run(until=3.0)
    cut = scene.engine.stop()
    assert set(cut) == {first, second}
    assert 0 < first.context < 1000
    assert first.context + first.remaining == pytest.approx(1000)
    assert first.unread == first.context, "its KV is gone: another engine reads it again"
    scene.engine.start(1)
    scene.join(*cut)
    scene.env.run()
    assert {one for _, one in scene.ended} == {first, second}
    assert scene.engine.tokens_written == pytest.approx(1400)


def test_tokens_know_which_weights_wrote_them() -> None:
    scene = Alone()
    one = session(1000)
    scene.join(one)
    scene.env.run(until=2.0)
    scene.engine.hold(1.5, version=3)
    before = 2.0 / SERVICES["H800"].step_s(1, 100)
    scene.env.run()
    assert one.first_version == 0
    assert one.version_tokens == pytest.approx(3 * (1000 - before), rel=0.02)
    assert scene.clock.seconds["sync"] == pytest.approx(1.5)


def test_a_full_cache_puts_the_youngest_back_and_the_oldest_ends() -> None:
    scene = Alone(kv=2000)
    old, young = session(1500), session(1500)
    scene.join(old)
    scene.env.run(until=1.0)
    scene.join(young)
    scene.env.run()
    assert [one for _, one in scene.ended] == [old]
    assert scene.back == [young]
    assert young.remaining == pytest.approx(1500 - young.context)


def test_one_server_with_random_arrivals_waits_as_queueing_theory_says() -> None:
    """M/D/1: one seat, equal sessions, Poisson arrivals: mean wait = rho * service / (2 * (1 - rho))."""
    import numpy as np

    tokens, rho, count = 100, 0.7, 4000
    service_s = seconds_of(SERVICES["H800"].line(1), 1, 0, tokens)
    gaps = np.random.default_rng(1).exponential(service_s / rho, count)
    scene = Alone(seats=1)
    queue: list[tuple[float, Session]] = []
    waits: list[float] = []

    def serve() -> None:
        while queue and scene.engine.accepts(queue[0][1]):
            arrived, one = queue.pop(0)
            waits.append(scene.env.now - arrived)
            scene.join(one)

    def arrive() -> simpy.events.ProcessGenerator:
        for gap in gaps:
            yield scene.env.timeout(gap)
            queue.append((scene.env.now, session(tokens)))
            serve()

    def poll() -> simpy.events.ProcessGenerator:
        seen = 0
        while len(waits) < count or scene.engine.running:
            if len(scene.ended) > seen:
                seen = len(scene.ended)
                serve()
            yield scene.env.timeout(service_s / 50)

    scene.env.process(arrive())
    scene.env.run(scene.env.process(poll()))
    assert sum(waits) / count == pytest.approx(rho * service_s / (2 * (1 - rho)), rel=0.1)
