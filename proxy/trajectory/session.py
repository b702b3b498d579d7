"""One session: its turns, the tree of their tokens, and where the next request belongs.

Pure state. The proxy's I/O side calls :meth:`Session.place` for a request,
:meth:`Session.begin` to make it a turn, feeds the turn's recording, and calls
:meth:`Session.finish`. The journal holds enough to do all of it again
(:mod:`proxy.trajectory.replay`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from proxy.dialects.base import TurnRequest
from proxy.trajectory import reasoning
from proxy.trajectory.answer import AnswerBuilder, Delta
from proxy.trajectory.conversations import Conversations
from proxy.trajectory.policy import Policy, Used, asked, check_limits, decide
from proxy.trajectory.reading import Reading
from proxy.trajectory.renderer import Renderer
from proxy.trajectory.tree import ROOT, Ids, Tree
from proxy.trajectory.turn import Choice, Outcome, Placement, Turn
from storage.errors import InvalidRequest, PreviousResponseNotFound, SessionClosed, UnsupportedParameter

_TAIL = 16
"""Tokens at the end of a prompt that may hold the mark of a block of reasoning."""


@dataclass(slots=True)
class Session:
    """See the module. ``sealed``: no more turns."""

    id: str
    run: str
    policy: Policy
    renderer: Renderer
    tree: Tree = field(default_factory=Tree)
    turns: list[Turn] = field(default_factory=list)
    sealed: bool = False
    affinity: str | None = None
    """Lease of the engine that last worked for it and has its prefix cached."""
    conversations: Conversations = field(init=False)

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.turns)

    def resolve(self, request: TurnRequest) -> TurnRequest:
        """The request with the conversation that it goes on from in front.

        Raises PreviousResponseNotFound. A request's own instructions stay its own, as the vendor has it.
        """
        if not request.previous:
            return request
        named = [at for at in self.generations() if at[1].generation == request.previous and at[0].stored]
        turn, choice = named[0] if named else (None, None)
        if turn is None or choice is None or choice.answer is None:
            raise PreviousResponseNotFound(
                f"Previous response with id 'resp_{request.previous}' not found.", param="previous_response_id"
            )
        history = (*self.conversations.messages(turn)[1 if turn.instructions else 0 :], choice.answer)
        own = 1 if request.instructions else 0
        return replace(request, messages=(*request.messages[:own], *history, *request.messages[own:]))

    def place(self, request: TurnRequest, now: float = 0.0) -> Placement:
        """Decide where ``request`` belongs and build its prompt; changes nothing. ``now`` is in unix seconds.

        Raises SessionClosed, LimitReached, InvalidRequest (template), ContextLengthExceeded.
        """
        if self.sealed:
            raise SessionClosed(f"session {self.id} has ended: its attempt was finished or given up")
        check_limits(self.policy, turns=len(self.turns), tokens=self.tree.size, now=now)
        if request.prompt is not None:
            return self._place_raw(request.prompt)
        placement = self._place_messages(request)
        prefix = self._forced_prefix(request, placement)
        if not prefix:
            return placement
        return placement._replace(ids=np.concatenate([placement.ids, self.renderer.encode(prefix)]), prefix=prefix)

    def decide(self, placement: Placement, request: TurnRequest) -> Used:
        """Sampling in force for the turn that ``placement`` would become."""
        left = self.policy.max_session_tokens
        if left is not None:
            new = len(placement.ids) - self.tree.matched(placement.ids, placement.base)
            left = (left - self.tree.size - new) // request.n
        return decide(self.policy, request, len(self.turns), self.prompt_length(placement), left)

    def prompt_length(self, placement: Placement) -> int:
        """Tokens of the whole prompt."""
        return self.tree.depth(placement.base) + len(placement.ids)

    def begin(
        self,
        placement: Placement,
        request: TurnRequest,
        used: Used,
        *,
        generations: Sequence[str],
        created: int,
        body_digest: str = "",
        idempotency_key: str = "",
    ) -> Turn:
        """Make the request a turn; ``generations`` are the ids of its choices."""
        before = () if placement.parent is None else self.turns[placement.parent[0]].tools
        turn = Turn(
            index=len(self.turns),
            choices=tuple(Choice(index, generation) for index, generation in enumerate(generations)),
            outcome=placement.outcome,
            reason=placement.reason,
            parent=placement.parent,
            new_messages=request.messages[placement.new_from :],
            tools=before if before == request.tools else request.tools,
            parse_tools=request.parse_tools,
            single_call=not request.parallel_tool_calls,
            raw=request.prompt is not None,
            thinking=request.thinking,
            instructions=request.instructions,
            stored=request.store,
            prefix=placement.prefix,
            asked=asked(request),
            used=used,
            created=created,
            body_digest=body_digest,
            idempotency_key=idempotency_key,
        )
        return self.add_turn(placement, turn)

    def add_turn(self, placement: Placement, turn: Turn) -> Turn:
        """Enter ``turn`` with the prompt of ``placement``; used by :meth:`begin` and by replay."""
        turn.prompt_end, _ = self.tree.insert_prompt(placement.ids, placement.base)
        turn.prompt_tokens = self.tree.depth(turn.prompt_end)
        for choice in turn.choices:
            choice.end = turn.prompt_end
        if turn.parent is not None:
            self.choice(turn.parent).continued = True
        self.turns.append(turn)
        return turn

    def choice(self, at: tuple[int, int]) -> Choice:
        """The choice at (turn, choice)."""
        return self.turns[at[0]].choices[at[1]]

    def builder(self, turn: Turn) -> AnswerBuilder:
        """A fresh builder of one of the turn's answers."""
        reading = self._reading(tools=turn.parse_tools, raw=turn.raw)
        reasons = not turn.raw and self.policy.reasoning_parser != "none"
        opened = reasons and self._reasoning_is_open(self.prompt_ids(turn))
        return AnswerBuilder(
            reading.decode,
            reading.reasoning(opened=opened),
            reading.calls(turn.tools),
            stops=turn.used.stop,
            silent=self.renderer.eos_ids,
            prefix=turn.prefix,
            single_call=turn.single_call and turn.parse_tools,
        )

    def prompt_ids(self, turn: Turn) -> Ids:
        """The prompt as the engine reads it."""
        return self.tree.path_ids(turn.prompt_end)

    def complete(self, turn: Turn, choice: Choice, builder: AnswerBuilder, *, ended: bool) -> list[Delta]:
        """Close an answer: its tokens enter the tree and later requests may build on it; returns the last deltas.

        ``ended``: not cut by its limit.
        """
        deltas = builder.finish(ended=ended)
        ids = choice.recording.ids
        choice.status, choice.answer = "finished", builder.message()
        choice.finish_reason, choice.stop_string = builder.finish_reason(ended=ended), builder.stop_string
        choice.ended = bool(ids) and ids[-1] in self.renderer.eos_ids
        self._enter(turn, choice, passable=True)
        if ids and not turn.raw:
            self.conversations.enter_answer(turn, choice)
        return deltas

    def seal(self) -> None:
        """No more turns; tokens of generations that never finished stay in the tree as nobody's prefix."""
        if self.sealed:
            return
        self.sealed = True
        for turn in self.turns:
            for choice in turn.choices:
                if choice.status == "open":
                    choice.status = "aborted"
                if choice.status != "finished":
                    self._enter(turn, choice, passable=False)

    def find_retry(self, body_digest: str, idempotency_key: str, *, retried: bool) -> Turn | None:
        """The turn that a repeated request belongs to: same key, or same body and the client says that it retries.

        Of several such turns (samples that the agent drew by asking again) it is the latest that waits for its client.
        """
        if not (retried or idempotency_key):
            return None
        known = [
            turn
            for turn in self.turns
            if turn.body_digest == body_digest
            and (turn.idempotency_key == idempotency_key or not idempotency_key)
            and not any(choice.status == "failed" for choice in turn.choices)
        ]
        waiting = [turn for turn in known if turn.left or any(choice.status == "aborted" for choice in turn.choices)]
        return next(reversed(waiting or known), None)

    def turn_of(self, body_digest: str, number: int) -> Turn:
        """The turn of a stream that was begun. Raises InvalidRequest if it is another request's."""
        if number >= len(self.turns) or self.turns[number].body_digest != body_digest:
            raise InvalidRequest(f"turn {number} of session {self.id} is not that of this request")
        return self.turns[number]

    def generations(self) -> Iterator[tuple[Turn, Choice]]:
        """Every choice of every turn."""
        for turn in self.turns:
            for choice in turn.choices:
                yield turn, choice

    def unused(self) -> set[str]:
        """Generations that their agent never saw, or whose request it made again, word for word, to use that answer.

        That is what a client leaves behind that gave up and asked anew without saying so. If it went on from none
        of its answers, the newest counts.
        """
        asked_for: dict[bytes, list[Turn]] = {}
        for turn in self.turns:
            asked_for.setdefault(self.conversations.digest(turn) or bytes(turn.body_digest, "ascii"), []).append(turn)
        found: set[str] = set()
        for turns in asked_for.values():
            told = [turn for turn in turns if turn.finished and not turn.left]
            used = [turn for turn in turns if any(choice.continued for choice in turn.choices)] or told[-1:]
            found |= {choice.generation for turn in turns if turn not in used for choice in turn.choices}
        return found

    def trainable(self) -> set[str]:
        """Generations whose tokens may enter a loss: they ended by themselves and their agent used them."""
        left_out = set() if self.policy.train_unused else self.unused()
        finished = {choice.generation for _, choice in self.generations() if choice.status == "finished"}
        return finished - left_out

    def versions(self) -> Iterator[int]:
        """Known weight versions of all sampled tokens, runs collapsed."""
        for _, choice in self.generations():
            for version, _ in choice.recording.version_runs():
                if version >= 0:
                    yield version

    def forks(self) -> int:
        """Turns that had to be rendered in full though they followed another."""
        return sum(turn.outcome is Outcome.FORK for turn in self.turns)

    def _enter(self, turn: Turn, choice: Choice, *, passable: bool) -> None:
        recording = choice.recording
        choice.end = self.tree.append_completion(
            turn.prompt_end,
            choice.generation,
            np.asarray(recording.ids, np.int32),
            np.asarray(recording.logprobs, np.float32),
            np.asarray(recording.versions, np.int32),
            passable=passable,
        )

    def _place_messages(self, request: TurnRequest) -> Placement:
        followed = self.conversations.find(request)
        if followed is None:
            return self._full(request, Outcome.ROOT, "")
        parent, position, answered = followed
        choice = self.choice(parent)
        if self.policy.history == "template":
            return self._as_template(request, parent, position)
        refusal = self._continuation_refusal(parent, answered)
        if refusal:
            return self._full(request, Outcome.FORK, refusal)
        new = request.messages[position:]
        answer = request.messages[position - 1]
        try:
            ids = self.renderer.continuation(answer, new, request.tools, ended=choice.ended, thinking=request.thinking)
        except InvalidRequest as error:
            return self._full(request, Outcome.FORK, f"template: {error}")
        return Placement(Outcome.EXTEND, "", parent, position, choice.end, ids)

    def _place_raw(self, prompt: str | tuple[int, ...]) -> Placement:
        """Completions: the latest answer whose whole path the prompt begins with is gone on from."""
        ids = self.renderer.encode(prompt) if isinstance(prompt, str) else self.renderer.checked(prompt)
        if not len(ids):
            raise InvalidRequest("prompt is empty: a generation starts from at least one token", param="prompt")
        for turn, choice in reversed(list(self.generations())):
            depth = self.tree.depth(choice.end)
            if choice.status != "finished" or choice.end == turn.prompt_end or depth >= len(ids):
                continue
            if np.array_equal(self.tree.path_ids(choice.end), ids[:depth]):
                return Placement(Outcome.EXTEND, "", (turn.index, choice.index), 0, choice.end, ids[depth:])
        return Placement(Outcome.ROOT, "", None, 0, ROOT, ids)

    def _as_template(self, request: TurnRequest, parent: tuple[int, int], position: int) -> Placement:
        """The prompt that the deployed server would read; it extends the recorded path only if its ids do."""
        ids = self.renderer.prompt(request.messages, request.tools, thinking=request.thinking)
        end = self.choice(parent).end
        depth = self.tree.depth(end)
        if depth < len(ids) and np.array_equal(self.tree.path_ids(end), ids[:depth]):
            return Placement(Outcome.EXTEND, "", parent, position, end, ids[depth:])
        reason = f"template_history: the template writes the conversation up to turn {parent[0]} in other tokens"
        return Placement(Outcome.FORK, reason, None, 0, ROOT, ids)

    def _forced_prefix(self, request: TurnRequest, placement: Placement) -> str:
        """Text in front of the answer that makes it a call, if the request forces one."""
        kind, name = request.tool_choice
        if kind not in ("required", "named"):
            return ""
        prefix = self._reading(tools=True).calls(request.tools).forced_prefix(name or None)
        parser = self.policy.tool_parser
        if prefix is None:
            raise UnsupportedParameter(
                f"tool_choice cannot force calls with tool parser {parser!r}", param="tool_choice"
            )
        # A template may have opened a block of reasoning, in which no call can begin.
        closing = reasoning.MARKS[self.policy.reasoning_parser][1] if self._reasoning_is_open(placement.ids) else ""
        return f"{closing}\n\n{prefix}" if closing else prefix

    def _reading(self, *, tools: bool, raw: bool = False) -> Reading:
        """How answers are read; a raw one is text as it was generated."""
        policy = self.policy
        if raw:
            return self.renderer.reading("none", "none")
        if not tools:
            return self.renderer.reading("none", policy.reasoning_parser)
        return self.renderer.reading(policy.tool_parser, policy.reasoning_parser, policy.tool_open, policy.tool_close)

    def _reasoning_is_open(self, prompt: Ids) -> bool:
        """Whether the answer to ``prompt`` begins inside a block of reasoning, which then has no opening mark."""
        kind = self.policy.reasoning_parser
        return kind != "none" and reasoning.opened(kind, self.renderer.raw_text(prompt[-_TAIL:].tolist()))

    def _full(self, request: TurnRequest, outcome: Outcome, reason: str) -> Placement:
        ids = self.renderer.prompt(request.messages, request.tools, thinking=request.thinking)
        return Placement(outcome, reason, None, 0, ROOT, ids)

    def _continuation_refusal(self, parent: tuple[int, int], answered: bool) -> str:
        if not answered:
            return f"answer_differs: the assistant message is not the answer to turn {parent[0]}"
        if self.choice(parent).stop_string is not None:
            return f"answer_trimmed: a stop string was cut from the answer to turn {parent[0]}"
        if self.renderer.continuation_refusal:
            return f"template: {self.renderer.continuation_refusal}"
        return ""
