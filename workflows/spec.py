"""The run file: everything that says what one training job does, as plain data.

One YAML file is one :class:`RunSpec`. The same object is the JSON input of the
``TrainingRun`` workflow, so a run can be started from the Temporal UI. Nothing
here touches the world: whether paths exist is asked by ``seamlessflow check``.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from workflows.algorithm import COMPANIONS
from workflows.algorithm import AlgorithmSpec as AlgorithmSpec
from workflows.section import Spec as Spec
from workflows.trainer import RESUMABLE
from workflows.trainer import TrainerSpec as TrainerSpec

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
Tag = Literal["rollout", "train", "critic", "reference", "reward", "agent"]


class ModelSpec(Spec):
    path: str
    """Directory of a Hugging Face causal LM: config.json, safetensors, tokenizer.json, chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in engines and trainer; optimizer states are always float32."""
    max_context: int = Field(default=2048, ge=16)
    """Longest prompt plus answer, in tokens."""
    tool_parser: Literal["auto", "none", "hermes", "qwen_xml", "llama_json", "mistral", "deepseek", "positional"] = (
        "auto"
    )
    """How tool calls are read from text. ``auto``: as the chat template writes them; a template that writes none, or in
    a way that no parser reads, is ``none``. ``positional``: ``name(a,b)`` between ``tool_open`` and ``tool_close``."""
    tool_open: str = ""
    """Text in front of a positional call, e.g. ``<call>``."""
    tool_close: str = ""
    """Text behind a positional call, e.g. ``</call>``."""
    reasoning_parser: Literal["auto", "none", "think", "mistral"] = "auto"
    """How reasoning is told from the answer. ``think``: ``<think>...</think>``; ``mistral``: ``[THINK]...[/THINK]``;
    ``auto``: whichever the chat template knows."""
    history: Literal["keep", "template"] = "keep"
    """What the model reads of earlier turns. ``keep``: the tokens it read and wrote then. ``template``: the prompt that
    a server with this chat template would build; where that differs (old reasoning dropped), the session branches."""

    @model_validator(mode="after")
    def _marks_of_calls(self) -> ModelSpec:
        if self.tool_parser != "positional" and (self.tool_open or self.tool_close):
            raise ValueError(f"tool_open and tool_close do nothing with tool_parser {self.tool_parser!r}: remove them")
        return self


class DataSpec(Spec):
    path: str
    """JSONL file; one task a line, any JSON object. Its line number is its position; agent and reward see it whole."""
    source: str | None = None
    """Your own tasks: ``package.module:factory``, called with ``path``. It returns a sequence of JSON objects, which is
    shuffled and repeated as a file is, or any iterable, whose order is kept and which ends when it does."""
    held_out: str | None = None
    """JSONL file of tasks that are never trained on; used by the evaluation."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over ``path`` before the data ends; None repeats it until the last step."""
    shuffle: bool = True
    """Shuffle each epoch with the run's seed."""


class AgentSpec(Spec):
    kind: Literal["single_turn", "python", "command"] = "single_turn"
    """``single_turn`` needs no code: it sends the task's ``messages`` (or ``prompt``) once."""
    target: str | None = None
    """``python``: ``package.module:function``. ``command``: a command line, run without a shell."""
    max_turns: int = Field(default=16, ge=1)
    """Requests a session may send before it is refused."""
    max_session_tokens: int | None = Field(default=None, ge=16)
    """Tokens that all prompts and answers of a session may hold, what they share counted once; None: no such limit."""
    time_limit_s: float = Field(default=120.0, gt=0)
    """A session that runs longer ends as ``failed(agent_timeout)``."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts a sample gets when infrastructure, not the agent, failed."""
    train_unused: bool = False
    """Whether answers are trained that the agent never used: it asked the same again and went on from the other."""
    processes: int = Field(default=1, ge=1)
    """Agent processes per agent worker; each runs many sessions at a time."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to a Python agent as keyword arguments."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> AgentSpec:
        if self.kind == "single_turn" and self.target is not None:
            raise ValueError("target does nothing with kind 'single_turn': remove it, or say kind: python")
        if self.kind != "python" and self.options:
            raise ValueError(f"options do nothing with kind {self.kind!r}: only a Python agent takes them")
        return self


class RewardSpec(Spec):
    kind: Literal["python", "command"] = "python"
    """``python``: ``package.module:function``. ``command``: reads the rollout as JSON on stdin, prints a number."""
    target: str
    """What to call."""
    time_limit_s: float = Field(default=30.0, gt=0)
    """A reward that takes longer is missing, cause ``reward_timeout``."""


class SamplingSpec(Spec):
    temperature: float = Field(default=1.0, ge=0.0)
    """Of the behaviour policy, above 0; the trainer divides its logits by the same number."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Values below 1 make the engine's log-probs differ from the trainer's; keep 1 unless you correct for it."""
    max_tokens: int = Field(default=256, ge=1)
    """New tokens a turn, unless the agent asks for fewer."""

    @field_validator("temperature")
    @classmethod
    def _not_greedy(cls, value: float) -> float:
        if value == 0:
            raise ValueError("0 is greedy: all samples of a group are equal and nothing is learned; use 1")
        return value


