"""The object store against a real S3 server."""

from __future__ import annotations

import hashlib
import inspect
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from minio import Minio

from storage.errors import ConfigError, DeadlineError, IntegrityError, NotFoundError, StorageError
from storage.objects import ObjectStore
from storage.seaweed import Weed


@pytest.fixture
def prefix() -> str:
    """Keys of one test in the shared bucket."""
    return f"objects/{uuid.uuid4().hex}/"


@pytest.mark.parametrize("data", [b"", b"hello", bytes(range(256)) * 4096])
def test_an_object_comes_back_as_it_went_with_its_digest(object_store: ObjectStore, prefix: str, data: bytes) -> None:
    digest = object_store.put(prefix + "a b/ü+%.arrow", data)
    assert digest == hashlib.sha256(data).hexdigest()
    assert object_store.get(prefix + "a b/ü+%.arrow", sha256=digest) == data


def test_bytes_that_differ_from_their_digest_are_not_returned(object_store: ObjectStore, prefix: str) -> None:
    object_store.put(prefix + "key", b"tampered")
    with pytest.raises(IntegrityError, match="has sha256"):
        object_store.get(prefix + "key", sha256=hashlib.sha256(b"original").hexdigest())


def test_an_object_that_is_not_there_is_named(object_store: ObjectStore, prefix: str) -> None:
    with pytest.raises(NotFoundError, match="missing"):
        object_store.get(prefix + "missing")


def test_the_first_conditional_put_wins(object_store: ObjectStore, prefix: str) -> None:
    assert object_store.put_if_absent(prefix + "key", b"first")
    assert not object_store.put_if_absent(prefix + "key", b"second")
    assert object_store.get(prefix + "key") == b"first"


def test_of_two_racing_conditional_puts_one_wins(object_store: ObjectStore, prefix: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        for n in range(5):
            key = f"{prefix}{n}"
            won = list(pool.map(lambda data, key=key: object_store.put_if_absent(key, data), (b"a", b"b")))
            assert sorted(won) == [False, True]
            assert object_store.get(key) == (b"a" if won[0] else b"b")


def test_the_client_still_has_the_conditional_put_that_is_not_public() -> None:
    assert list(inspect.signature(Minio._put_object).parameters)[:5] == [
        "self",
        "bucket_name",
        "object_name",
        "data",
        "headers",
    ]


def test_keys_are_listed_in_order_by_prefix(object_store: ObjectStore, prefix: str) -> None:
    for name in ("b/2", "a", "b/1", "c"):
        object_store.put(prefix + name, b"x")
    assert object_store.list(prefix) == [prefix + name for name in ("a", "b/1", "b/2", "c")]
    assert object_store.list(prefix + "b/") == [prefix + "b/1", prefix + "b/2"]
    assert object_store.list(prefix + "none/") == []


def test_deleting_twice_is_deleting(object_store: ObjectStore, prefix: str) -> None:
    object_store.put(prefix + "key", b"x")
    object_store.delete(prefix + "key")
    object_store.delete(prefix + "key")
    assert object_store.list(prefix) == []


def test_a_bucket_may_be_ensured_twice_and_is_not_made_by_a_put(weed: Weed) -> None:
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    store = weed.store(name, deadline_s=10)
    with pytest.raises(NotFoundError, match="ensure_bucket"):
        store.put("key", b"x")
    store.ensure_bucket()
    store.ensure_bucket()
    assert store.list() == []
    store.close()


def test_a_wrong_key_is_refused_at_once_and_never_shown(weed: Weed) -> None:
    store = ObjectStore(weed.endpoint, "tests", "test-access", "wrong-secret")
    with pytest.raises(StorageError) as caught:
        store.put("key", b"x")
    assert not isinstance(caught.value, DeadlineError)
    assert "wrong-secret" not in str(caught.value)
    store.close()


def test_a_bucket_name_that_no_server_takes_is_refused_before_the_first_request() -> None:
    with pytest.raises(ConfigError, match="'No_Bucket'"):
        ObjectStore("127.0.0.1:1", "No_Bucket", "a", "s")


class Flaky(BaseHTTPRequestHandler):
    """Fails a number of times, each time in another way, then serves one object."""

    failures = 0
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        type(self).failures -= 1
        if self.failures >= 0:
            if self.failures % 2:
                self.close_connection = True
                return
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def flaky() -> Iterator[ObjectStore]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    store = ObjectStore(f"127.0.0.1:{server.server_port}", "bucket", "a", "s", deadline_s=5)
    yield store
    store.close()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_that_fails_for_a_while_is_asked_again(flaky: ObjectStore) -> None:
    Flaky.failures = 4
    assert flaky.get("key") == b"hello"


def test_a_server_that_goes_on_failing_ends_at_the_deadline(flaky: ObjectStore) -> None:
    Flaky.failures = 1_000_000
    flaky.deadline_s = 0.3
    with pytest.raises(DeadlineError, match="get key"):
        flaky.get("key")


def test_a_server_that_is_not_there_ends_at_the_deadline() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        store = ObjectStore(f"127.0.0.1:{unused.getsockname()[1]}", "bucket", "a", "s", deadline_s=0.3)
        with pytest.raises(DeadlineError, match="put key"):
            store.put("key", b"x")
        store.close()


def test_a_silent_server_ends_at_the_deadline_of_the_attempt() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        store = ObjectStore(endpoint, "bucket", "a", "s", deadline_s=0.2, attempt_s=0.2)
        started = time.monotonic()
        with pytest.raises(DeadlineError, match="get key"):
            store.get("key")
        assert time.monotonic() - started < 60
        store.close()
