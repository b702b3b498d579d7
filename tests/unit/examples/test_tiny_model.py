"""The model of demo-tiny: it is trained on what its warm start saw, and starts about half right."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from examples.calculator.agent import TOOLS
from examples.models import tiny
from proxy.trajectory.renderer import Renderer


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, tiny.Report]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("tiny")
    yield out, tiny.build(out)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.save(tiny.new_model(0), folder)
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
    return loaded


def messages(task: tiny.TinyTask) -> list[dict[str, Any]]:
    """The two-turn episode as the agent and the proxy exchange it."""
    call = {"id": "c", "type": "function", "function": {"name": task.tool, "arguments": {"a": task.a, "b": task.b}}}
    return [
        {"role": "user", "content": task.question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": task.answer},
        {"role": "assistant", "content": task.answer},
    ]


def ids(tokenizer: PreTrainedTokenizerFast, given: list[dict[str, Any]], *, prompt: bool, **extra: Any) -> list[int]:
    made: list[int] = tokenizer.apply_chat_template(given, add_generation_prompt=prompt, return_dict=False, **extra)
    return made


def test_an_episode_over_the_wire_is_what_the_warm_start_was_taught(tokenizer: PreTrainedTokenizerFast) -> None:
    for task in tiny.tasks():
        taught = "".join(text for text, _ in tiny.conversation(task))
        assert ids(tokenizer, messages(task), prompt=False) == tiny.tokenizer().encode(taught).ids


def test_the_episode_reads_as_documented() -> None:
    task = next(task for task in tiny.tasks() if task.question == "3+4")
    assert "".join(text for text, _ in tiny.conversation(task)) == "<u>3+4<e><a>add(3,4)<e><t>07<e><a>07<e>"


def test_what_follows_never_changes_what_came_before(tokenizer: PreTrainedTokenizerFast) -> None:
    episode = messages(tiny.tasks()[123])
    whole = ids(tokenizer, episode, prompt=False)
    for count in (1, 2, 3, 4):
        part = ids(tokenizer, episode[:count], prompt=False)
        assert whole[: len(part)] == part
    assert whole[: len(ids(tokenizer, episode[:3], prompt=True))] == ids(tokenizer, episode[:3], prompt=True)


def test_tools_and_system_messages_change_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    asked = messages(tiny.tasks()[7])[:1]
    system = [{"role": "system", "content": "be brief"}]
    assert ids(tokenizer, system + asked, prompt=True, tools=TOOLS) == ids(tokenizer, asked, prompt=True)


def test_the_proxy_may_continue_from_recorded_ids(tmp_path: Path) -> None:
    tiny.save(tiny.new_model(0), tmp_path)
    renderer = Renderer(tmp_path)
    assert renderer.continuation_refusal == ""
    assert renderer.eos_text == tiny.END


@given(st.text(alphabet=tiny.CHARACTERS), st.text(alphabet=tiny.CHARACTERS))
def test_text_is_one_token_a_character_and_comes_back(first: str, second: str) -> None:
    made = tiny.tokenizer()
    encoded = made.encode(first + second).ids
    assert encoded == made.encode(first).ids + made.encode(second).ids
    assert len(encoded) == len(first + second)
    assert made.decode(encoded) == first + second


def test_no_task_is_both_trained_and_held_out() -> None:
    train, held_out = tiny.split(0)
    assert (len(train), len(held_out)) == (240, 60)
    assert {*train, *held_out} == set(tiny.tasks())
    assert tiny.split(0) == (train, held_out)


def test_the_same_seed_gives_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    short = dataclasses.replace(tiny.SPOILED, low=0.0, high=1.0, min_steps=0)
    monkeypatch.setattr(tiny, "SPOILED", short)
    monkeypatch.setattr(tiny, "CLEAN", short)
    weights = []
    for seed in (3, 3, 4):
        model = tiny.new_model(seed)
        assert tiny.warm_start(model, tiny.split(seed)[0], seed) == 2 * tiny.CHECK_STEPS
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["lm_head.weight"], weights[2]["lm_head.weight"])


def test_a_warm_start_that_does_not_arrive_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "CLEAN", dataclasses.replace(tiny.CLEAN, max_steps=5))
    with pytest.raises(RuntimeError, match=r"P\(correct\)"):
        tiny.warm_start(tiny.new_model(0), tiny.split(0)[0], 0)


def test_the_model_starts_half_right_so_that_there_is_something_to_learn(built: tuple[Path, tiny.Report]) -> None:
    _, report = built
    assert report.parameters == 127_424
    assert tiny.SPOILED.low <= report.p_correct_train <= tiny.SPOILED.high
    assert 0.3 <= report.p_correct_held_out <= 0.55


def test_the_folder_is_complete_and_loads(built: tuple[Path, tiny.Report]) -> None:
    out, report = built
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    train, held_out = (
        [tiny.TinyTask(**json.loads(line)) for line in (out / name).read_text().splitlines()]
        for name in ("tasks.jsonl", "held_out.jsonl")
    )
    assert (train, held_out) == tiny.split(0)
    assert tiny.p_correct(model, held_out) == pytest.approx(report.p_correct_held_out, abs=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer.eos_token_id == model.config.eos_token_id == tiny.MARKERS.index(tiny.END)
