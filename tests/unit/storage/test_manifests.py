"""Manifests are canonical: the same batch has the same bytes, key and digest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from storage.errors import IntegrityError
from storage.ledger import BatchClaim, GroupRef
from storage.manifests import Manifest, ManifestGroup, read_manifest, write_manifest
from storage.objects import ObjectStore

CLAIM = BatchClaim(
    run="manifest-test",
    lineage=0,
    step=3,
    groups=(GroupRef(7, "runs/manifest-test/shards/7", "ab" * 32, (0, 1), ("s0", "s1"), (0.0, 1.0), 2),),
    zero_variance=1,
    stale=0,
    reward_mean=0.5,
    reward_std=0.5,
)
MANIFEST = Manifest.of(CLAIM, temperature=0.7)


def test_a_manifest_names_what_a_step_trains_on() -> None:
    group = ManifestGroup(7, "runs/manifest-test/shards/7", "ab" * 32, ("s0", "s1"), (0.0, 1.0))
    assert Manifest("manifest-test", 0, 3, (group,), 0.7) == MANIFEST
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST


def test_any_change_is_another_object() -> None:
    changed = replace(MANIFEST, temperature=1.0)
    assert MANIFEST.digest in MANIFEST.key
    assert changed.key != MANIFEST.key


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"schema": 2}', b'{"schema": 1, "groups": [], "extra": 1}'])
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="not a readable manifest"):
        Manifest.from_bytes(data)


def test_a_manifest_with_an_unknown_field_is_refused() -> None:
    content = json.loads(MANIFEST.to_bytes())
    content["groups"][0]["color"] = "red"
    with pytest.raises(IntegrityError, match="color"):
        Manifest.from_bytes(json.dumps(content).encode())


def test_a_manifest_is_read_as_it_was_written_and_verified(object_store: ObjectStore) -> None:
    key, digest = write_manifest(object_store, MANIFEST)
    assert write_manifest(object_store, MANIFEST) == (key, digest)
    assert read_manifest(object_store, key, digest) == MANIFEST
    object_store.put(key, replace(MANIFEST, temperature=2.0).to_bytes())
    with pytest.raises(IntegrityError, match="has sha256"):
        read_manifest(object_store, key, digest)
