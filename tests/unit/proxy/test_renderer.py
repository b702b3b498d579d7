"""The renderer gives the ids that transformers gives, and continues a conversation only where that is proved safe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_families import FAMILIES, ModelFamily

from proxy.dialects.chat import ChatDialect
from proxy.testing import CHATML, write_toy_model
from proxy.trajectory.canonical import Message, ToolCall
from proxy.trajectory.families import Family, detect
from proxy.trajectory.renderer import Renderer
from storage.errors import ConfigError, InvalidRequest

TOOL = {
    "type": "function",
    "function": {
        "name": "wetter",
        "description": "Größe & <Maß>",
        "parameters": {"type": "object", "properties": {"ort": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
USER, AGAIN = Message("user", "Wie groß? \N{GRINNING FACE} <b>&"), Message("user", "again")
CALL = Message("assistant", "", tool_calls=(ToolCall("wetter", '{"ort": "Köln", "n": 3}'),))
TWICE = Message("assistant", "", tool_calls=(*CALL.tool_calls, ToolCall("wetter", '{"ort": "Bonn"}')))
CONVERSATIONS = {
    "one question": [USER],
    "system": [Message("system", "Be brief."), USER],
    "answered": [USER, Message("assistant", "so"), AGAIN],
    "system, answered": [Message("system", "Be brief."), USER, Message("assistant", "so"), AGAIN],
    "thought": [USER, Message("assistant", "so", reasoning="hm"), AGAIN],
    "thought and called": [USER, Message("assistant", "", "hm", CALL.tool_calls), Message("tool", "12")],
    "tool result": [USER, CALL, Message("tool", "12")],
    "two calls": [USER, TWICE, Message("tool", "12"), Message("tool", "13")],
    "tool result and on": [USER, CALL, Message("tool", "12"), Message("assistant", "12"), AGAIN],
}
REFUSED = {("llama3", "two calls")}
"""Conversations that a family's template refuses."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: family.write(tmp_path_factory.mktemp("family") / name) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def renderers(models: dict[str, Path]) -> dict[str, Renderer]:
    return {name: Renderer(folder) for name, folder in models.items()}


def as_client(family: ModelFamily, messages: list[Message]) -> list[dict[str, Any]]:
    """The conversation as a client of transformers writes it for the family's template."""
    written, results = [], 0
    for message in messages:
        data: dict[str, Any] = {"role": message.role, "content": message.content}
        results = results + 1 if message.role == "tool" else 0
        if results:
            data["tool_call_id"] = f"call{results - 1:05d}"
        if message.tool_calls:
            data["content"] = message.content or (None if family.arguments_as_text else "")
            data["tool_calls"] = [
                {
                    "id": f"call{number:05d}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if family.arguments_as_text else json.loads(call.arguments),
                    },
                }
                for number, call in enumerate(message.tool_calls)
            ]
        if message.reasoning and family.reasoning_in_content:
            text = [{"type": "text", "text": message.content}] if message.content else []
            data["content"] = [{"type": "thinking", "thinking": message.reasoning}, *text]
        elif message.reasoning:
            data["reasoning_content"] = message.reasoning
        written.append(data)
    return written


@pytest.mark.parametrize("thinking", [None, False, True])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_equal_those_of_transformers(models, renderers, name, tools, thinking):
    from transformers import AutoTokenizer
    from transformers.utils.chat_template_utils import render_jinja_template

    reference = AutoTokenizer.from_pretrained(models[name])
    variables = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
    for title, messages in CONVERSATIONS.items():
        if (name, title) in REFUSED:
            continue
        asked = {"tools": tools, "add_generation_prompt": True, **variables}
        written = as_client(FAMILIES[name], messages)
        if name == "deepseek-r1":  # apply_chat_template leaves out null content, which this template asks for
            asked |= {"chat_template": reference.chat_template, **reference.special_tokens_map}
            ((text,), _) = render_jinja_template([written], **asked)
            expected = reference.encode(text, add_special_tokens=False)
        else:
            expected = reference.apply_chat_template(written, return_dict=False, **asked)
        assert renderers[name].prompt(messages, tools, thinking=thinking).tolist() == list(expected), title


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_known_by_its_template(renderers, name):
    family = FAMILIES[name]
    assert renderers[name].family == Family(family.tool_parser, family.reasoning_parser)
    assert renderers[name].takes_thinking == (name in ("qwen3", "deepseek-v3.1"))


