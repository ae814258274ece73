"""Every parameter of a run: one frozen section per concern, in the order of the DAG.

Sections of the update are in training.py and off_policy.py, of what is watched in watched.py.
The docstring under a field is its help text in the Prefect form. Whatever becomes JSON is stored or shown, so secrets
are masked in it: `model_dump(mode="json")` for that, the fields themselves or a plain `model_dump()` to work with.
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from milepost.storage import redaction
from milepost.storage.off_policy import OffPolicySection
from milepost.storage.section import Section
from milepost.storage.training import (
    AlgorithmSection,
    CriticSection,
    OptimizerSection,
    PerfSection,
    ReferenceSection,
)
from milepost.storage.watched import AlertSection, CheckSection, StopSection


def _of_some(top_k: int) -> int:
    if top_k == 0:
        raise ValueError("top_k is 0, it must be 1 or more, or -1 for all tokens")
    return top_k


TopK = Annotated[int, Field(ge=-1), AfterValidator(_of_some)]


class ModelSection(Section):
    """Which model, and how it is split over devices."""

    path: str = ""
    """Hugging Face model folder, a GGUF file, or `package:NAME` for the GGUF file an installed package ships."""
    trust_remote_code: bool = False
    """Run Python code that the model folder ships."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share each layer's weights; must divide the attention heads and key-value heads."""
    sequence_parallel: bool = False
    """Let tensor-parallel ranks share what lies between those weights too, each for a part of the tokens."""
    context_parallel: PositiveInt = 1
    """Ranks that share the tokens of every sample; a micro-batch and its activations are split among them."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that share the layers as consecutive stages; must divide the number of layers."""
    data_parallel: PositiveInt = 1
    """Replicas of the model that each train a share of every batch."""
    context_length: PositiveInt = 4096
    """Longest prompt plus response in tokens; longer prompts are set aside and counted."""

    @property
    def ranks(self) -> int:
        """Processes of the trainer, each with a GPU where there are any."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel


class DataSet(Section):
    """One prompt set of several. What is empty here is as in the data section."""

    path: str
    """Prompt set; `path@[a:b]` takes a slice of its rows."""
    name: str = ""
    """What it is called in tables; the name of its file when empty."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Its share of the prompts of every step, relative to the weights of the other sets."""
    reward: str = ""
    """Reward of its prompts, unless their metadata name another; that of the reward section when empty."""
    system_prompt: str = ""
    """System message of its prompts that have none."""
    input_key: str = ""
    """Column with the prompt."""
    label_key: str = ""
    """Column with what the reward compares against."""
    metadata_key: str = ""
    """Column with a JSON object that rewards and rollout functions may read."""
    tools_key: str = ""
    """Column with the definitions of the tools that a prompt may use."""


class DataSection(Section):
    """Which prompts, and how many of them a step takes."""

    path: str = ""
    """JSONL or Parquet prompt set, or a folder that `datasets` has saved; `path@[a:b]` takes a slice of its rows."""
    sets: list[DataSet] = []
    """Several prompt sets, in place of `path`: every step has of each its share by weight."""
    rollouts: str = ""
    """Name of a run beside this one to train on: its stored samples and scores are taken step by step, none is made."""
    input_key: str = "prompt"
    """Column with the prompt: a string or a list of messages."""
    label_key: str = "label"
    """Column with what the reward compares against; may be absent."""
    metadata_key: str = "metadata"
    """Column with a JSON object that rewards and rollout functions may read; may be absent."""
    tools_key: str = "tools"
    """Column with a list of tool definitions that the chat template shows to the model; may be absent."""
    system_prompt: str = ""
    """System message of the prompts that have none; needs the chat template."""
    apply_chat_template: bool = True
    """Render prompts through the tokenizer's chat template; strings become one user message."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt, rendered; longer ones are set aside and counted. Empty for what the context has room for."""
    on_bad_line: Literal["stop", "quarantine"] = "stop"
    """What a malformed line does: stop with file and line, or move to a side file and be counted."""
    shuffle: bool = True
    """Order prompts by seed and epoch; off keeps the file's order."""
    rollout_batch_size: PositiveInt | None = None
    """Prompts a step."""
    n_samples_per_prompt: PositiveInt | None = None
    """Samples of each prompt: the size of a group."""
    seed: NonNegativeInt = 0
    """Seed of the prompt order, of sampling and of the trainer."""