class NodeSpec(Spec):
    id: Name
    """Unique in the cluster."""
    tags: frozenset[Tag] = Field(min_length=1)
    """Capability tags: what this node can do."""
    ranks: int = Field(default=1, ge=1)
    """Trainer processes on this node when it trains."""
    threads: int = Field(default=1, ge=1)
    """CPU threads per engine and per rank."""
    cores: tuple[int, ...] = ()
    """CPU cores the node's engine and ranks are pinned to; empty leaves them free."""
    train_priority: float | None = None
    """Order in which nodes are taken for training, highest first; None: given by the scheduler."""


class EngineSpec(Spec):
    kind: Literal["embedded", "scripted", "sglang", "vllm"] = "embedded"
    """``embedded``: ours, CPU, for laptops and tests. ``scripted``: plays a script of tokens and faults, for tests.
    ``sglang``, ``vllm``: the real servers, each in the environment that ``make engine-<kind>`` builds."""
    python: str | None = None
    """Interpreter of the engine's own virtual environment; None: this one, for the real servers ``.engines/<kind>``."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Of a real server. ``auto``: CUDA where the machine has a driver for it, else the CPU."""
    max_running: int = Field(default=32, ge=1, le=256)
    """Sequences decoded together."""
    kv_tokens: int = Field(default=65536, ge=256)
    """Tokens the KV cache holds; also the size of the prefix cache. On CUDA a real server fills its memory instead."""
    memory_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of a CUDA device's memory that a real server takes for weights and KV; None: the server's own default."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices that each replica of a real server is split over."""
    data_parallel: int = Field(default=1, ge=1)
    """Replicas within one real server."""
    lora_rank: int = Field(default=0, ge=0)
    """Highest rank of LoRA adapters that a real server can serve; 0: none."""
    deterministic: bool = False
    """Batch-invariant kernels, with which a real server honours seeds; refused where it has none (on the CPU)."""
    sync_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """What running generations do when weights change: keep their KV, compute it anew, or be cut and continued."""
    transfer: Literal["disk", "collective"] = "disk"
    """How weights reach the engine. ``disk``: each of its ranks reads what was published. ``collective``: a process
    beside the engine reads it once and broadcasts it to the ranks; for ``sglang`` and ``vllm``."""
    start_limit_s: float = Field(default=900.0, gt=0)
    """An engine that does not answer so long after its start is ended; one that dies is noticed at once."""
    load_limit_s: float = Field(default=300.0, gt=0, le=3600)
    """An engine that has not confirmed new weights so long after it was told is ended and restarts on its last good
    ones; it gets no new work until it serves the newest."""
    log_tokens: bool = False
    """Write every token read and written to a log in the node's folder: the oracle for audits. Ours only."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> EngineSpec:
        if self.kind in ("sglang", "vllm"):
            unused = ["log_tokens"]
        else:
            unused = ["device", "memory_fraction", "tensor_parallel", "data_parallel", "lora_rank", "deterministic"]
            unused.append("transfer")
        for name in unused:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} does nothing with kind {self.kind!r}: remove it")
        return self


class PipelineSpec(Spec):
    name: Literal["colocated", "disaggregated", "micro_batch", "off_policy", "multiplexed"] = "multiplexed"
    """``colocated``: all nodes roll out, then the train nodes train and rollout is held. ``disaggregated``: train nodes
    only train, rollout is held meanwhile. ``micro_batch``: the same, with gradients accumulated as groups complete.
    ``off_policy``: train nodes only train, the others never stop. ``multiplexed``: train nodes roll out too and are
    pre-empted for each update while the others go on."""
    steps: int = Field(default=10, ge=1)
    """Policy updates."""
    max_staleness: int | None = Field(default=None, ge=0)
    """How many updates old the weights that started a group may be when it is trained. None: 1 with ``off_policy`` and
    ``multiplexed``; the other pipelines are on policy and take no such bound."""
    policy: str | None = None
    """Your own pipeline in place of ``name``: ``package.module:factory``, called with this section and the number of
    groups per step; it returns an object with the fields and methods of a built-in policy."""
    accumulate: bool = False
    """Compute gradients of groups as they become complete, before the batch is whole, in ``off_policy`` and
    ``multiplexed`` too; ``micro_batch`` always does. Not every algorithm allows it."""
    selection: str = "ordinal"
    """Which complete groups make a batch. ``ordinal``: the oldest tasks; ``completion``: those complete first; or your
    own: ``package.module:function``, called with the complete groups and how many are wanted."""
    refill: bool = False
    """Dynamic sampling: groups that are dropped because their raw rewards are all equal are replaced by other tasks, so
    that each step trains a whole batch. A step whose groups all are so gives up after four batches of them."""
    target_in_flight: int = Field(default=64, ge=1)
    """Sessions kept running; fewer where the engines with a route cannot take so many."""
    batch_time_limit_s: float = Field(default=600.0, gt=0)
    """A step waits at most this long for its groups, then takes what is complete."""
    hold_limit_s: float = Field(default=600.0, gt=0)
    """A request waits at most this long for a route before its session ends as an infrastructure failure."""

    @property
    def accumulates(self) -> bool:
        """Whether gradients are computed before the batch is whole."""
        return self.accumulate or self.name == "micro_batch"

    @model_validator(mode="after")
    def _everything_can_act(self) -> PipelineSpec:
        if self.selection not in ("ordinal", "completion") and ":" not in self.selection:
            raise ValueError(f"selection {self.selection!r}: say ordinal, completion or package.module:function")
        if self.max_staleness and self.name in ("colocated", "disaggregated", "micro_batch"):
            raise ValueError(
                f"max_staleness {self.max_staleness} does nothing with the on-policy pipeline {self.name!r}: remove it"
            )
        if self.accumulate and self.name in ("colocated", "disaggregated"):
            raise ValueError(f"accumulate does nothing with {self.name!r}, which trains whole batches: remove it")
        return self


class PoolSpec(Spec):
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Runs with a higher one are served first and take nodes from those with a lower one; equal ones queue in order of
    arrival."""
    quota: int | None = Field(default=None, ge=1)
    """Nodes the run may claim while other runs want them; beyond, it borrows what nobody wants and gives it back."""
    nodes: Literal["named", "any"] = "named"
    """``named``: the run uses the nodes that this file names. ``any``: it also rolls out on every other node of the
    pool with the tag ``rollout``, also on those that join while it lives; their settings are the defaults of
    ``nodes``."""
    queue_limit_s: float = Field(default=604800.0, gt=0)
    """The run waits at most this long for its first node; then it fails, and says who held the nodes."""