@pytest.mark.parametrize(
    ("source", "special_tokens", "family"),
    [
        ('{{ \'{"name": f, "parameters": {}}\' }}', ["<|eot_id|>"], Family("llama_json", "none")),
        ('{{ \'{"name": f, "parameters": {}}\' }}', ["</s>"], Family("none", "none")),
        ("<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>", [], Family("none", "none")),
        ("{{ message.content.split('</think>')[-1] }}", [], Family("none", "think")),
        ("", ["<think>", "[TOOL_CALLS]"], Family("none", "none")),
    ],
)
def test_what_a_template_shows_decides_not_what_the_vocabulary_could(source, special_tokens, family):
    assert detect(source, special_tokens) == family


def test_a_template_that_writes_calls_in_a_way_the_parser_cannot_read_has_no_parser(tmp_path):
    quoted_twice = CHATML.replace("call.function.arguments | tojson", "call.function.arguments | tojson | tojson")
    assert Renderer(write_toy_model(tmp_path / "a")).family.tool_parser == "hermes"
    assert Renderer(write_toy_model(tmp_path / "b", template=quoted_twice)).family.tool_parser == "none"


@pytest.mark.parametrize("thinking", [None, False, True])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.continues])
def test_a_continuation_is_the_template_s_own_text_behind_the_answer(renderers, name, thinking):
    renderer = renderers[name]
    assert renderer.continuation_refusal == ""
    for title, messages in CONVERSATIONS.items():
        if len(messages) < 3 or (name, title) in REFUSED:
            continue
        last = max(index for index, message in enumerate(messages) if message.role == "assistant")
        answer, new = messages[last], messages[last + 1 :]
        ids = renderer.continuation(answer, new, [TOOL], ended=True, thinking=thinking)
        whole = renderer.prompt(messages, [TOOL], thinking=thinking)
        assert np.array_equal(whole[len(whole) - len(ids) :], ids), title
        assert whole[len(whole) - len(ids) - 1] == renderer.eos_id
        cut = renderer.continuation(answer, new, [TOOL], ended=False, thinking=thinking)
        assert cut.tolist() == [renderer.eos_id, *ids.tolist()]


def test_calls_in_parallel_are_continued_even_where_the_template_refuses_to_render_them(renderers):
    renderer = renderers["llama3"]
    conversation = CONVERSATIONS["two calls"]
    with pytest.raises(InvalidRequest, match="One call at a time"):
        renderer.prompt(conversation, [TOOL])
    ids = renderer.continuation(TWICE, conversation[2:], [TOOL], ended=True)
    assert renderer.raw_text(ids.tolist()).count("ipython") == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mistral-nemo", r"depends on what came before it \('Be brief"),
        ("deepseek-r1", "depends on what came before it .*tool▁output"),
    ],
)
def test_a_family_whose_template_looks_back_is_not_continued(renderers, name, reason):
    assert not FAMILIES[name].continues
    with pytest.raises(AssertionError, match=reason):
        assert renderers[name].continuation_refusal == ""


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages %}{{ loop.index }}{{ m.content }}<|im_end|>{% endfor %}",
            "depends on what came before",
        ),
        ("{{ messages[-1].content }}<|im_end|>", "leaves out"),
    ],
)
def test_a_template_whose_continuation_cannot_be_proved_is_refused_with_the_reason(tmp_path, template, reason):
    assert reason in Renderer(write_toy_model(tmp_path, template=template)).continuation_refusal