class RolloutSection(Section):
    """How samples are generated."""

    function: str = "single_turn"
    """Rollout function: a built-in, an entry point, or `pkg.mod:fn`."""
    max_new_tokens: PositiveInt = 256
    """Longest response in tokens; of `multi_turn`, all that the model says in a sample."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature, also of the trainer's log-probabilities; 0 is for runs that only generate."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: smallest set of tokens with this probability."""
    top_k: TopK = -1
    """Sample among the k likeliest tokens; -1 for all."""
    stop: list[str] = []
    """Strings that end a response."""
    shards: PositiveInt = 4
    """Slices of a step that are generated, scored and retried independently."""
    concurrency: PositiveInt = 128
    """Requests in flight per shard."""
    timeout_seconds: PositiveFloat = 600.0
    """Deadline of one generation request."""
    submission: Literal["sample", "group"] = "sample"
    """What takes a free place among the requests in flight: the next sample, or a whole group once there is room."""
    over_sampling_batch_size: PositiveInt | None = None
    """Prompts a round takes. With more than `data.rollout_batch_size`, generation ends once enough groups are kept.

    What still runs is aborted in the engines, and the groups that were not finished come first in the next step.
    """
    partial: bool = False
    """Responses that were aborted so go on where they stopped, instead of starting again; for `single_turn`."""
    mask_older_tokens: bool = False
    """Do not train on the tokens of such a response that older weights made; loss_mask is 0 for them."""
    tools: list[str] = []
    """Functions as `pkg.mod:fn`, with type hints and a docstring, that `multi_turn` lets the model call."""
    tool_format: Literal["auto", "hermes", "llama3", "mistral"] = "auto"
    """How the model writes a call; `auto` is as its chat template teaches.

    With `hermes` a template that has no place for tools gets them in the system message.
    """
    max_turns: PositiveInt = 8
    """Answers of the model in one sample; a call in the last of them is not made."""
    tool_timeout_seconds: PositiveFloat = 10.0
    """Time limit for one call; past it the model is told so."""
    tool_workers: PositiveInt = 1
    """Processes that make calls."""
    tool_network: bool = False
    """Tools may use the network."""


class RewardPart(Section):
    """One reward of several whose weighted scores are added."""

    name: str
    """Reward: a built-in, an entry point, or `pkg.mod:fn`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """What its score is multiplied by."""
    options: dict[str, str | float | int | bool] = {}
    """Keyword arguments for the reward."""


class RewardSection(Section):
    """How samples are scored."""

    name: str = "math"
    """Reward: a built-in, an entry point, or `pkg.mod:fn`."""
    options: dict[str, str | float | int | bool] = {}
    """Keyword arguments for the reward. A secret is best given as `env:NAME`, a variable of the environment."""
    parts: list[RewardPart] = []
    """Several rewards in place of `name`: the sum of their weighted scores, and null where one of them gives none."""
    by_prompt: bool = True
    """A prompt whose metadata names a reward, as `reward` or `rm_type`, is scored by that one with default options."""
    timeout_seconds: PositiveFloat = 10.0
    """Time limit for one sample; past it the reward is null with reason `timeout`. A group has that for each."""
    workers: PositiveInt = 1
    """Grader processes."""
    memory_bytes: Annotated[int, Field(ge=10**8)] = 4 * 1024**3
    """Memory of a grader process; a reward that takes more gets an error, and the sample a null reward."""
    network: bool = False
    """Graders may use the network; `remote` and `judge` may always."""


class FilterSection(Section):
    """Which groups are trained on."""

    group: str = "none"
    """Group filter: `none`, `nonzero_std`, `no_aborted`, `reward_range`, an entry point, or `pkg.mod:fn`."""
    options: dict[str, str | float | int | bool] = {}
    """Keyword arguments for the group filter, such as `low` and `high` of `reward_range`."""
    sample: str = "none"
    """Sample filter, which groups are filtered after: `none`, `not_truncated`, an entry point, or `pkg.mod:fn`."""
    partial_groups: Literal["keep", "refill", "drop"] = "keep"
    """A group with samples that cannot be trained on goes on without them, has lost ones made again, or is dropped."""
    max_rounds: PositiveInt = 1
    """Rounds of sampling a step may take to collect enough kept groups: the budget of dynamic sampling."""
    on_too_few: Literal["fail", "train_on_less", "skip_step"] = "train_on_less"
    """What happens when the rounds are used up and groups are missing."""


class SyncSection(Section):
    """How new weights reach the rollout engines."""

    transport: Literal["disk", "delta", "tensor", "distributed"] = "disk"
    """Whole folders, changed bytes only, shared memory on one machine, or a broadcast to other machines."""
    checksum: Literal["sampled", "full"] = "sampled"
    """Which of the tensors that an engine received are compared with what was sent."""
    bucket_bytes: PositiveInt = 1024**3
    """Bytes that `tensor` and `distributed` send at a time, of which a trainer holds three such buckets at most."""
    timeout_seconds: PositiveFloat = 600.0
    """Deadline for all engines to load a version."""
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to requests in flight while weights change."""


