"""The renderer gives the ids that transformers gives, and continues a conversation only where that is proved safe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from proxy.testing import CHATML, write_toy_model
from proxy.trajectory.canonical import Message, ToolCall
from proxy.trajectory.renderer import Renderer
from storage.errors import ConfigError, InvalidRequest

# The shape of Qwen3's template: tools in the system turn, tool results grouped in a user turn, old thoughts dropped.
QWEN3_LIKE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, multi=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.multi and message.role == "user" and message.content is string %}
        {%- set ns.multi = false %}{%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {%- set call = call.function %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
TOOL = {
    "type": "function",
    "function": {"name": "wetter", "description": "Größe & <Maß>", "parameters": {"type": "object", "properties": {}}},
}
USER, AGAIN = Message("user", "Wie groß? \N{GRINNING FACE} <b>&"), Message("user", "again")
CALL = Message("assistant", "", tool_calls=(ToolCall("wetter", '{"ort": "Köln", "n": 3}'),))
CONVERSATIONS = {
    "one question": [USER],
    "system": [Message("system", "Be brief."), USER],
    "answered": [USER, Message("assistant", "so"), AGAIN],
    "thought": [USER, Message("assistant", "so", reasoning="hm"), AGAIN],
    "tool result": [USER, CALL, Message("tool", "12"), Message("tool", "13")],
    "tool result and on": [USER, CALL, Message("tool", "12"), Message("assistant", "12"), AGAIN],
}
TEMPLATES = {"chatml": CHATML, "qwen3-like": QWEN3_LIKE}


@pytest.fixture(params=TEMPLATES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_toy_model(tmp_path / "model", template=TEMPLATES[request.param], merges=("user", "assistant", "</"))


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_equal_those_of_transformers(model, name, tools):
    from transformers import AutoTokenizer

    messages = CONVERSATIONS[name]
    reference = AutoTokenizer.from_pretrained(model)
    expected = reference.apply_chat_template(
        [message.for_template() for message in messages], tools=tools, add_generation_prompt=True, return_dict=False
    )
    assert Renderer(model).prompt(messages, tools).tolist() == list(expected)


@pytest.mark.parametrize("name", [name for name, messages in CONVERSATIONS.items() if len(messages) > 2])
def test_a_continuation_is_the_template_s_own_text_behind_the_answer(model, name):
    messages = CONVERSATIONS[name]
    last = max(index for index, message in enumerate(messages) if message.role == "assistant")
    renderer = Renderer(model)
    assert renderer.continuation_refusal == ""
    ids = renderer.continuation(messages[last], messages[last + 1 :], None, ended=True)
    whole = renderer.prompt(messages, None)
    assert np.array_equal(whole[len(whole) - len(ids) :], ids)
    assert whole[len(whole) - len(ids) - 1] == renderer.eos_id
    cut = renderer.continuation(messages[last], messages[last + 1 :], None, ended=False)
    assert cut.tolist() == [renderer.eos_id, *ids.tolist()]


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