def test_the_end_of_a_turn_is_the_token_that_the_template_writes(tmp_path):
    folder = FAMILIES["llama3"].write(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>", "bos_token": "<|begin_of_text|>"}')
    renderer = Renderer(folder)
    assert renderer.eos_text == "<|eot_id|>"
    assert {renderer.token_text(token) for token in renderer.eos_ids} == {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}
    assert renderer.continuation_refusal == ""


def test_results_of_calls_carry_the_ids_of_the_calls_in_front_of_them(renderers):
    text = renderers["mistral-small"].text(
        [*CONVERSATIONS["two calls"], TWICE, Message("tool", "1")], None, prompt=True
    )
    assert text.count('"id": "call00000"') == text.count('"call_id": "call00000"') == 2
    assert text.count('"id": "call00001"') == 2
    assert text.count('"call_id": "call00001"') == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_27_no_content_beside_calls_is_rendered_as_nothing(renderers, name):
    if FAMILIES[name].tool_parser != "none":
        text = renderers[name].text([USER, CALL], None, prompt=False)
        assert "None" not in text
        assert text.count("Köln") == 1
        assert renderers[name].text([USER, Message("assistant", "", "", CALL.tool_calls)], None, prompt=False) == text


def test_31_a_template_that_drops_old_thoughts_gives_ids_that_leave_the_recorded_path(renderers):
    renderer = renderers["qwen3"]
    first = renderer.prompt([USER], None)
    answer = renderer.encode("<think>\nhm\n</think>\n\nso<|im_end|>")
    recorded = np.concatenate([first, answer])
    kept = np.concatenate([recorded, renderer.continuation(CONVERSATIONS["thought"][1], [AGAIN], None, ended=True)])
    rendered = renderer.prompt(CONVERSATIONS["thought"], None)
    shared = int(np.argmin(kept[: len(rendered)] == rendered))
    assert len(first) <= shared < len(recorded)
    assert kept[: len(recorded)].tolist() == recorded.tolist()


@pytest.mark.parametrize(
    ("name", "written", "opened"),
    [
        ("qwen3", "<think>\nhm\n\nhm\n</think>\n\nso\n", False),
        ("qwen3", "hm\n</think>\n\nso", True),
        (
            "qwen3",
            '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "wetter", "arguments": {"n": 3}}\n</tool_call>',
            False,
        ),
        ("magistral", "[THINK]\n hm [/THINK]\n so", False),
        ("magistral", '[THINK]hm[/THINK][TOOL_CALLS]wetter[ARGS]{"n": 3}', False),
        ("deepseek-v3.1", "so", False),
    ],
)
def test_32_an_answer_that_is_rendered_again_has_the_ids_that_the_model_wrote(renderers, name, written, opened):
    renderer, family = renderers[name], FAMILIES[name]
    reading = renderer.reading(family.tool_parser, family.reasoning_parser)
    thoughts, parts = [], []
    parser, calls = reading.reasoning(opened=opened), reading.calls([TOOL])
    for piece in [*parser.feed(written), *parser.finish()]:
        if isinstance(piece, str):
            parts += calls.feed(piece)
        else:
            thoughts.append(piece.text)
    parts += calls.finish(ended=True)
    text = "".join(part for part in parts if isinstance(part, str))
    answer = Message("assistant", text, "".join(thoughts), tuple(part for part in parts if isinstance(part, ToolCall)))
    again = renderer.text([USER, answer], None, prompt=False)
    model_wrote = f"<think>\n{written}" if opened else written
    assert again.rstrip("\n").endswith(model_wrote + renderer.eos_text)
    assert bool(answer.reasoning) == ("hm" in written)


def ids_of(renderer: Renderer, messages: list[dict[str, Any]]) -> list[int]:
    request = ChatDialect().parse(json.dumps({"model": "m", "messages": messages}).encode())
    return renderer.prompt(request.messages, None).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_77_a_result_as_parts_or_as_text_has_the_same_ids(renderers, name):
    call = {"id": "c1", "type": "function", "function": {"name": "wetter", "arguments": '{"n": 3}'}}
    before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    results = ("10525", [{"type": "text", "text": "10525"}])
    text, parts = ([*before, {"role": "tool", "tool_call_id": "c1", "content": result}] for result in results)
    assert ids_of(renderers[name], text) == ids_of(renderers[name], parts)
    assert "10525" in renderers[name].raw_text(ids_of(renderers[name], parts))


@pytest.mark.parametrize("name", ["qwen3", "magistral"])
def test_80_reasoning_under_either_name_has_the_same_ids(renderers, name):
    users = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    said = {"role": "assistant", "content": "so"}
    fields = ({"reasoning": "hm"}, {"reasoning_content": "hm"}, {})
    older, newer, none = (ids_of(renderers[name], [users[0], {**said, **field}]) for field in fields)
    assert older == newer != none


def test_40_the_same_text_in_other_tokens_is_another_path(renderers):
    renderer = renderers["qwen2.5"]
    whole, split = (
        renderer.encode("jsonpenderer"),
        np.concatenate([renderer.encode("json"), renderer.encode("penderer")]),
    )
    assert renderer.raw_text(whole.tolist()) == renderer.raw_text(split.tolist()) == "jsonpenderer"
    assert whole.tolist() != split.tolist()


def test_a_template_that_refuses_a_conversation_says_so_in_its_own_words(tmp_path):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        Renderer(write_toy_model(tmp_path, template=template)).prompt([USER], None)


def test_templates_run_in_a_sandbox(tmp_path):
    template = "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"
    with pytest.raises(InvalidRequest, match="template"):
        Renderer(write_toy_model(tmp_path, template=template)).prompt([USER], None)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"), "chat template, line 1"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{}"), "names no eos_token"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "not JSON"),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"})),
            "not in tokenizer.json",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_refused_with_what_is_wrong(tmp_path, break_it, words):
    folder = write_toy_model(tmp_path / "model")
    break_it(folder)
    with pytest.raises(ConfigError, match=words):
        Renderer(folder)