class WandbSpec(Spec):
    project: str = Field(min_length=1)
    """Project that the run is shown in. The key is ``WANDB_API_KEY`` of the control worker's environment."""
    entity: str | None = None
    """User or team; None: the key's own."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes to the state folder; ``wandb sync`` sends it later."""


class TrackerSpec(Spec):
    """Where the figures of docs/metrics.md are shown; a tracker that fails never stops a run."""

    tensorboard: bool = True
    """Event files in ``<state>/tracking/<run>/tensorboard``."""
    wandb: WandbSpec | None = None
    """Weights & Biases; needs the ``wandb`` extra."""


class AlarmSpec(Spec):
    """Thresholds on the figures of a step; one that is crossed is shown in the status, in the UI and in the log."""

    constant_reward: bool = True
    """Whether it is odd that every sample of a step had the same reward."""
    logprob_gap_mean: float | None = Field(default=0.05, gt=0)
    """Mean difference of engine and trainer under equal weights, nats."""
    importance_p99: float | None = Field(default=10.0, gt=1)
    """99th percentile of exp(trainer - engine) log-prob."""
    clip_fraction: float | None = Field(default=0.5, gt=0, le=1)
    """Share of clipped tokens."""
    reference_kl: float | None = Field(default=None, gt=0)
    """KL to the reference, nats."""
    grad_norm: float | None = Field(default=None, gt=0)
    """Gradient norm before clipping."""
    staleness_max: float | None = Field(default=None, ge=0)
    """Age of the oldest token, updates."""
    entropy: float | None = Field(default=None, gt=0)
    """Entropy of the next token, nats; this one is a lower bound."""


