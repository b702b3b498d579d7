"""Build the 0.13 M-parameter model of ``demo-tiny``: Qwen3 with a character tokenizer, warm-started on the spot.

The task is a two-turn calculator of one-digit numbers, ``<u>3+4<e><a>add(3,4)<e><t>07<e><a>07<e>``: call the tool,
then repeat its result. The warm start leaves the model right about 44 times in 100, and wrong in *form* otherwise, so
that reinforcement has something to sharpen. Everything follows from the seed; one thread needs less than 15 seconds.

    python -m examples.models.tiny --out DIR        writes DIR/model, DIR/tasks.jsonl, DIR/held_out.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import Qwen3Config, Qwen3ForCausalLM

USER, ASSISTANT, TOOL, END, PAD = "<u>", "<a>", "<t>", "<e>", "<pad>"
MARKERS = (PAD, USER, ASSISTANT, TOOL, END)
CHARACTERS = "0123456789+-*/=(),. abcdefghijklmnopqrstuvwxyz?!:'"
VOCABULARY = 64
OPERATORS = {"+": "add", "-": "sub", "*": "mul"}
HELD_OUT = 60

# System messages and tool descriptions are left out: the model has never seen either.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}<u>{{ message.content }}<e>
{%- elif message.role == 'tool' -%}<t>{{ message.content }}<e>
{%- elif message.role == 'assistant' -%}<a>
{%- for call in message.tool_calls or [] -%}
{{ call.function.name }}({{ call.function.arguments.values() | join(',') }})
{%- endfor -%}
{{ message.content or '' }}<e>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<a>{%- endif -%}
"""


@dataclass(frozen=True)
class TinyTask:
    """One line of ``tasks.jsonl``. *Example*: ``TinyTask("3+4", "add", 3, 4, "07")``."""

    question: str
    tool: str
    a: int
    b: int
    answer: str


@dataclass(frozen=True)
class Report:
    """What the warm start reached: exact probabilities that both turns are right, by teacher forcing."""

    parameters: int
    steps: int
    p_correct_train: float
    p_correct_held_out: float


@dataclass(frozen=True)
class Phase:
    """A part of the warm start: until P(correct) on the training tasks is at least ``low`` and at most ``high``."""

    learning_rate: float
    wrong_call: float
    wrong_answer: float
    low: float
    high: float
    min_steps: int
    max_steps: int


CLEAN = Phase(2e-3, 0.0, 0.0, low=0.95, high=1.0, min_steps=0, max_steps=600)
SPOILED = Phase(1e-3, 0.45, 0.2, low=0.41, high=0.47, min_steps=30, max_steps=300)
BATCH = 32
RAMP_STEPS = 20
CHECK_STEPS = 5


def tokenizer() -> Tokenizer:
    """One token per character or marker; no merges, so text that is appended never changes earlier ids.

    Other characters become padding rather than nothing: a tokenizer that drops text is more than vLLM starts with.
    """
    characters = {character: index for index, character in enumerate(CHARACTERS, start=len(MARKERS))}
    markers = {marker: index for index, marker in enumerate(MARKERS)}
    made = Tokenizer(models.BPE(vocab=markers | characters, merges=[], unk_token=PAD))
    made.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    made.decoder = decoders.Fuse()
    return made


def tasks() -> list[TinyTask]:
    """All 300 tasks, in order."""
    return [_task(a, symbol, b) for symbol in OPERATORS for a in range(10) for b in range(10)]


def split(seed: int) -> tuple[list[TinyTask], list[TinyTask]]:
    """Training tasks (240) and held-out tasks (60)."""
    everything = tasks()
    random.Random(f"{seed}/split").shuffle(everything)  # noqa: S311 (a reproducible split, not a secret)
    return everything[HELD_OUT:], everything[:HELD_OUT]


def conversation(task: TinyTask, *, call: str | None = None, answer: str | None = None) -> list[tuple[str, bool]]:
    """The episode as (text, does the model write it) pieces; a given wrong ``call`` ends it, as it does in training."""
    question = (f"{USER}{task.question}{END}{ASSISTANT}", False)
    if call is not None:
        return [question, (f"{call}{END}", True)]
    return [
        question,
        (f"{task.tool}({task.a},{task.b}){END}", True),
        (f"{TOOL}{task.answer}{END}{ASSISTANT}", False),
        (f"{task.answer if answer is None else answer}{END}", True),
    ]


def new_model(seed: int) -> Qwen3ForCausalLM:
    """Random weights, float32, on one CPU."""
    torch.manual_seed(seed)
    end = MARKERS.index(END)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=MARKERS.index(PAD),
        attention_dropout=0.0,
    )
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)
    return model


