"""Any paths make a tree that holds each shared beginning once; its attention is that of the paths, in few blocks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

from workers.trainer.attention import Block, ancestor_attention, blocks, flex_mask
from workers.trainer.tree import TokenTree

Bools = npt.NDArray[np.bool_]


@st.composite
def paths(draw: st.DrawFn, *, most: int = 8, longest: int = 12) -> list[npt.NDArray[np.int32]]:
    """Paths of few different tokens; many continue, repeat or leave an earlier one."""
    found: list[list[int]] = []
    for _ in range(draw(st.integers(1, most))):
        earlier = draw(st.sampled_from(found)) if found and draw(st.booleans()) else []
        kept = earlier[: draw(st.integers(0, len(earlier)))]
        found.append(kept + draw(st.lists(st.integers(0, 3), min_size=0 if kept else 1, max_size=longest)))
    return [np.array(ids, np.int32) for ids in found]


def visible(tree: TokenTree) -> Bools:
    """By definition: a token sees what stands on a path in front of it."""
    seen_TT = np.zeros((len(tree.ids_T), len(tree.ids_T)), bool)
    for path in tree.order:
        positions = tree.positions(path)
        for depth, token in enumerate(positions):
            seen_TT[token, positions[: depth + 1]] = True
    return seen_TT


def covered(found: list[Block], tokens: int) -> npt.NDArray[np.int64]:
    """How often blocks hold each pair."""
    counts = np.zeros((tokens, tokens), np.int64)
    for q, k, causal in found:
        part = np.ones((q.stop - q.start, k.stop - k.start), np.int64)
        counts[q, k] += np.tril(part) if causal else part
    return counts


@given(paths())
@settings(max_examples=50)
def test_a_tree_holds_each_beginning_once_and_gives_every_path_back(given_paths: list[npt.NDArray[np.int32]]) -> None:
    tree = TokenTree(given_paths)
    beginnings = {tuple(ids[:n]) for ids in given_paths for n in range(1, len(ids) + 1)}
    assert len(tree.ids_T) == len(beginnings)
    for path, ids in enumerate(given_paths):
        assert tree.ids_T[tree.positions(path)].tolist() == ids.tolist()
        assert tree.depth_T[tree.positions(path)].tolist() == list(range(len(ids)))


@given(paths(), st.booleans())
@settings(max_examples=50)
def test_blocks_hold_each_pair_of_a_token_and_its_ancestor_once(
    given_paths: list[npt.NDArray[np.int32]], merge: bool
) -> None:
    tree = TokenTree(given_paths, merge=merge)
    tokens = len(tree.ids_T)
    found = blocks(tree.end_T)
    assert np.array_equal(covered(found, tokens), visible(tree).astype(np.int64))
    per_token = sum(np.isin(np.arange(tokens), np.arange(q.start, q.stop)) for q, _, _ in found)
    assert max(per_token) <= 1 + math.log2(tokens)


@given(paths())
@settings(max_examples=50)
def test_without_merging_paths_stand_side_by_side(given_paths: list[npt.NDArray[np.int32]]) -> None:
    tree = TokenTree(given_paths, merge=False)
    assert len(tree.ids_T) == sum(len(ids) for ids in given_paths)
    assert all(causal for _, _, causal in blocks(tree.end_T))


@given(paths(most=7), st.integers(1, 40))
@settings(max_examples=50)
def test_no_other_cut_in_tree_order_computes_fewer_tokens(
    given_paths: list[npt.NDArray[np.int32]], budget: int
) -> None:
    tree = TokenTree(given_paths)

    def sizes(rows: list[list[int]]) -> list[int]:
        return [len(TokenTree([given_paths[path] for path in row]).ids_T) for row in rows]

    def partitions() -> list[list[list[int]]]:
        places = range(1, len(tree.order))
        cuts = itertools.chain.from_iterable(itertools.combinations(places, n) for n in range(len(tree.order)))
        return [[tree.order[a:b] for a, b in itertools.pairwise([0, *cut, len(tree.order)])] for cut in cuts]

    def cost(rows: list[list[int]]) -> tuple[bool, int, int]:
        too_long = any(size > budget and len(row) > 1 for size, row in zip(sizes(rows), rows, strict=True))
        return too_long, sum(sizes(rows)), len(rows)

    rows = tree.cut(budget)
    assert list(itertools.chain.from_iterable(rows)) == tree.order
    assert cost(rows) == min(cost(other) for other in partitions())


@given(paths(longest=100))
@settings(max_examples=50)
def test_attention_on_a_gpu_sees_the_same_pairs(given_paths: list[npt.NDArray[np.int32]]) -> None:
    tree = TokenTree(given_paths)
    tokens = len(tree.ids_T)
    mask = flex_mask(torch.from_numpy(tree.end_T))
    by_rule = create_mask(mask.mask_mod, 1, 1, tokens, tokens, device="cpu")[0, 0]
    assert np.array_equal(by_rule.numpy(), visible(tree))

    tiles = math.ceil(tokens / 128)
    padded = np.zeros((tiles * 128, tiles * 128), bool)
    padded[:tokens, :tokens] = visible(tree)
    wanted = padded.reshape(tiles, 128, tiles, 128).any((1, 3))
    assert np.array_equal(mask.to_dense()[0, 0].bool().numpy(), wanted)  # tiles that are skipped hold no pair


@given(paths(longest=40), st.sampled_from([(4, 4), (4, 2), (6, 1)]), st.integers(0, 9))
@settings(max_examples=50)
def test_output_and_gradient_are_those_of_the_masked_attention(
    given_paths: list[npt.NDArray[np.int32]], heads: tuple[int, int], seed: int
) -> None:
    tree, generator = TokenTree(given_paths), torch.Generator().manual_seed(seed)
    shapes = [(1, len(tree.ids_T), n, 8) for n in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(s, generator=generator).transpose(1, 2).requires_grad_() for s in shapes]
    found, _ = ancestor_attention(torch.nn.Identity(), *inputs, None, scaling=0.3, tree=blocks(tree.end_T))

    query, key, value = inputs
    repeats = heads[0] // heads[1]
    wanted = scaled_dot_product_attention(
        query,
        key.repeat_interleave(repeats, 1),
        value.repeat_interleave(repeats, 1),
        attn_mask=torch.from_numpy(visible(tree)),
        scale=0.3,
    ).transpose(1, 2)

    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
    weight = torch.randn(wanted.shape, generator=generator)
    for mine, theirs in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((wanted * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_in_bfloat16_several_blocks_are_as_exact_as_one() -> None:
    tree = TokenTree(
        [np.array(ids, np.int32) for ids in ([*range(40), 50], [*range(20), 60, 61], [*range(20), 60, 62])]
    )
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, len(tree.ids_T), 2, 16, generator=generator).transpose(1, 2) for _ in range(3)]
    rough = [tensor.bfloat16().requires_grad_() for tensor in exact]
    found, _ = ancestor_attention(torch.nn.Identity(), *rough, None, scaling=0.25, tree=blocks(tree.end_T))
    wanted = scaled_dot_product_attention(*exact, attn_mask=torch.from_numpy(visible(tree)), scale=0.25).transpose(1, 2)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=0.02)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.sum(), rough))