class JournalSpec(Spec):
    keep_s: float | None = Field(default=3600.0, ge=0)
    """The token records of a session leave the journal this long after its end, once its sample is trained on, filtered
    or failed; None: never. The shards keep them."""
    keep_free_s: float | None = Field(default=None, ge=0)
    """The same for sessions outside the sample queue, which are in no shard; None: never."""


class EvaluationSpec(Spec):
    every: int = Field(default=0, ge=0)
    """Evaluate the held-out tasks each so many steps; 0: only before the first and after the last."""
    samples: int = Field(default=1, ge=1)
    """Samples per held-out task."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the likeliest tokens that is sampled from."""
    max_tokens: int | None = Field(default=None, ge=1)
    """New tokens a turn; None: as in training."""
    time_limit_s: float = Field(default=3600.0, gt=0)
    """An evaluation that takes longer is given up: there is none of those weights."""
    pass_at: tuple[int, ...] = ()
    """Each k for which pass@k is reported: the chance that one of k samples of a task passes, from all its samples."""
    pass_reward: float = 1.0
    """A sample passes with this reward or more."""

    @model_validator(mode="after")
    def _enough_samples(self) -> EvaluationSpec:
        if wrong := [k for k in self.pass_at if not 1 <= k <= self.samples]:
            raise ValueError(f"pass_at {wrong[0]} needs between 1 and evaluation.samples ({self.samples}) samples")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("temperature 0 is greedy: all samples of a task would be equal, so samples must be 1")
        return self


