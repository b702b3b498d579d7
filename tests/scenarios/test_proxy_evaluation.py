"""What an evaluation's agents get: the weights they are to judge, sampled as the evaluation says."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.testing import toy_ids
from workers.engines.script import Play

ASK = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}


async def evaluate(bench: Any, version: int) -> Any:
    """A client of the one sample of an evaluation."""
    stream = f"eval/{version}"
    await bench.proxy.control.set_admission("demo", stream, admit_until=1, target_in_flight=8, samples_per_task=1)
    (sample,) = await bench.proxy.control.claim_samples("demo", stream, "w", 1)
    bench.session = {"session": sample.session, "api_key": sample.api_key}
    return bench.client_of(bench.session)


async def test_an_evaluation_waits_for_an_engine_with_its_weights_and_uses_no_other(start_bench: Any) -> None:
    bench = await start_bench(Play(toy_ids("training")), Play(toy_ids("judged")))
    await bench.update_weights(4)
    client = await evaluate(bench, 3)
    judged = asyncio.create_task(client.chat.completions.create(**ASK))
    # Asked behind it and answered before it: the evaluation does wait, and training does not.
    assert (await bench.ask()).choices[0].message.content == "training"
    assert not judged.done()
    await bench.update_weights(3)
    assert (await judged).choices[0].message.content == "judged"


async def test_an_evaluation_samples_as_its_section_says(start_bench: Any) -> None:
    evaluation = {"temperature": 0.5, "top_p": 0.25, "max_tokens": 3}
    bench = await start_bench(Play(toy_ids("one")), evaluation=evaluation)
    client = await evaluate(bench, 0)
    await client.chat.completions.create(**ASK, temperature=2.0, max_tokens=100)
    (request,) = bench.engine.requests
    assert (request.temperature, request.top_p, request.max_new_tokens) == (0.5, 0.25, 3)