class CheckpointSection(Section):
    """When state is saved."""

    every_steps: NonNegativeInt = 0
    """Save trainer state every so many steps; 0 saves only after the last."""
    keep_last: PositiveInt = 2
    """Newest checkpoints kept; older ones are removed, and weights that were exported from them."""
    keep_every: NonNegativeInt = 0
    """Keep also the checkpoints of every so many steps; 0 keeps none of them."""
    best_metric: str = ""
    """Evaluation metric, as eval/SET/NAME, whose best checkpoint always stays; the mean of the first set when empty."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which value of it is the best."""


class EvalSet(Section):
    """One data set of an evaluation, with sampling and reward of its own."""

    path: str
    """Prompt set; `path@[a:b]` takes a slice of its rows."""
    name: str = ""
    """What it is called in tables and metrics; the name of its file when empty."""
    n_samples_per_prompt: PositiveInt = 1
    """Samples of each prompt."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature, 0 for the likeliest token always; when empty 0 with one sample a prompt and 1 with more."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: smallest set of tokens with this probability."""
    top_k: TopK = -1
    """Sample among the k likeliest tokens; -1 for all."""
    max_new_tokens: PositiveInt | None = None
    """Longest response in tokens; the rollout's when empty."""
    stop: list[str] = []
    """Strings that end a response; the rollout's when empty."""
    reward: str = ""
    """Reward: a built-in, an entry point, or `pkg.mod:fn`; that of the reward section when empty."""
    reward_options: dict[str, str | float | int | bool] = {}
    """Keyword arguments for the reward that is named here."""
    k: list[PositiveInt] = []
    """For pass@k, each at most the samples of a prompt; powers of two when empty."""
    threshold: float = 1.0
    """Score from which a sample counts as right, for pass@k and the majority vote."""


class EvalSection(Section):
    """Held-out evaluation during training."""

    path: str = ""
    """Prompt set to evaluate on; empty for none."""
    every_steps: NonNegativeInt = 0
    """Evaluate every so many steps, before the first and after the last; 0 for never."""
    spare_engine: bool = False
    """Evaluate on one more rollout engine while the next steps go on: one evaluation at a time, the next waits for it.

    It needs `engines.gpus_per_engine` GPUs of its own. Stop rules, alerts and the best checkpoint learn of a score some
    steps later. Weights that `sync.transport` sends without a full folder are written to one for it.
    """
    max_new_tokens: PositiveInt | None = None
    """Longest response in tokens; the rollout's when empty."""
    n_samples_per_prompt: PositiveInt = 1
    """Samples of each prompt of `path`."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature, 0 for the likeliest token always; when empty 0 with one sample a prompt and 1 with more."""
    k: list[PositiveInt] = []
    """For pass@k, each at most the samples of a prompt; powers of two when empty."""
    threshold: float = 1.0
    """Score from which a sample counts as right, for pass@k and the majority vote."""
    sets: list[EvalSet] = []
    """Further data sets, each with sampling and reward of its own."""


