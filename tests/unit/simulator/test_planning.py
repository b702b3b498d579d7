"""Splits, cohorts, peers and advice."""

from __future__ import annotations

import dataclasses

import pytest
from simulated import AGENT, MODEL, SHORT, cluster, scenario

from simulator.advice import Choice, advise, table
from simulator.cluster import Cluster, Costs, NodeKind
from simulator.cohorts import error, shrunk
from simulator.lending import LENDING, PEERS
from simulator.run import simulate
from simulator.splits import balanced, climb, exhaustive, fewest_trainers, search, with_trainers
from workflows.scheduling.devices import DEVICES


def test_the_search_finds_what_trying_every_split_finds() -> None:
    asked = scenario("off_policy", nodes=20, groups=40, stop_after=4)
    found, all_of_them = search(asked), exhaustive(asked, 2, 19)
    assert found.result.wall_s == pytest.approx(all_of_them.result.wall_s, rel=0.02)
    assert len(found.results) < 18


def test_a_climb_from_a_good_guess_finds_it_with_fewer_simulations() -> None:
    asked = scenario("off_policy", nodes=20, groups=40, stop_after=4)
    found = climb(asked, balanced(asked))
    assert found.result.wall_s == pytest.approx(search(asked).result.wall_s, rel=0.02)
    assert len(found.results) < len(search(asked).results)


def test_of_splits_that_are_as_fast_the_one_that_idles_least_is_the_calmest() -> None:
    found = exhaustive(scenario("multiplexed", nodes=8, groups=16, stop_after=3), 2, 6)
    calmest = found.results[found.calmest(0.05)]
    near = [result for result in found.results.values() if result.wall_s <= 1.05 * found.result.wall_s]
    assert calmest.idle_fraction == min(result.idle_fraction for result in near)
    assert found.calmest(0.0) == found.best


def test_compute_trains_and_bandwidth_rolls_out() -> None:
    kinds = (NodeKind(count=3, device=DEVICES["H20"]), NodeKind(count=2, device=DEVICES["H800"]))
    tagged = list(with_trainers(Cluster(nodes=kinds), 2, MODEL).each())
    assert [node.kind.device.name for node in tagged if "train" in node.tags] == ["H800", "H800"]
    assert all("rollout" in node.tags for node in tagged)


def test_a_gang_holds_weights_gradients_and_optimizer() -> None:
    assert fewest_trainers(cluster(8, 2), MODEL) == 2  # 131 GB on devices of 80 GB, of which 85 % are used


def test_cohorts_are_near_the_exact_run() -> None:
    exact = scenario("multiplexed", SHORT, nodes=64, groups=256, stop_after=4)
    assert shrunk(exact, 16).stands_for == 4
    assert abs(error(exact, 16)) < 0.1


@pytest.mark.parametrize("name", PEERS)
def test_peers_rules_run_to_the_end_and_lend_sometimes(name: str) -> None:
    asked = dataclasses.replace(scenario("multiplexed", AGENT, nodes=8, groups=16, steps=6), lending=LENDING[name])
    result = simulate(asked)
    assert result.trained == 6 * 16 * 4
    assert result.produced == result.trained + result.stale + result.pending
    assert result.seconds["switch"] > 0


def test_nodes_stay_where_changing_over_costs_more_than_it_gains() -> None:
    dear = Costs(rollout_to_train_s=500, train_to_rollout_s=500)
    result = simulate(scenario("multiplexed", nodes=4, steps=5, costs=dear))
    assert result.switches < 5, "after the first change, whose cost was not known, the gang stays"
    assert any("stay" in line for line in result.decisions)


def test_nodes_that_alone_roll_out_return_whatever_it_costs() -> None:
    dear = Costs(rollout_to_train_s=500, train_to_rollout_s=500)
    result = simulate(scenario("multiplexed", trainers=4, steps=4, staleness=4, costs=dear))
    assert result.trained == 4 * 8 * 4, "had they stayed, no batch would have been complete"


def test_advice_says_what_to_do_and_what_it_gains() -> None:
    slow, fast = (Choice(2, simulate(scenario(name, AGENT))) for name in ("disaggregated", "multiplexed"))
    lines = advise({"disaggregated as tagged": slow, "multiplexed": fast}, "disaggregated as tagged", ["a", "b", "c"])
    gain = 1 - fast.result.wall_s / slow.result.wall_s
    assert f"Use pipeline multiplexed with 2 train nodes: {gain:.0%} less time" in lines[0]
    assert lines[1] == "Tags: [rollout, train] for a, b; [rollout] for the others."
    assert advise({"x": fast, "y": fast}, "x", ["a", "b"])[0].startswith("Keep what you have")
    assert len({len(line) for line in table({"x": fast, "y": slow}).splitlines()}) == 1
