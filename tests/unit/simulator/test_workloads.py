"""What is drawn is what was asked for; presets say what their sources say."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import AGENT, SHORT

from simulator.laws import Gamma, Lognormal, Mixture
from simulator.presets import preset, presets
from simulator.workload import Workload
from storage.errors import ConfigError


def lengths(workload: Workload, groups: int = 400, size: int = 16, stands_for: int = 1) -> np.ndarray:
    drawn = workload.sessions(1, groups, size, stands_for)
    return np.array([[sum(s.answers) for s in drawn.group(i)] for i in range(groups)])


def test_laws_have_the_quantiles_they_are_named_for() -> None:
    z = np.array([0.0, 1.2816, 1.6449, 2.3263])
    gamma = Gamma(family="gamma", shape=2.596, scale=3689)
    drawn = np.random.default_rng(0).gamma(2.596, 3689, 400_000)
    assert gamma.at(z) == pytest.approx(np.quantile(drawn, [0.5, 0.9, 0.95, 0.99]), rel=0.01)
    assert gamma.mean() == pytest.approx(2.596 * 3689, rel=1e-3)
    plain = Lognormal(family="lognormal", median=100, sigma=0.5)
    assert plain.mean() == pytest.approx(100 * np.exp(0.125), rel=1e-3)
    both = Mixture(family="lognormal_mixture", share=1, median=(100, 5), sigma=(0.5, 2))
    assert both.at(z) == pytest.approx(plain.at(z), rel=1e-3)


@pytest.mark.parametrize("icc", [0.0, 0.5, 0.9])
def test_samples_of_a_task_are_as_alike_as_asked(icc: float) -> None:
    logs = np.log(lengths(SHORT.model_copy(update={"icc": icc})))
    within = logs.var(axis=1, ddof=1).mean()
    assert 1 - within / logs.var() == pytest.approx(icc, abs=0.07)


def test_what_is_too_long_is_cut_at_its_cap() -> None:
    assert lengths(SHORT).max() == 4096
    capped = AGENT.model_copy(update={"context_cap": 800})
    for session in capped.sessions(0, 50, 4).group(3):
        assert session.prompt + sum(session.answers) + sum(session.observations) <= 800
        assert len(session.observations) == len(session.tools_s) == len(session.answers) - 1


def test_lengths_drift() -> None:
    drifting = SHORT.model_copy(update={"drift_per_100_steps": 4.0}).sessions(0, 200, 8)
    means = [np.mean([s.answers[0] for i in range(200) for s in drifting.group(b * 200 + i)]) for b in (0, 50)]
    assert means[1] / means[0] == pytest.approx(2, rel=0.15)


def test_a_sample_that_stands_for_many_has_their_mean_and_their_longest() -> None:
    many, few = lengths(SHORT, groups=3200), lengths(SHORT, groups=100, stands_for=32)
    assert few.mean() == pytest.approx(many.mean(), rel=0.04)
    assert few.max() == many.max()


def test_the_agentic_preset_has_the_context_that_its_sources_report() -> None:
    load = preset("swe-64k").workload
    drawn = load.sessions(0, 100, 8)
    context = [s.prompt + sum(s.answers) + sum(s.observations) for i in range(100) for s in drawn.group(i)]
    assert np.mean(context) == pytest.approx(31_500, rel=0.1)
    assert max(context) <= 65_536


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_keeps_the_load_of_a_node_at_every_size(name: str) -> None:
    given = preset(name)
    for nodes in (4, 32, 64):
        assert given.cluster(nodes).size == nodes
        assert given.groups(nodes) / nodes == pytest.approx(given.groups_per_step / given.nodes, rel=0.1)


def test_an_unknown_preset_is_told_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="math-8k-thinking"):
        preset("maths")
