"""Whatever comes and goes, KV rows and cached prefixes belong to the tokens that they were computed for."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engines.embedded.architectures import ModelConfig, Rope
from workers.engines.embedded.batch import Batch
from workers.engines.embedded.model import KvRows
from workers.engines.embedded.prefix_cache import PrefixCache
from workers.engines.embedded.sequence import Sequence
from workers.engines.wire import GenerateRequest

CONFIG = ModelConfig("LlamaForCausalLM", 8, 4, 4, 1, 1, 1, 2, 1e-6, Rope("default", 1e4), True, 64)
ids_lists = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def kv_of(ids: list[int] | np.ndarray) -> torch.Tensor:
    """KV that says which prefix it was computed for: [1, 2, len, 1, 2], a running hash of the ids."""
    state, values = 1, []
    for i in ids:
        state = (state * 31 + int(i) + 1) % 65537
        values.append(float(state))
    return torch.tensor(values).view(1, 1, -1, 1, 1).expand(1, 2, -1, 1, 2).clone()


@settings(max_examples=80)
@given(st.lists(st.tuples(st.sampled_from("ab"), ids_lists), max_size=25), st.integers(1, 40), ids_lists)
def test_a_match_is_the_longest_known_prefix_and_its_kv(
    inserted: list[tuple[str, list[int]]], capacity: int, wanted: list[int]
) -> None:
    cache = PrefixCache(capacity)
    for salt, ids in inserted:
        kv = kv_of(ids)
        cache.insert(salt, np.array(ids, np.int32), lambda start, end, kv=kv: kv[:, :, start:end].clone())
        assert cache.tokens <= capacity
    segments = cache.match("a", np.array(wanted, np.int32))
    length = sum(segment.shape[2] for segment in segments)
    if segments:
        assert torch.equal(torch.cat(segments, 2), kv_of(wanted[:length]))
    known = [ids for salt, ids in inserted if salt == "a"]
    longest = max((_common(ids, wanted) for ids in known), default=0)
    assert length <= longest
    if sum(len(ids) for _, ids in inserted) <= capacity:
        assert length == longest


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(max_examples=60)
@given(st.lists(st.one_of(ids_lists, st.integers(0, 30)), max_size=30), st.data())
def test_rows_stay_dense_and_with_their_sequences(operations: list[list[int] | int], data: st.DataObject) -> None:
    batch = Batch(KvRows(CONFIG, torch.float32))
    for number, operation in enumerate(operations):
        if isinstance(operation, list):
            sequence = Sequence(GenerateRequest(str(number), tuple(operation)), lambda _: None, 0, list(operation))
            cached = data.draw(st.integers(0, len(operation) - 1))
            batch.add(sequence, [kv_of(operation[:cached])] if cached else [])
        elif batch.members:
            batch.remove(batch.members[operation % len(batch.members)])
        assert all(s.ready for s in batch.decoders)
        assert not any(s.ready for s in batch.prefillers)
        assert len(set(map(id, batch.members))) == len(batch.members)
        for row, sequence in enumerate(batch.members):
            assert torch.equal(batch.rows.read(row, 0, sequence.computed), kv_of(sequence.ids[: sequence.computed]))