class EnginesSection(Section):
    """Which processes hold the models."""

    train: Literal["megatron", "fake", "none"] = "megatron"
    """Train engine; `none` generates, scores and filters with the model as it is, and trains nothing."""
    rollout: Literal["embedded", "sglang", "fake", "none"] = "embedded"
    """Rollout engine: `embedded` serves transformers on a CPU, `sglang` starts or attaches to servers; or `none`."""
    sglang: dict[str, str | int | float | bool] = {}
    """Flags of the SGLang server by name, such as `attention_backend`."""
    sglang_python: str = ""
    """Python interpreter that has SGLang; the one that runs Milepost when empty."""
    sglang_urls: list[str] = []
    """SGLang servers that run already, one for each rollout engine; none is started then."""
    gpus_per_engine: PositiveInt = 1
    """GPUs of one rollout engine: its tensor parallelism."""
    rollout_engines: PositiveInt = 1
    """Rollout engines behind the router."""
    router_policy: str = "least_loaded"
    """How the router chooses an engine: least_loaded, least_tokens, round_robin, power_of_two, consistent_hash, sticky,
    cache_aware, an entry point, or `pkg.mod:Class`. Samples of one group have the same routing key."""
    rollout_threads: NonNegativeInt = 0
    """CPU threads of each rollout engine; 0 lets torch choose."""
    max_running_requests: PositiveInt = 64
    """Requests a rollout engine decodes together."""
    start_timeout_seconds: PositiveFloat = 300.0
    """Deadline for an engine to become ready."""
    max_restarts: NonNegativeInt = 3
    """Times that dead engines are started again before a step is finished; then the run fails."""
    stage_timeout_seconds: PositiveFloat | None = None
    """Deadline of each stage of a step; empty for a multiple of the longest it took in the last ten steps."""
    stage_timeout_factor: Annotated[float, Field(gt=1)] = 10.0
    """The multiple; a deadline that is worked out is never under half an hour."""
    pool: str = "milepost-engines"
    """Concurrency limit in Prefect that runs take slots of and wait for; one that is not there limits none."""


class TrackingSection(Section):
    """Where lineage is indexed."""

    mlflow_uri: str = ""
    """MLflow tracking URI, or `env:NAME`; empty for the running server, else `mlflow.db` beside the runs."""
    experiment: str = "milepost"
    """MLflow experiment."""
    enabled: bool = True
    """Record runs in MLflow."""


READ_ONCE = ("model.path", "data.path", "data.sets.path", "eval.path")
"""What is read when a run begins, and stored."""


class Parameters(Section):
    """Every section of a run, as stored in `run.json`."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    filter: FilterSection = FilterSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    off_policy: OffPolicySection = OffPolicySection()
    reference: ReferenceSection = ReferenceSection()
    critic: CriticSection = CriticSection()
    optimizer: OptimizerSection = OptimizerSection()
    perf: PerfSection = PerfSection()
    sync: SyncSection = SyncSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    stop: StopSection = StopSection()
    alert: AlertSection = AlertSection()
    check: CheckSection = CheckSection()
    engines: EnginesSection = EnginesSection()
    tracking: TrackingSection = TrackingSection()

    def resolved(self, *, going_on: bool = False) -> Self:
        """With the values that references `env:NAME` stand for; see `redaction.resolved`.

        A run that goes on reads nothing of `READ_ONCE` any more, and needs no secrets for it.
        """
        unread = READ_ONCE if going_on else ()
        return self.model_validate(redaction.resolved(self.model_dump(), unread=unread))

    def literal_secrets(self) -> list[str]:
        """The fields, as `section.field`, whose secret is stored as a mask only."""
        return redaction.literals(self.model_dump())
