"""Shards by hand, batches in an object store, a tiny model, and ranks as real processes."""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from nursery import Nursery, Rank

from storage.manifests import Manifest, ManifestGroup, write_manifest
from storage.objects import ObjectStore
from storage.seaweed import Weed
from storage.shards import Generation, SessionRow, Shard, Span, digest_of, encode, key_for
from workers.cluster import ClusterConfig, Secrets, StateFolder
from workers.trainer.client import TrainerClient
from workers.trainer.launch import Launch, Residency
from workers.trainer.messages import ColumnRef, ColumnRequest, UpdateRequest, UpdateResult
from workflows.spec import RunSpec

NO_INTS = np.empty(0, np.int32)
NO_FLOATS = np.empty(0, np.float32)
VOCABULARY = 64


class ShardBuilder:
    """Writes a shard span by span.

    >>> shard = ShardBuilder(ordinal=3)
    >>> root = shard.prompt(-1, [1, 2])
    >>> answer = shard.completion(root, [7, 8], session="a")
    >>> shard.session("a", reward=1.0, leaves=[answer])
    """

    def __init__(self, ordinal: int = 0, run: str = "demo") -> None:
        self.ordinal = ordinal
        self.run = run
        self.spans: list[Span] = []
        self.generations: list[Generation] = []
        self.sessions: list[SessionRow] = []

    def prompt(self, parent: int, ids: Sequence[int]) -> int:
        self.spans.append(Span(parent, "prompt", _ints(ids), NO_FLOATS, (NO_INTS, NO_INTS), ""))
        return len(self.spans) - 1

    def completion(
        self,
        parent: int,
        ids: Sequence[int],
        *,
        session: str,
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
        trainable: bool = True,
    ) -> int:
        index, name = len(self.spans), f"{session}/g{len(self.generations)}"
        runs = [(v, len(list(same))) for v, same in itertools.groupby(versions or [0] * len(ids))]
        rle = (_ints([v for v, _ in runs]), _ints([n for _, n in runs]))
        floats = np.asarray([-4.0] * len(ids) if logprobs is None else logprobs, dtype=np.float32)
        self.spans.append(Span(parent, "completion", _ints(ids), floats, rle, name))
        self.generations.append(Generation(name, session, 0, 0, (index,), "stop", 1.0, 1.0, trainable, ()))
        return index

    def session(self, name: str, *, reward: float, leaves: Sequence[int]) -> None:
        self.sessions.append(
            SessionRow(name, len(self.sessions), 1, reward, "finished", turns=1, forks=0, leaves=tuple(leaves))
        )

    def build(self) -> Shard:
        parts = (tuple(self.spans), tuple(self.generations), tuple(self.sessions))
        shard = Shard(self.run, "train", self.ordinal, *parts)
        shard.validate()
        return shard


