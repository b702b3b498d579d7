"""What is taken for an answer, and what is not, however it is cut into pieces."""

from __future__ import annotations

import pytest

from workers.engines.http_answer import OVERHEAD, Answer

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
CHUNKED = HEAD + b"\r\n5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n"


def answer(*pieces: bytes) -> Answer:
    got = Answer()
    for piece in pieces:
        got.feed(piece)
    return got


def test_an_answer_cut_anywhere_says_where_and_keeps_what_came() -> None:
    head, body = CHUNKED.index(b"\r\n\r\n") + 4, b"hello!"
    for cut in range(len(CHUNKED)):
        got = answer(CHUNKED[:cut]) if cut else Answer()
        got.end("")
        place = "before it answered" if cut == 0 else "in the head" if cut < head else "in the body"
        assert not got.complete
        assert got.fault == f"the engine closed the connection {place}"
        assert body.startswith(b"".join(got.pieces))


def test_a_whole_answer_is_complete_and_its_connection_can_be_used_again() -> None:
    got = answer(*(bytes([byte]) for byte in CHUNKED))
    assert (got.status, got.complete, got.reusable, b"".join(got.pieces)) == (200, True, True, b"hello!")
    got.end(" (reset)")
    assert (got.complete, got.fault) == (True, "")


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + CHUNKED,
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok\0",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok" + CHUNKED,
    ],
)
def test_a_connection_is_not_used_again_if_told_so_or_if_more_came_than_was_asked_for(head: bytes) -> None:
    got = answer(head)
    assert (got.status, got.complete, got.reusable, b"".join(got.pieces)) == (200, True, False, b"ok")


def test_a_body_without_a_length_ends_with_its_connection_unless_that_breaks() -> None:
    for how, complete in (("", True), (" (reset)", False)):
        got = answer(b"HTTP/1.1 200 OK\r\n\r\n", b"some")
        got.end(how)
        assert (got.complete, bool(got.fault), b"".join(got.pieces)) == (complete, not complete, b"some")


def test_informational_answers_are_passed_over() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    got = answer(b"HTTP/1.1 100 Continue\r\n\r\n" + early, CHUNKED)
    assert (got.status, got.complete, got.reusable, b"".join(got.pieces)) == (200, True, True, b"hello!")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nBad Name: 2\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n", "no HTTP"),
        (HEAD + b"\r\nnonsense\r\n", "no HTTP"),
        (HEAD + b"\r\n-5\r\nhello\r\n", "no HTTP"),
        (HEAD + b"\r\nfffffffffffffffff\r\n", "no HTTP"),
        (HEAD + b"\r\n5\r\nhello and more", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "encoding"),
        (HEAD + b"Content-Encoding: gzip\r\n\r\n", "encoding"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * OVERHEAD, "no body"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * (OVERHEAD // 20), "no body"),
        (HEAD + b"\r\n5;note=" + b"x" * OVERHEAD, "no body"),
        (HEAD + b"\r\n0\r\nTrailer: " + b"x" * OVERHEAD, "no body"),
    ],
)
def test_what_is_no_answer_is_a_fault_with_its_cause_however_it_comes(data: bytes, why: str) -> None:
    for size in (1, 7, len(data)):
        got = Answer()
        for start in range(0, len(data), size):
            got.feed(data[start : start + size])
            if got.fault:
                break
        assert not got.complete
        assert why in got.fault


def test_a_long_body_is_no_overhead() -> None:
    piece = b"x" * OVERHEAD
    got = answer(HEAD + b"\r\n", *[b"%x\r\n%s\r\n" % (len(piece), piece)] * 3)
    assert (got.fault, sum(map(len, got.pieces))) == ("", 3 * OVERHEAD)
