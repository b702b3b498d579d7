"""What the model reads of earlier turns: the tokens it read and wrote, or what the template makes of them."""

from __future__ import annotations

import pytest

from proxy.testing import toy_ids
from workers.engines.script import Play

USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
DROPS = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > last.user %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that leaves out the reasoning of earlier turns."""
THOUGHT = "<think>\nHm.\n</think>\n\nHello"


def bench_of(start_bench, history, *texts, template=DROPS):
    model = {"reasoning_parser": "think", "history": history}
    return start_bench(*[Play(toy_ids(text)) for text in texts], template=template, model=model)


async def ask(client, *messages):
    answer = await client.chat.completions.create(model="any", messages=list(messages))
    return answer.choices[0].message.model_dump(exclude_none=True)


async def outcomes(bench):
    return [turn["outcome"] for turn in await bench.turns()]


async def test_kept_history_is_the_recorded_tokens_reasoning_included(start_bench):
    bench = await bench_of(start_bench, "keep", THOUGHT, "ok")
    client = await bench.client()
    answer = await ask(client, USER)
    await ask(client, USER, answer, MORE)
    first, second = bench.engine.requests
    recorded = (*first.ids, *toy_ids(THOUGHT))
    assert second.ids[: len(recorded)] == recorded
    assert await outcomes(bench) == ["root", "extend"]


async def test_case_31_the_template_s_history_branches_where_its_tokens_are_others(start_bench):
    bench = await bench_of(start_bench, "template", THOUGHT, "ok")
    client = await bench.client()
    answer = await ask(client, USER)
    await ask(client, USER, answer, MORE)
    session = await bench.recorded()
    (first, second), tree = session.turns, session.tree
    assert await outcomes(bench) == ["root", "fork"]
    assert second.reason.startswith("template_history")
    assert toy_ids("Hm.", end=False) not in windows(bench.engine.requests[1].ids, 3)
    # Two leaves, a shared prefix up to where they part, each sampled token once.
    shared = len(first_prompt := bench.engine.requests[0].ids)
    assert bench.engine.requests[1].ids[:shared] == first_prompt
    assert set(tree.path(first.prompt_end)) < set(tree.path(second.prompt_end))
    assert tree.tokens("completion") == len(toy_ids(THOUGHT)) + len(toy_ids("ok"))
    assert session.trainable() == {first.generation, second.generation}


async def test_the_template_s_history_extends_where_its_tokens_are_the_recorded_ones(start_bench):
    bench = await bench_of(start_bench, "template", "Hello", "ok")
    client = await bench.client()
    answer = await ask(client, USER)
    await ask(client, USER, answer, MORE)
    recorded = (*bench.engine.requests[0].ids, *toy_ids("Hello"))
    assert bench.engine.requests[1].ids[: len(recorded)] == recorded
    assert await outcomes(bench) == ["root", "extend"]


async def test_the_template_s_history_decides_by_tokens_and_not_by_text(start_bench):
    """The model wrote a special token that the agent never sees."""
    bench = await start_bench(
        Play((*toy_ids("a", end=False), 0, *toy_ids("b"))), Play(toy_ids("ok")), model={"history": "template"}
    )
    client = await bench.client()
    answer = await ask(client, USER)
    assert answer["content"] == "ab"
    await ask(client, USER, answer, MORE)
    assert await outcomes(bench) == ["root", "fork"]
    assert 0 not in bench.engine.requests[1].ids


@pytest.mark.parametrize("history", ["keep", "template"])
async def test_either_way_a_prompt_is_what_the_engine_read(start_bench, history):
    bench = await bench_of(start_bench, history, THOUGHT, "ok", THOUGHT, "bye")
    client = await bench.client()
    messages = [USER]
    for _ in range(4):
        messages += [await ask(client, *messages), MORE]
    session = await bench.recorded()
    for turn, request in zip(session.turns, bench.engine.requests, strict=True):
        assert tuple(session.prompt_ids(turn)) == request.ids


def windows(ids, length):
    return [tuple(ids[start : start + length]) for start in range(len(ids))]
