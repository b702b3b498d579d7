"""An OpenAPI document of the agent API: every endpoint, every parameter that it reads, in small JSON schemas."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 40}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 12, "pattern": "^[a-zA-Z0-9_-]+$"}
ARGUMENTS: Schema = {"enum": ["{}", '{"a": 1}', '{"a": [null, "\\u00e9"]}', "no JSON", ""]}
JSON_SCHEMA: Schema = {"enum": [{}, {"type": "object"}, {"type": "object", "properties": {"a": {"type": "integer"}}}]}


def one_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def either(*values: Any) -> Schema:
    return {"enum": list(values)}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def some(items: Schema, *, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def record(required: Schema | None = None, **optional: Schema) -> Schema:
    """An object of these fields and no others."""
    properties = {**(required or {}), **optional}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or {}),
        "additionalProperties": False,
    }


FUNCTION = record({"name": NAME}, description=TEXT, parameters=JSON_SCHEMA, strict=either(None, False))
SAMPLING: Schema = {
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": whole(1, 50),
    "seed": whole(-(2**63), 2**63 - 1),
}
PENALTIES: Schema = {
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": either(None, {}, {"104": 5}, {"258": -100.0}),
}
STOPS = one_of(TEXT, some(TEXT), {"type": "null"})
STREAMED: Schema = {"stream": either(False, True, None)}

PART = one_of(record({"type": either("text"), "text": TEXT}), record({"type": either("image_url"), "image_url": TEXT}))
CONTENT = one_of(TEXT, some(PART, least=1))
CALL = record(
    {"id": NAME, "type": either("function"), "function": record({"name": NAME, "arguments": ARGUMENTS})},
    index=whole(0, 3),
)
CHAT_MESSAGE = one_of(
    record({"role": either("system", "developer", "user"), "content": CONTENT}, name=NAME),
    record({"role": either("assistant"), "content": one_of(CONTENT, either(None))}, reasoning_content=TEXT),
    record({"role": either("assistant"), "tool_calls": some(CALL, least=1)}, content=either(None, "")),
    record({"role": either("tool"), "tool_call_id": NAME, "content": CONTENT}),
)
CHAT_TOOL = record({"type": either("function"), "function": FUNCTION})
CHAT = record(
    {"model": NAME, "messages": some(CHAT_MESSAGE, least=1, most=5)},
    **SAMPLING,
    **PENALTIES,
    **STREAMED,
    tools=some(CHAT_TOOL),
    tool_choice=either("auto", "none", "required", {"type": "function", "function": {"name": "add"}}),
    parallel_tool_calls=either(True, False),
    max_tokens=whole(1, 10**9),
    max_completion_tokens=whole(1, 50),
    stop=STOPS,
    n=whole(1, 4),
    response_format=either(
        {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}
    ),
    chat_template_kwargs=either({"enable_thinking": True}, {}),
    reasoning_effort=either("none", "low", "high"),
    stream_options=either(None, {"include_usage": True}),
    logprobs=either(True, False),
    top_logprobs=whole(0, 20),
    user=TEXT,
    metadata=either({}, {"a": "b"}),
)
COMPLETION = record(
    {"model": NAME, "prompt": one_of(TEXT, some(TEXT, least=1, most=2), some(whole(0, 258), least=1, most=20))},
    **SAMPLING,
    **PENALTIES,
    **STREAMED,
    max_tokens=whole(1, 50),
    stop=STOPS,
    n=whole(1, 4),
    best_of=whole(1, 4),
    logprobs=whole(0, 5),
    echo=either(False, True),
    suffix=either("", "x"),
    stream_options=either(None, {"include_usage": True}),
)
ITEM_TEXT = one_of(TEXT, some(record({"type": either("input_text", "output_text"), "text": TEXT}), least=1))
ITEM = one_of(
    record({"role": either("user", "system", "developer", "assistant"), "content": ITEM_TEXT}, type=either("message")),
    record({"type": either("function_call"), "call_id": NAME, "name": NAME, "arguments": ARGUMENTS}),
    record({"type": either("function_call_output"), "call_id": NAME, "output": one_of(TEXT, some(PART))}),
    record({"type": either("reasoning"), "summary": some(record({"type": either("summary_text"), "text": TEXT}))}),
)
RESPONSE = record(
    {"model": NAME, "input": one_of(TEXT, some(ITEM, least=1, most=5))},
    **STREAMED,
    instructions=TEXT,
    temperature=number(0, 2),
    top_p=number(0, 1),
    max_output_tokens=whole(1, 10**9),
    tools=some(
        one_of(
            record({"type": either("function"), "name": NAME}, parameters=JSON_SCHEMA, strict=either(True, False)),
            record({"type": either("custom"), "name": NAME}),
            record({"type": either("web_search")}),
        )
    ),
    tool_choice=either("auto", "none", "required", {"type": "function", "name": "add"}),
    parallel_tool_calls=either(True, False),
    text=either({}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}),
    reasoning=either({}, {"effort": "none"}, {"effort": "high", "summary": "auto"}),
    include=some(either("reasoning.encrypted_content", "message.output_text.logprobs")),
    top_logprobs=whole(0, 20),
    store=either(True, False),
    previous_response_id=either(None, "resp_unknown", "nonsense"),
)
BLOCK = one_of(
    record({"type": either("text"), "text": TEXT}, cache_control=either({"type": "ephemeral"})),
    record({"type": either("tool_use"), "id": NAME, "name": NAME, "input": either({}, {"a": 1})}),
    record(
        {"type": either("tool_result"), "tool_use_id": NAME},
        content=one_of(TEXT, some(record({"type": either("text"), "text": TEXT}))),
        is_error=either(True, False),
    ),
    record({"type": either("thinking"), "thinking": TEXT, "signature": TEXT}),
    record({"type": either("image"), "source": either({})}),
)
PROMPTED: Schema = {
    "messages": some(
        record({"role": either("user", "assistant", "system"), "content": one_of(TEXT, some(BLOCK, least=1))}),
        least=1,
        most=5,
    )
}
PROMPTING: Schema = {
    "system": one_of(TEXT, some(record({"type": either("text"), "text": TEXT}))),
    "tools": some(record({"name": NAME, "input_schema": JSON_SCHEMA}, description=TEXT)),
    "tool_choice": either({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "add"}, {"type": "none"}),
    "thinking": either({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}),
}
MESSAGE = record(
    {"model": NAME, "max_tokens": whole(1, 10**9), **PROMPTED},
    **PROMPTING,
    **STREAMED,
    temperature=number(0, 1),
    top_p=number(0, 1),
    top_k=whole(1, 50),
    stop_sequences=some(TEXT),
    metadata=either({"user_id": "u"}),
    output_config=either({}, {"effort": "low"}, {"format": {"type": "json_schema", "schema": {}}}),
)
COUNT = record({"model": NAME, **PROMPTED}, **PROMPTING)


def document() -> Schema:
    """The OpenAPI document."""
    bodies = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": COMPLETION,
        "/v1/responses": RESPONSE,
        "/v1/messages": MESSAGE,
        "/v1/messages/count_tokens": COUNT,
    }
    responses = {"200": {"description": "the answer"}, "4XX": {"description": "refused, with the reason"}}
    retry = {"in": "header", "name": "x-stainless-retry-count", "schema": either("0", "1", "many")}
    paths: Schema = {
        path: {
            "post": {
                "parameters": [retry],
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": responses,
            }
        }
        for path, schema in bodies.items()
    }
    name = {"in": "path", "name": "model", "required": True, "schema": either("demo", "other", "demo/")}
    paths["/v1/models"] = {"get": {"responses": responses}}
    paths["/v1/models/{model}"] = {"get": {"parameters": [name], "responses": responses}}
    return {"openapi": "3.1.0", "info": {"title": "agent API", "version": "1"}, "paths": paths}