def p_correct(model: Qwen3ForCausalLM, wanted: Sequence[TinyTask]) -> float:
    """Mean probability that sampling at temperature 1 gives the right call and then the right answer."""
    ids_bt, mine_bt = _batch(tokenizer(), [conversation(task) for task in wanted])
    with torch.no_grad():
        logprobs_bt = _token_logprobs(model, ids_bt)
    return float((logprobs_bt * mine_bt[:, 1:]).sum(dim=1).exp().mean())


def warm_start(model: Qwen3ForCausalLM, train: Sequence[TinyTask], seed: int) -> int:
    """Teach the task, then teach it to get the form wrong at a known rate. Returns the steps taken."""
    rng = random.Random(f"{seed}/warm-start")  # noqa: S311
    return sum(_run_phase(model, train, phase, rng) for phase in (CLEAN, SPOILED))


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write a Hugging Face model directory."""
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def build(out: Path, seed: int = 0) -> Report:
    """Write ``model/``, ``tasks.jsonl`` and ``held_out.jsonl`` into ``out``."""
    train, held_out = split(seed)
    model = new_model(seed)
    steps = warm_start(model, train, seed)
    save(model, out / "model")
    write_tasks(out / "tasks.jsonl", train)
    write_tasks(out / "held_out.jsonl", held_out)
    return Report(model.num_parameters(), steps, p_correct(model, train), p_correct(model, held_out))


def write_tasks(path: Path, lines: Iterable[TinyTask]) -> None:
    path.write_text("".join(json.dumps(asdict(task)) + "\n" for task in lines))


def _task(a: int, symbol: str, b: int) -> TinyTask:
    value = {"+": a + b, "-": a - b, "*": a * b}[symbol]
    return TinyTask(f"{a}{symbol}{b}", OPERATORS[symbol], a, b, f"{value:02d}")


def _run_phase(model: Qwen3ForCausalLM, train: Sequence[TinyTask], phase: Phase, rng: random.Random) -> int:
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / RAMP_STEPS))
    characters = tokenizer()
    for step, episodes in zip(range(1, phase.max_steps + 1), _episodes(train, phase, rng), strict=False):
        ids_bt, mine_bt = _batch(characters, episodes)
        loss = -(_token_logprobs(model, ids_bt) * mine_bt[:, 1:]).sum() / mine_bt[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ramp.step()
        if step >= phase.min_steps and step % CHECK_STEPS == 0 and phase.low <= p_correct(model, train) <= phase.high:
            return step
    raise RuntimeError(
        f"the warm start did not reach P(correct) in [{phase.low}, {phase.high}] in {phase.max_steps} steps"
    )


def _episodes(train: Sequence[TinyTask], phase: Phase, rng: random.Random) -> Iterator[list[list[tuple[str, bool]]]]:
    while True:
        yield [_episode(task, phase, rng) for task in rng.choices(train, k=BATCH)]


def _episode(task: TinyTask, phase: Phase, rng: random.Random) -> list[tuple[str, bool]]:
    if rng.random() < phase.wrong_call:
        return conversation(task, call=f"{task.tool} {task.a} {task.b}")
    return conversation(task, answer="=" if rng.random() < phase.wrong_answer else None)


def _batch(characters: Tokenizer, episodes: Sequence[Sequence[tuple[str, bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids ``[b, t]`` and a float mask ``[b, t]`` of the tokens that the model writes."""
    rows: list[list[tuple[int, float]]] = []
    for pieces in episodes:
        rows.append([(token, float(mine)) for text, mine in pieces for token in characters.encode(text).ids])
    width = max(map(len, rows))
    padded = [row + [(MARKERS.index(PAD), 0.0)] * (width - len(row)) for row in rows]
    ids_bt = torch.tensor([[token for token, _ in row] for row in padded])
    mine_bt = torch.tensor([[mine for _, mine in row] for row in padded])
    return ids_bt, mine_bt


def _token_logprobs(model: Qwen3ForCausalLM, ids_bt: torch.Tensor) -> torch.Tensor:
    """Log-probability ``[b, t - 1]`` of each token but the first, given those before it."""
    logits_btv: Any = model(input_ids=ids_bt, use_cache=False).logits
    logprobs_btv = torch.log_softmax(logits_btv[:, :-1].float(), dim=-1)
    return logprobs_btv.gather(-1, ids_bt[:, 1:, None]).squeeze(-1)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(asdict(build(arguments.out, arguments.seed))))


if __name__ == "__main__":
    main()
