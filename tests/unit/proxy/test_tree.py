"""The tree of spans: shared prompts, separate completions, aligned side channels, stable ends."""

from __future__ import annotations

import json

import numpy as np
import pytest

from proxy.trajectory.tree import ROOT, Tree, merge_into, run_lengths


def ids(*values: int):
    return np.asarray(values, np.int32)


def complete(tree: Tree, after: int, generation: str, *values: int, passable: bool = True, version: int = 7) -> int:
    logprobs = np.asarray([-value / 8 for value in values], np.float32)
    versions = np.full(len(values), version, np.int32)
    return tree.append_completion(after, generation, ids(*values), logprobs, versions, passable=passable)


def test_equal_prompts_are_one_span_and_differing_ones_share_their_beginning():
    tree = Tree()
    first, _ = tree.insert_prompt(ids(1, 2, 3, 4))
    again, matched = tree.insert_prompt(ids(1, 2, 3, 4))
    other, shared = tree.insert_prompt(ids(1, 2, 9))
    assert (first, matched, shared) == (again, 4, 2)
    assert tree.path_ids(first).tolist() == [1, 2, 3, 4]
    assert tree.path_ids(other).tolist() == [1, 2, 9]
    assert tree.tokens("prompt") == 5


def test_the_json_of_a_path_is_that_of_its_ids_also_when_a_span_was_split_since():
    tree = Tree()
    prompt, _ = tree.insert_prompt(ids(1, 2, 30))
    answer = complete(tree, prompt, "a", 5, 600, 7)
    assert json.loads(tree.path_json(answer)) == [1, 2, 30, 5, 600, 7]
    other, _ = tree.insert_prompt(ids(1, 2, 30, 5, 9))
    forked, _ = tree.insert_prompt(ids(1, 4))
    for end in (prompt, answer, other, forked):
        assert json.loads(tree.path_json(end)) == tree.path_ids(end).tolist()
    assert tree.path_json(ROOT) == b"[]"


def test_equal_completions_stay_two_samples():
    tree = Tree()
    prompt, _ = tree.insert_prompt(ids(1))
    a, b = complete(tree, prompt, "a", 5, 2), complete(tree, prompt, "b", 5, 2)
    assert a != b
    assert tree.tokens("completion") == 4


def test_a_prompt_runs_through_a_completion_whose_ids_it_repeats():
    tree = Tree()
    prompt, _ = tree.insert_prompt(ids(1))
    answer = complete(tree, prompt, "a", 5, 2)
    end, matched = tree.insert_prompt(ids(1, 5, 2, 8))
    assert matched == 3
    assert tree.spans[end].parent == answer


def test_a_prompt_does_not_run_through_an_answer_that_never_ended():
    tree = Tree()
    prompt, _ = tree.insert_prompt(ids(1))
    complete(tree, prompt, "a", 5, passable=False)
    end, matched = tree.insert_prompt(ids(1, 5, 8))
    assert (matched, tree.spans[end].parent) == (1, prompt)


def test_splitting_a_completion_keeps_ids_logprobs_and_versions_aligned_and_its_end_valid():
    tree = Tree()
    prompt, _ = tree.insert_prompt(ids(1))
    answer = complete(tree, prompt, "a", 5, 6, 7)
    end, matched = tree.insert_prompt(ids(1, 5, 9))
    assert matched == 2
    assert tree.path_ids(answer).tolist() == [1, 5, 6, 7]
    assert tree.path_ids(end).tolist() == [1, 5, 9]
    front, tail = tree.generation_spans(answer)
    assert [tree.spans[i].logprobs.tolist() for i in (front, tail)] == [[-0.625], [-0.75, -0.875]]
    for span in tree.spans:
        if span.kind == "completion":
            assert len(span.ids) == len(span.logprobs) == len(span.versions)
    assert tree.spans[end].parent == front


def test_the_longest_of_several_equal_beginnings_is_followed():
    tree = Tree()
    prompt, _ = tree.insert_prompt(ids(1))
    complete(tree, prompt, "short", 5)
    long = complete(tree, prompt, "long", 5, 6)
    end, matched = tree.insert_prompt(ids(1, 5, 6, 8))
    assert (matched, tree.spans[end].parent) == (3, long)


def test_a_generation_without_tokens_adds_nothing():
    tree = Tree()
    prompt, _ = tree.insert_prompt(ids(1))
    assert complete(tree, prompt, "empty") == prompt
    assert len(tree.spans) == 1


def test_side_channels_of_another_length_are_refused():
    with pytest.raises(ValueError, match="3 ids, 1 log-probs"):
        Tree().append_completion(ROOT, "g", ids(1, 2, 3), np.zeros(1, np.float32), ids(0, 0, 0), passable=True)


def test_sessions_of_a_group_share_prompts_and_no_completion():
    group, trees = Tree(), []
    for generation in ("a", "b"):
        tree = Tree()
        prompt, _ = tree.insert_prompt(ids(1, 2, 3))
        answer = complete(tree, prompt, generation, 5, 2)
        tree.insert_prompt(ids(4, 5), answer)
        tree.insert_prompt(ids(9, 9))
        trees.append(tree)
    for tree in trees:
        moved = merge_into(group, tree, tree.sampled())
        assert all(np.array_equal(group.path_ids(new), tree.path_ids(old)) for old, new in moved.items())
    assert group.tokens("prompt") == 3
    assert group.tokens("completion") == 4


def test_run_lengths():
    values, lengths = run_lengths([7, 7, 8, -1, -1])
    assert (values.tolist(), lengths.tolist()) == ([7, 8, -1], [2, 1, 2])
    assert [part.tolist() for part in run_lengths([])] == [[], []]
