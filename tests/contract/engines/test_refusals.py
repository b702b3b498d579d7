"""What an engine cannot do is refused by name, and it lives on."""

from __future__ import annotations

from typing import Any

import pytest

from storage.errors import EngineRejected
from tests.contract.engines.driver import PROMPT, Bench
from tests.contract.engines.models import CONTEXT, VOCAB
from workers.engines.base import FEATURES, Transfer

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a prompt id one too high": ({"prompt": [VOCAB]}, "vocabulary"),
    "a prompt id far too high": ({"prompt": [1, 2, 1 << 30]}, "vocabulary"),
    "a negative prompt id": ({"prompt": [1, -1]}, "vocabulary"),
    "a stop id too high": ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    "a bias on an id too high": ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    "a prompt as long as the context": ({"prompt": [1] * CONTEXT, "tokens": 1}, "context"),
    "an answer that would leave the context": ({"tokens": CONTEXT - len(PROMPT) + 1}, "context"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_bad_input_is_refused_and_the_engine_lives(bench: Bench, what: str) -> None:
    options, cause = REFUSED[what]
    beside = await bench.running(tokens=100)
    with pytest.raises(EngineRejected, match=cause):
        await bench.generate(**options)
    assert (await beside.end()).finish == "length"
    assert len((await bench.generate()).ids) == 8


async def test_the_context_can_be_filled_to_the_last_token(bench: Bench) -> None:
    generation = await bench.generate(prompt=[1] * (CONTEXT - 20), tokens=20)
    assert len(generation.ids) == 20


async def test_an_empty_prompt_is_refused(bench: Bench) -> None:
    stream = bench.engine.generate([], bench.start().sampling, request_id="e" * 32, salt="")
    with pytest.raises(EngineRejected, match="empty"):
        await anext(stream)


async def test_a_request_id_that_is_live_is_refused(bench: Bench) -> None:
    generation = await bench.running()
    with pytest.raises(EngineRejected, match=r"(?i)duplicate"):
        await bench.generate(rid=generation.rid)
    await bench.engine.abort(generation.rid)
    assert (await generation.end()).finish == "abort"


FEATURE_EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("grammar", {"json_schema": '{"type": "string", "minLength": 200}'}),
    ("penalties", {"frequency_penalty": 0.5}),
    ("penalties", {"presence_penalty": -0.5}),
    ("logit_bias", {"logit_bias": {5: 1.5}}),
    ("top_logprobs", {"top_logprobs": 2}),
]


@pytest.mark.parametrize(("feature", "options"), FEATURE_EXAMPLES)
async def test_an_engine_has_the_features_it_is_said_to_have_and_refuses_the_others_by_name(
    bench: Bench, feature: str, options: dict[str, Any]
) -> None:
    assert bench.can(feature) == (feature in FEATURES[bench.rig.kind])
    if bench.can(feature):
        assert len((await bench.generate(**options)).ids) == 8
    else:
        with pytest.raises(EngineRejected, match=next(iter(options))):
            await bench.generate(**options)


async def test_a_broadcast_is_refused_by_an_engine_that_takes_none(bench: Bench) -> None:
    if bench.can("collective"):
        pytest.skip(f"{bench.rig.kind} takes broadcasts")
    transfer = Transfer("group", "127.0.0.1", 1, rank=1, world_size=2)
    with pytest.raises(EngineRejected, match="broadcast"):
        await bench.engine.load_weights(str(bench.checkpoints.second), 1, transfer)
    assert (await bench.engine.info()).weight_version == 0
