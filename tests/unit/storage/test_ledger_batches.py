"""From shards to trained: claims, manifests, checkpoints, rewinds."""

from __future__ import annotations

from typing import Any

import pytest

from storage.errors import FencedError, IntegrityError, NotFoundError
from storage.ledger import TRAIN, Ledger, State

RUN = "demo"


def ordinals(claim: Any) -> list[int]:
    return [group.ordinal for group in claim.groups]


def test_a_step_takes_complete_groups_in_ordinal_order(player: Any) -> None:
    player.admit(9)
    for _ in range(3):
        player.group([0.0, 1.0])
    claim = player.batch(0, 2)
    assert ordinals(claim) == [0, 1]
    group = claim.groups[0]
    assert (group.shard_key, group.sha256, group.start_version) == ("shard-0", "sha-0", 0)
    assert (group.samples, group.sessions, group.rewards) == ((0, 1), ("s-train-0-0-1", "s-train-0-1-1"), (0.0, 1.0))
    assert player.ledger.ready_groups(RUN) == 1


def test_a_step_waits_until_there_are_enough_groups(player: Any) -> None:
    player.admit(9)
    assert player.batch(0, 2, partial=True) is None
    player.group([0.0, 1.0])
    assert player.batch(0, 2) is None
    assert player.ledger.batch(RUN, 0, 0) is None
    assert ordinals(player.batch(0, 2, partial=True)) == [0]


def test_a_claim_that_is_repeated_is_the_same_claim(player: Any) -> None:
    player.admit(9)
    for _ in range(4):
        player.group([0.0, 1.0])
    first = player.batch(0, 2)
    assert player.batch(0, 2) == first == player.ledger.batch(RUN, 0, 0)
    assert ordinals(player.batch(1, 2)) == [2, 3]


def test_groups_without_variance_count_but_are_not_trained(player: Any) -> None:
    player.admit(9)
    player.group([1.0, 1.0])
    player.group([0.0, 1.0])
    claim = player.batch(0, 2)
    assert (ordinals(claim), claim.zero_variance) == ([1], 1)
    assert (claim.reward_mean, claim.reward_std) == (0.75, pytest.approx(0.4330127))
    assert player.ledger.books(RUN).filtered == {"zero_variance": 2}


def test_groups_without_variance_are_trained_where_the_run_says_so(player: Any) -> None:
    player.admit(9)
    player.group([1.0, 1.0])
    claim = player.batch(0, 1, drop=False)
    assert (ordinals(claim), claim.zero_variance) == ([0], 0)


def test_a_step_of_groups_without_variance_is_claimed_empty_and_its_checkpoint_counts(player: Any) -> None:
    player.admit(9)
    player.group([1.0, 1.0])
    assert player.batch(0, 1).groups == ()
    player.checkpoint(0)
    assert player.ledger.books(RUN).balanced
    assert player.ledger.latest_checkpoint(RUN).version == 1


def test_stale_groups_are_replaced_and_named(player: Any) -> None:
    player.admit(9)
    player.group([0.0, 1.0], version=0)
    player.group([0.0, 1.0], version=3)
    player.group([0.0, 1.0], version=None)
    player.group([0.0, 1.0], version=4)
    assert player.ledger.ready_groups(RUN) == 4
    assert player.ledger.ready_groups(RUN, min_version=3) == 2
    claim = player.batch(4, 2, min_version=3)
    assert (ordinals(claim), claim.stale) == ([1, 3], 2)
    assert player.ledger.books(RUN).filtered == {"stale": 4}


def test_groups_found_stale_while_waiting_are_counted_by_the_claim_that_follows(player: Any) -> None:
    player.admit(9)
    player.group([0.0, 1.0], version=0)
    assert player.batch(2, 1, min_version=1) is None
    assert player.ledger.ended_groups(RUN) == 1
    player.group([0.0, 1.0], version=1)
    claim = player.batch(2, 1, min_version=1)
    assert (ordinals(claim), claim.stale) == ([1], 1)


def test_only_a_checkpoint_makes_a_sample_trained(ledger: Ledger, player: Any) -> None:
    player.admit(9)
    player.group([0.0, 1.0])
    player.group([0.0, 1.0])
    player.batch(0, 1)
    player.batch(1, 1)
    assert (ledger.books(RUN).trained, ledger.books(RUN).pending) == (0, {"claimed": 4})
    player.checkpoint(0)
    assert (ledger.books(RUN).trained, ledger.books(RUN).pending) == (2, {"claimed": 2})
    player.checkpoint(1)
    books = ledger.books(RUN)
    assert (books.trained, books.pending, books.balanced) == (4, {}, True)
    checkpoint = ledger.latest_checkpoint(RUN)
    assert checkpoint is not None
    assert (checkpoint.lineage, checkpoint.step, checkpoint.version, checkpoint.metrics) == (0, 1, 2, {"loss": 0.5})


def test_a_checkpoint_contains_the_steps_before_it(ledger: Ledger, player: Any) -> None:
    player.admit(9)
    for step in range(2):
        player.group([0.0, 1.0])
        player.batch(step, 1)
    player.checkpoint(1)
    assert ledger.books(RUN).trained == 4


def test_a_sample_that_the_update_left_out_ends_filtered_with_the_checkpoint(ledger: Ledger, player: Any) -> None:
    player.admit(2)
    for _ in range(2):
        player.group([0.0, 1.0])
    claim = player.batch(0, 2)
    bad = claim.groups[0].sessions[1]
    player.checkpoint(0, dropped=[bad])
    player.checkpoint(0, dropped=[bad])
    books = ledger.books(RUN)
    assert (books.trained, books.filtered, books.pending) == (3, {"not_finite": 1}, {})
    assert books.balanced
    (row,) = ledger.samples(RUN, TRAIN, state=State.FILTERED)
    assert (row.session, row.step) == (bad, 0)