class RunSpec(Spec):
    """One training job."""

    run: Name
    """Name of the run; also its workflow id, ``run/<run>``."""
    cluster: Name = "local"
    """Cluster whose pool of nodes the run uses."""
    seed: int = Field(default=0, ge=0)
    """Seeds data order, sampling and training."""
    code: str | None = None
    """Folder with the modules of a Python agent or reward, appended behind everything on ``sys.path``; `seamlessflow`
    sets it to the run file's folder. Commands run in it."""
    model: ModelSpec
    data: DataSpec
    agent: AgentSpec = AgentSpec()
    reward: RewardSpec
    sampling: SamplingSpec = SamplingSpec()
    nodes: tuple[NodeSpec, ...] = Field(min_length=1)
    engine: EngineSpec = EngineSpec()
    algorithm: AlgorithmSpec = AlgorithmSpec()
    trainer: TrainerSpec = TrainerSpec()
    pipeline: PipelineSpec = PipelineSpec()
    pool: PoolSpec = PoolSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    trackers: TrackerSpec = TrackerSpec()
    alarms: AlarmSpec = AlarmSpec()
    journal: JournalSpec = JournalSpec()

    @model_validator(mode="after")
    def _consistent(self) -> RunSpec:
        ids = [node.id for node in self.nodes]
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            raise ValueError(f"nodes: id {twice[0]!r} is used twice: give each node its own id")
        for tag in ("rollout", "train"):
            if not any(tag in node.tags for node in self.nodes):
                raise ValueError(f"nodes: no node has the tag {tag!r}: a run needs at least one")
        self._someone_rolls_out()
        self._companions_have_nodes()
        self._algorithm_can_act()
        self._parts_add_up()
        if self.pipeline.refill and not self.algorithm.drops_zero_variance:
            raise ValueError("pipeline.refill does nothing: the algorithm keeps groups whose rewards are all equal")
        if self.trainer.zero_stage == 0 and self.model.dtype == "bfloat16":
            raise ValueError(
                "trainer.zero_stage 0 with model.dtype bfloat16 trains differently in DeepSpeed: use stage 1"
            )
        last = self.trainer.schedule_steps or self.pipeline.steps
        if self.trainer.warmup_steps >= last:
            raise ValueError(
                f"trainer.warmup_steps {self.trainer.warmup_steps} leaves nothing of {last} steps: take fewer"
            )
        if self.agent.kind != "single_turn" and not self.agent.target:
            raise ValueError(f"agent.target is needed for agent.kind {self.agent.kind!r}")
        if self.evaluation.every and self.data.held_out is None:
            raise ValueError("evaluation.every needs held-out tasks: set data.held_out")
        return self

    def _someone_rolls_out(self) -> None:
        name = self.pipeline.name
        left = any("rollout" in node.tags and "train" not in node.tags for node in self.nodes)
        if name in ("disaggregated", "micro_batch", "off_policy") and not left:
            raise ValueError(
                f"pipeline.name {name!r} keeps train nodes from rollout, and every node with the tag 'rollout' has the "
                "tag 'train': take one of them away from a node"
            )

        both = [node.id for node in self.nodes if {"rollout", "train"} <= node.tags]
        if name in ("disaggregated", "micro_batch", "off_policy") and self.pool.nodes == "any" and both:
            raise ValueError(
                f"pool.nodes 'any' rolls out on every node with the tag 'rollout', and pipeline.name {name!r} keeps "
                f"train nodes from it: take the tag 'rollout' from {', '.join(both)}"
            )

    def _companions_have_nodes(self) -> None:
        apart = self.algorithm.companions_apart
        for role in COMPANIONS:
            tagged = [node for node in self.nodes if role in node.tags]
            training = [node.id for node in tagged if "train" in node.tags]
            if role not in apart and (idle := [node.id for node in tagged if node.id not in training]):
                raise ValueError(
                    f"nodes: {idle[0]!r} has the tag {role!r} without 'train', but the trainer's ranks hold the "
                    f"{role}: give it both tags or set algorithm.{role}_on: own"
                )
            if role in apart and not tagged:
                raise ValueError(
                    f"algorithm.{role}_on 'own': no node has the tag {role!r}: give it to a node that does not train"
                )
            if role in apart and training:
                raise ValueError(
                    f"nodes: {training[0]!r} has the tags 'train' and {role!r}, but algorithm.{role}_on 'own' keeps "
                    f"the {role} off the trainer's nodes: take one of them away"
                )
        if several := [node for node in self.nodes if len(node.tags & set(apart)) > 1]:
            raise ValueError(
                f"nodes: {several[0].id!r} has the tags {' and '.join(map(repr, apart))}, each of which keeps a node "
                "to itself with 'own': give them to different nodes"
            )
        if apart and not any("rollout" in node.tags and not node.tags & set(apart) for node in self.nodes):
            raise ValueError(
                f"nodes: every node with the tag 'rollout' has the tag {apart[0]!r} too, and with "
                f"algorithm.{apart[0]}_on 'own' such a node does nothing else: give 'rollout' to another node"
            )

    def _algorithm_can_act(self) -> None:
        cap, given = self.algorithm.token_staleness, self.pipeline.max_staleness
        on_policy = self.pipeline.name in ("colocated", "disaggregated", "micro_batch")
        bound = 0 if on_policy else 1 if given is None else given
        if cap is not None and cap >= bound:
            raise ValueError(
                f"algorithm.token_staleness {cap} does nothing: the pipeline trains no token that is more than {bound} "
                "updates old"
            )

    def _parts_add_up(self) -> None:
        """Gradients of parts add up to the batch's only where no part needs to know the others."""
        a = self.algorithm
        local = a.advantage_used in ("grpo", "dr_grpo", "rloo") and not (a.kl != "none" and a.kl_in == "reward")
        key = "pipeline.name 'micro_batch'" if self.pipeline.name == "micro_batch" else "pipeline.accumulate"
        if self.pipeline.accumulates and not (local and not a.several_steps and a.correction_level == "token"):
            raise ValueError(
                f"{key} accumulates gradients before the batch is whole: it needs an advantage "
                "within the group (grpo, dr_grpo, rloo), one optimizer step a batch, correction_level token, and no KL "
                "in the reward"
            )

    def node(self, node: str) -> NodeSpec:
        """The node's entry of the file; for one that it does not name, what every setting is by default."""
        named = next((entry for entry in self.nodes if entry.id == node), None)
        return named or NodeSpec(id=node, tags=frozenset({"rollout"}))

    def digest(self) -> str:
        """sha256 over the canonical JSON of the run file, but for what :meth:`resumable` gives: two files with one
        digest ask for the same run.
        """
        data = self.model_dump(mode="json", exclude={"nodes": True, "trainer": RESUMABLE})
        plain = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(plain.encode()).hexdigest()

    def resumable(self) -> dict[str, Any]:
        """What a run that stopped may change to go on: keys of ``trainer``, and its nodes, so the size of the gang."""
        data: dict[str, Any] = self.model_dump(mode="json", include={"nodes": True, "trainer": RESUMABLE})
        for node in data["nodes"]:
            node["tags"] = sorted(node["tags"])  # a set has no order of its own
        return {"nodes": {node.pop("id"): node for node in data["nodes"]}, **data["trainer"]}