def _ints(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.asarray(values, dtype=np.int32)


def random_shard(ordinal: int, seed: int, *, samples: int = 4, run: str = "demo") -> Shard:
    """A group of two-turn sessions of different lengths that share their prompt; the last one has two leaves."""
    rng = np.random.default_rng([seed, ordinal])

    def ids(low: int, high: int) -> list[int]:
        return [int(i) for i in rng.integers(3, VOCABULARY, rng.integers(low, high))]

    def completion(parent: int, session: str) -> int:
        made = ids(2, 7)
        logprobs = (-4.2 + 0.1 * rng.standard_normal(len(made))).tolist()
        return shard.completion(parent, made, session=session, logprobs=logprobs)

    shard = ShardBuilder(ordinal, run)
    root = shard.prompt(-1, ids(6, 14))
    for sample in range(samples):
        session = f"s{ordinal}.{sample}"
        first = completion(root, session)
        leaves = [completion(shard.prompt(first, ids(1, 6)), session)]
        if sample == samples - 1:
            leaves.append(completion(shard.prompt(first, ids(1, 6)), session))
        shard.session(session, reward=float(rng.random()), leaves=leaves)
    return shard.build()


class Store(Protocol):
    def put(self, key: str, data: bytes) -> str: ...


def put_batch(
    store: Store, step: int, shards: Sequence[Shard], *, lineage: int = 0, run: str = "demo"
) -> UpdateRequest:
    """Write shards and manifest; the request that trains them."""
    groups = []
    for shard in shards:
        data = encode(shard)
        key = key_for(run, shard.ordinal, digest_of(data))
        store.put(key, data)
        sessions = tuple(row.id for row in shard.sessions)
        rewards = tuple(row.reward for row in shard.sessions)
        groups.append(ManifestGroup(shard.ordinal, key, digest_of(data), sessions, rewards))
    manifest = Manifest(run, lineage, step, tuple(groups), temperature=1.0)
    ref = write_manifest(store, manifest)  # type: ignore[arg-type]  # it only puts
    return UpdateRequest(lineage=lineage, step=step, manifest_key=ref.key, manifest_digest=ref.digest, epoch=1)


def make_spec(model_path: Path, /, **changes: dict[str, Any]) -> RunSpec:
    """A run of the tiny model; ``changes`` by section."""
    sections: dict[str, Any] = {
        "run": "demo",
        "model": {"path": str(model_path)},
        "data": {"path": "tasks.jsonl"},
        "reward": {"target": "module:function"},
        "nodes": [{"id": "a", "tags": ["rollout", "train"]}],
        "trainer": {"learning_rate": 1e-2, "row_tokens": 64},
    }
    for name, change in changes.items():
        sections[name] = {**sections.get(name, {}), **change}
    return RunSpec.model_validate(sections)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen3 model with 15,000 parameters and tied embeddings."""
    folder = tmp_path_factory.mktemp("qwen")
    code = (
        "import sys, torch, transformers as t; torch.manual_seed(0)\n"
        "config = t.Qwen3Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,\n"
        f"    num_key_value_heads=2, head_dim=8, vocab_size={VOCABULARY}, max_position_embeddings=256,\n"
        "    tie_word_embeddings=True)\n"
        "t.Qwen3ForCausalLM(config).save_pretrained(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=120, capture_output=True)
    (folder / "tokenizer.json").write_text('{"fake": "tokenizer"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def make_cluster(root: Path, weed: Weed, object_store: ObjectStore) -> StateFolder:
    """A state folder whose object store is the session's."""
    state = StateFolder(root)
    nowhere = "127.0.0.1:1"
    state.write(
        ClusterConfig(
            temporal=nowhere,
            proxy=f"http://{nowhere}",
            s3=weed.endpoint,
            bucket=object_store.bucket,
            ledger_url="sqlite://",
            journal_url="sqlite://",
        ),
        Secrets(control_key="unused", s3_access_key="test-access", s3_secret_key="test-secret-of-some-length"),
    )
    return state


@dataclass
class Gang:
    """Trainer ranks as real processes."""

    spec: RunSpec
    state: StateFolder
    ranks: int = 1
    role: str = "trainer"
    checkpoint: Path | None = None
    checkpoint_digest: str | None = None
    processes: list[Rank] = field(default_factory=list)
    clients: list[TrainerClient] = field(default_factory=list)

    def start(self) -> None:
        folder = self.state.node("a")
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        for rank in range(self.ranks):
            launch = Launch(
                spec=self.spec,
                role=self.role,  # type: ignore[arg-type]  # tests name one of them
                state=self.state.root,
                rank=rank,
                world_size=self.ranks,
                local_rank=rank,
                master_port=port,
                token=secrets.token_hex(16),
                epoch=1,
                checkpoint=self.checkpoint,
                checkpoint_digest=self.checkpoint_digest,
                residency=folder / f"rank-{rank}.json",
                start_limit_s=120,
            )
            launch.write(folder / f"launch-{rank}.json")
            (folder / f"rank-{rank}.json").unlink(missing_ok=True)
            process = nursery().rank(folder / f"launch-{rank}.json", folder / f"rank-{rank}.log")
            self.processes.append(process)
        self.clients = [TrainerClient.of(self._residency(folder / f"rank-{rank}.json")) for rank in range(self.ranks)]

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.state.node("a").glob("rank-*.log")))

    def kill(self, rank: int = 0) -> None:
        self.processes[rank].kill()
        self.processes[rank].wait(timeout=10)

    async def update(self, request: UpdateRequest, *, deadline_s: float = 120) -> UpdateResult:
        """All ranks at once; they agree on the result."""
        results = await asyncio.gather(*(client.update(request, deadline_s=deadline_s) for client in self.clients))
        assert all(result == results[0] for result in results)
        return results[0]

    async def columns(self, request: UpdateRequest, *, share: int = 0, shares: int = 1) -> ColumnRef:
        """All ranks at once; they agree on what was written."""
        asked = ColumnRequest(**request.model_dump(), share=share, shares=shares)
        written = await asyncio.gather(*(client.columns(asked, deadline_s=60) for client in self.clients))
        assert all(ref == written[0] for ref in written)
        return written[0]

    async def ready(self) -> None:
        await asyncio.gather(*(client.wait_ready(deadline_s=120) for client in self.clients))

    async def __aenter__(self) -> Gang:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.close()
        for process in self.processes:
            process.kill()
            process.wait(timeout=10)

    def _residency(self, path: Path) -> Residency:
        end = time.monotonic() + 60
        while not path.exists():
            if time.monotonic() > end:
                raise AssertionError(f"no {path.name} within 60 s:\n{self.logs()}")
            time.sleep(0.05)
        return Residency.model_validate_json(path.read_text())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@functools.cache
def nursery() -> Nursery:
    """Of the session; it starts with its first rank."""
    return Nursery()


@pytest.fixture
def column_store(object_store: ObjectStore) -> ObjectStore:
    """The object store without columns that other tests wrote of the same batches."""
    for key in object_store.list("runs/demo/columns/"):
        object_store.delete(key)
    return object_store


class Helpers:
    """Test modules cannot import this file: they get these by fixture."""

    ShardBuilder = ShardBuilder
    Gang = Gang
    random_shard = staticmethod(random_shard)
    put_batch = staticmethod(put_batch)
    make_spec = staticmethod(make_spec)
    make_cluster = staticmethod(make_cluster)
    free_port = staticmethod(free_port)
    nursery = staticmethod(nursery)


@pytest.fixture(scope="session")
def make() -> Iterator[type[Helpers]]:
    yield Helpers
    if nursery.cache_info().currsize:
        nursery().close()