def test_a_checkpoint_is_committed_once(ledger: Ledger, player: Any) -> None:
    player.admit(9)
    player.group([0.0, 1.0])
    player.batch(0, 1)
    player.checkpoint(0)
    player.checkpoint(0)
    with pytest.raises(IntegrityError, match="has checkpoint"):
        player.checkpoint(0, digest="another")
    with pytest.raises(NotFoundError, match="not claimed"):
        player.checkpoint(1)


def test_a_critic_of_its_own_is_committed_with_the_policy_and_found_again_as_of_the_same_step(
    ledger: Ledger, player: Any
) -> None:
    player.admit(9)
    for step in range(2):
        player.group([0.0, 1.0])
        player.batch(step, 1)
    player.checkpoint(0, critic="critic-0")
    ledger.rewind(RUN, 0)  # step 1 was made by both, but not committed: neither is found
    found = ledger.latest_checkpoint(RUN)
    assert found is not None
    assert (found.step, found.critic_path, found.critic_digest) == (0, "checkpoints/critic/0.0", "critic-0")

    player.checkpoint(1, lineage=1, critic="critic-1")
    player.checkpoint(1, lineage=1, critic="critic-1")
    with pytest.raises(IntegrityError, match="has critic critic-1, refusing another"):
        player.checkpoint(1, lineage=1, critic="another")
    found = ledger.latest_checkpoint(RUN)
    assert found is not None
    assert (found.step, found.critic_digest) == (1, "critic-1")
    assert ledger.books(RUN).balanced


def test_a_manifest_is_noted_once(ledger: Ledger, player: Any) -> None:
    player.admit(9)
    player.group([0.0, 1.0])
    with pytest.raises(NotFoundError, match="not claimed"):
        ledger.set_manifest(RUN, 0, 0, "key", "digest")
    player.batch(0, 1)
    assert ledger.manifest(RUN, 0, 0) is None
    ledger.set_manifest(RUN, 0, 0, "key", "digest")
    ledger.set_manifest(RUN, 0, 0, "key", "digest")
    with pytest.raises(IntegrityError, match="has manifest"):
        ledger.set_manifest(RUN, 0, 0, "key", "another")
    assert ledger.manifest(RUN, 0, 0) == ("key", "digest")


def test_a_rewind_moves_what_no_checkpoint_contains_in_step_order(ledger: Ledger, player: Any) -> None:
    player.admit(9)
    for step in range(3):
        player.group([0.0, 1.0])
        player.batch(step, 1)
        if step < 2:
            ledger.set_manifest(RUN, 0, step, f"manifest-{step}", f"digest-{step}")
    player.checkpoint(0)
    assert ledger.rewind(RUN, 0) == [(1, "manifest-1", "digest-1"), (2, None, None)]
    assert ledger.run_info(RUN).lineage == 1
    claim = ledger.batch(RUN, 1, 2)
    assert ordinals(claim) == [2]
    assert player.batch(2, 1, lineage=1) == claim
    assert ledger.manifest(RUN, 1, 1) == ("manifest-1", "digest-1")
    assert ledger.books(RUN).balanced


def test_a_rewind_that_is_repeated_changes_nothing(ledger: Ledger, player: Any) -> None:
    player.admit(9)
    for step in range(2):
        player.group([0.0, 1.0])
        player.batch(step, 1)
        ledger.set_manifest(RUN, 0, step, "key", "digest")
    first = ledger.rewind(RUN, 0)
    assert ledger.rewind(RUN, 0) == first
    player.checkpoint(0, lineage=1)
    assert ledger.rewind(RUN, 0) == first[1:]
    assert ledger.rewind(RUN, 1) == first[1:]
    with pytest.raises(FencedError, match="lineage 2"):
        ledger.rewind(RUN, 0)


def test_a_lineage_that_was_given_up_can_change_nothing(ledger: Ledger, player: Any) -> None:
    player.admit(9)
    player.group([0.0, 1.0])
    player.group([0.0, 1.0])
    player.batch(0, 1)
    ledger.rewind(RUN, 0)
    with pytest.raises(FencedError, match="lineage 0"):
        player.checkpoint(0)
    with pytest.raises(FencedError, match="lineage 0"):
        player.batch(1, 1)
    with pytest.raises(FencedError, match="lineage 0"):
        ledger.set_manifest(RUN, 0, 0, "key", "digest")
    assert ledger.books(RUN).trained == 0


def test_a_replayed_step_is_trained_once_in_the_surviving_lineage(ledger: Ledger, player: Any) -> None:
    player.admit(9)
    for step in range(2):
        player.group([0.0, 1.0])
        player.batch(step, 1)
    player.checkpoint(0)
    ledger.rewind(RUN, 0)
    player.checkpoint(1, lineage=1)
    books = ledger.books(RUN)
    assert (books.trained, books.balanced) == (4, True)
    checkpoint = ledger.latest_checkpoint(RUN)
    assert checkpoint is not None
    assert (checkpoint.lineage, checkpoint.step) == (1, 1)


def test_a_rewind_without_claims_only_fences(ledger: Ledger) -> None:
    assert ledger.rewind(RUN, 0) == []
    assert ledger.latest_checkpoint(RUN) is None
