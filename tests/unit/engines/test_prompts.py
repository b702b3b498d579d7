"""A prompt is sent as the ids it has, whether its JSON is known already or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from workers.engines.base import TokenIds, in_json, written

IDS = np.asarray([7, 0, 4096], np.int32)
WRITTEN = written(IDS, b"[7,0,4096]")


def sent(ids: TokenIds) -> Any:
    return orjson.loads(orjson.dumps({"ids": in_json(ids)}, option=orjson.OPT_SERIALIZE_NUMPY))["ids"]


@pytest.mark.parametrize("ids", [[7, 0, 4096], (7, 0, 4096), IDS, WRITTEN, WRITTEN.copy()], ids=repr)
def test_ids_of_every_kind_are_sent_as_they_are(ids):
    assert sent(ids) == [7, 0, 4096]


def test_a_part_of_a_written_prompt_is_sent_without_the_rest():
    assert sent(WRITTEN[1:]) == [0, 4096]
    assert sent(np.concatenate([WRITTEN, IDS])) == [7, 0, 4096] * 2


def test_what_is_in_the_json_is_what_is_sent():
    assert sent(written(IDS, b"[1]")) == [1]
