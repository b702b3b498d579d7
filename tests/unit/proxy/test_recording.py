"""Which weights made a token: exact where the engine's word proves it, unknown where it does not."""

from __future__ import annotations

import pytest

from proxy.trajectory.recording import Recording, Segment


def begin(recording: Recording, version: int) -> None:
    count = len(recording.ids)
    number = len(recording.segments)
    recording.begin(Segment(number, "node", "lease", "scripted", "rid", 1, version, None, count, count))


def add(recording: Recording, count: int, label: int | None) -> None:
    recording.add([5] * count, [-0.5] * count, recording.marks(count, label))


def test_a_label_that_equals_the_version_at_the_start_is_exact_and_a_later_one_proves_nothing():
    recording = Recording()
    begin(recording, 3)
    add(recording, 2, 3)
    add(recording, 3, 4)  # sent after an update: the first of them may have been made before it
    add(recording, 1, None)
    assert recording.version_runs() == [[3, 2], [-1, 4]]


def test_the_engine_s_span_list_settles_what_was_unknown():
    recording = Recording()
    begin(recording, 3)
    add(recording, 2, 3)
    add(recording, 3, 4)
    recording.amend([[3, 0, 3], [4, 3, 5]])
    assert recording.version_runs() == [[3, 3], [4, 2]]
    assert recording.conflicts == 0


def test_a_span_list_is_about_its_own_segment_only():
    recording = Recording()
    begin(recording, 3)
    add(recording, 2, 3)
    begin(recording, 4)
    add(recording, 2, 4)
    recording.amend([[4, 0, 1], [5, 1, 9]])
    assert recording.version_runs() == [[3, 2], [-1, 2]]  # the label said 4 for a token that the list calls 5
    assert recording.conflicts == 1


def test_a_span_list_that_knows_no_version_leaves_its_tokens_unknown():
    recording = Recording()
    begin(recording, 3)
    add(recording, 2, 4)
    recording.amend([[None, 0, 1], [4, 1, 2]])
    assert recording.version_runs() == [[-1, 1], [4, 1]]


def test_tokens_and_side_channels_must_be_aligned():
    recording = Recording()
    begin(recording, 0)
    with pytest.raises(ValueError, match="2 ids, 1 log-probs, 2 versions"):
        recording.add([1, 2], [-0.5], [[0, 2]])
