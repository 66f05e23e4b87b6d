"""The strict, typed configuration of a run, read from YAML with `key=value` overrides. Unknown keys are errors."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import absolute_url

HomePath = Annotated[Path, AfterValidator(Path.expanduser)]
"""A path in which `~` is the home folder."""

PRESETS = Path(__file__).parent / "presets"


Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """Base of every section: unknown keys and infinite values are refused, values never change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TargetSection(Section):
    """The model whose hidden states are harvested."""

    path: HomePath = Field(description="folder with config.json, tokenizer and safetensors weights")
    taps: tuple[int, ...] | None = Field(default=None, description="layer-input indices; none: [2, L//2, L-3]")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="auto: the dtype its config names"
    )
    device_map: str | dict[str, int | str] | None = Field(
        default=None,
        description="as transformers takes it; none: all accelerators, shared out among the processes of a machine",
    )
    trust_remote_code: bool = Field(default=False, description="run Python code that the target's folder ships")
    facts: str | None = Field(
        default=None, description="name of a shipped config.json that `plan` reads while `path` does not exist"
    )


class PromptsSection(Section):
    """Prompts for training and for evaluation; a prompt that stands in both is dropped from training."""

    train: str = Field(
        default="builtin:train",
        description="`builtin:train`, a jsonl, json or parquet file, a folder, or hf:NAME[#SUBSET][:SPLIT]",
    )
    heldout: str = Field(default="builtin:heldout", description="as `train`; `builtin:heldout` is the shipped set")
    train_limit: int | None = Field(default=None, gt=0, description="use N of them, at even distances through the file")
    heldout_limit: int | None = Field(
        default=None, gt=0, description="use N of them, at even distances through the file"
    )
    strict: bool = Field(default=False, description="the first bad row stops the run, instead of being counted")
    max_rejected: float = Field(
        default=0.2, ge=0.0, le=1.0, description="share of bad or over-long rows above which the run stops"
    )


class SynthesizeSection(Section):
    """The target answers every user turn, in this process or on servers; given assistant turns are answered anew."""

    backend: Literal["transformers", "openai"] = Field(
        default="transformers", description="`openai`: servers that speak OpenAI's API (SGLang, vLLM)"
    )
    servers: tuple[str, ...] = Field(
        default=(), description="base URLs such as http://host:30000/v1; requests take turns over them"
    )
    model: str | None = Field(default=None, description="name that the servers give it; none: the first they list")
    endpoint: Literal["completions", "chat"] = Field(
        default="completions",
        description="completions: the prompt goes out as token ids; chat: as messages that the server renders",
    )
    token_ids: bool = Field(
        default=True,
        description="ask for the generated ids (vLLM's and SGLang's return_token_ids); false for servers that refuse the field",
    )
    concurrency: int = Field(default=64, gt=0, description="conversations in flight over all servers")
    timeout: float = Field(default=600.0, gt=0.0, description="seconds that one request may take")
    retries: int = Field(default=6, ge=0, description="further attempts after an error or a broken answer")
    patience: float = Field(
        default=900.0, ge=0.0, description="seconds to wait for servers while none of them can be reached"
    )
    api_key_env: str = Field(
        default="OPENAI_API_KEY", description="environment variable that holds the servers' key, if they want one"
    )
    template_kwargs: dict[str, JsonValue] = Field(
        default={}, description="handed to the chat template, as servers do: {enable_thinking: false}"
    )
    history: Literal["template", "seen"] = Field(
        default="template",
        description="a later turn sees earlier answers as the template renders them (as served; a rewritten history starts a new sequence), or as the target wrote them",
    )
    cut: Literal["keep", "drop"] = Field(
        default="keep", description="conversations with a turn cut at max_new_tokens: kept, or left out at the end"
    )
    batch_size: int = Field(default=16, gt=0, description="conversations answered at once")
    workers: int = Field(
        default=1,
        gt=0,
        description="processes that answer batches side by side and share the threads; for CPUs, which one process leaves idle",
    )
    max_new_tokens: int = Field(default=512, gt=0, description="a turn longer than this is cut and marked `length`")
    max_prompt_tokens: int = Field(default=2048, gt=0, description="longer prompts are rejected and counted")
    temperature: float = Field(default=0.0, ge=0.0, description="0: greedy")
    answers: int = Field(
        default=1,
        gt=0,
        description="sampled answers to each training prompt; those after the first are named ID~2, ID~3",
    )
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int = 0
    heldout_dtype: Literal["target", "bfloat16", "float16", "float32"] = Field(
        default="float32",
        description="held-out text and states should equal what an engine serves; `target`: as target.dtype",
    )

    @model_validator(mode="after")
    def _fits(self) -> SynthesizeSection:
        if self.backend == "openai" and not self.servers:
            raise ValueError("backend openai needs servers=[http://host:port/v1, ...]")
        if self.answers > 1 and self.temperature == 0.0:
            raise ValueError("greedy answers to one prompt are all the same: answers=1, or a temperature")
        return self


class HarvestSection(Section):
    """The target's hidden states over the conversations, written to a store."""

    backend: Literal["transformers", "vllm", "sglang"] = Field(
        default="transformers", description="what holds the target; vllm, sglang: the engine, in a process of its own"
    )
    engine_python: HomePath | None = Field(
        default=None, description="the engine's Python or virtual environment; none: as `verify --engine` finds it"
    )
    engine_options: dict[str, JsonValue] = Field(
        default={},
        description="handed to vllm.LLM ({tensor_parallel_size: 8, trust_remote_code: true}) or sglang.Engine ({tp_size: 8})",
    )
    batch_tokens: int = Field(default=8192, gt=0, description="tokens in one forward pass, padding included")
    chunk_tokens: int | None = Field(
        default=None,
        gt=0,
        description="a conversation longer than this runs in pieces with a cache; none: one longer than batch_tokens does",
    )
    workers: int = Field(default=1, gt=0, description="processes that run batches side by side and share the threads")
    tensor_parallel: bool = Field(
        default=False,
        description="the processes of `accelerate launch` hold one target together, a slice of every product each",
    )
    max_length: int | None = Field(
        default=None, gt=0, description="conversations are cut here; none: the target's context"
    )
    shard_tokens: int = Field(default=262_144, gt=0, description="tokens in one shard file")
    location: Annotated[str, Field(min_length=1), AfterValidator(absolute_url)] | None = Field(
        default=None,
        description="URL that fsspec knows (s3://BUCKET/PREFIX): shards go there, a folder a split; the run keeps the manifest",
    )
    codec: Literal["bf16", "fp8"] = Field(
        default="bf16", description="how states are stored; fp8 halves the disk and errs by about 2 % of a tap's values"
    )

    @model_validator(mode="after")
    def _one_engine(self) -> HarvestSection:
        if self.backend != "transformers" and self.workers != 1:
            raise ValueError("an engine shares the machine out by itself: workers=1")
        if self.tensor_parallel and (self.backend != "transformers" or self.workers != 1):
            raise ValueError(
                "tensor_parallel is for backend=transformers with workers=1; an engine's is in engine_options"
            )
        return self


class VocabSection(Section):
    """The draft vocabulary: the most frequent generated tokens, special tokens always in."""

    size: int = Field(default=32_000, gt=0, description="D; capped at the target's vocabulary")


class DrafterSection(Section):
    """Dimensions of the drafter; what is left out follows the target."""

    hidden_size: int | None = Field(default=None, gt=0)
    intermediate_size: int | None = Field(default=None, gt=0)
    num_attention_heads: int | None = Field(default=None, gt=0)
    num_key_value_heads: int | None = Field(default=None, gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    fc_norm: bool = False
    norm_output: bool = False


class TrainSection(Section):
    """The training-time-test unroll and its optimiser (EAGLE-3, arXiv 2503.01840, section 3)."""

    unroll_steps: int = Field(default=7, ge=1, le=16, description="draft steps unrolled per position")
    step_decay: float = Field(default=0.8, gt=0.0, le=1.0, description="weight of step i is step_decay ** i")
    mask: Literal["aligned", "upstream"] = Field(
        default="aligned", description="`upstream` tests the mask of x[t], as public trainers do; for comparisons only"
    )
    out_of_vocabulary: Literal["skip", "keep"] = Field(
        default="skip",
        description="positions whose target argmax is outside the draft vocabulary: no gradient, or a renormalised teacher",
    )
    head_init: Literal["target", "random"] = Field(
        default="target", description="draft head: rows of the target's head, or random"
    )
    layer_init: Literal["target", "random"] = Field(
        default="random", description="decoder layer: the target's last layer, or random"
    )
    init_from: HomePath | None = Field(
        default=None,
        description="start from this drafter (any form that can be converted), with its dimensions and draft vocabulary",
    )
    freeze_head: bool = Field(default=False, description="leave the draft head as it was initialised")
    loss: Literal["soft_cross_entropy", "total_variation", "lk_alpha", "lk_lambda"] = Field(
        default="soft_cross_entropy", description="lk_alpha and lk_lambda: LK losses, arXiv 2602.23881"
    )
    lk_eta: float = Field(default=3.0, ge=0.0, description="decay of lk_lambda's share of the divergence")
    epochs: int = Field(default=10, gt=0)
    batch_tokens: int = Field(default=4096, gt=0, description="tokens of one optimiser step over all processes")
    accumulation: int | None = Field(
        default=None, gt=0, description="micro-batches of a step on each process; none: the launcher's, else 1"
    )
    max_length: int = Field(
        default=2048, gt=1, description="conversations are cut into windows of at most this many tokens"
    )
    learning_rate: float = Field(default=1e-4, gt=0.0)
    min_learning_rate_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    warmup_ratio: float = Field(default=0.02, ge=0.0, le=1.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    grad_clip: float = Field(default=1.0, gt=0.0, description="largest global gradient norm")
    precision: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="of matrix products, what is trained staying float32; none: bfloat16 on a GPU or where the launcher asks for it, else float32",
    )
    float8: bool = Field(default=False, description="make the products of the layer and the head in float8")
    recompute: bool = Field(
        default=False, description="keep less for the backward pass: compute gate and up again there"
    )
    deterministic: bool = Field(
        default=False,
        description="on a GPU: kernels that add in one order only, so that a repeated or resumed run gives the same bits (slower)",
    )
    seed: int = Field(default=0, ge=0, lt=2**32)
    prefetch: int = Field(default=2, gt=0, description="threads that read batches ahead, one step each")
    check_shards: Literal["hash", "header"] = Field(
        default="hash",
        description="before the first step: read every shard and compare its hash (once a run), or its header only",
    )
    damaged_shards: Literal["stop", "skip"] = Field(
        default="stop", description="a damaged shard stops the run, or is left out and named"
    )
    stop_above: float = Field(
        default=3.0, gt=1.0, description="three logged losses in a row above this multiple of the lowest stop the run"
    )
    save_every: int = Field(default=200, gt=0, description="optimiser steps between checkpoints")
    evaluate_every: int = Field(
        default=200, gt=0, description="optimiser steps between evaluations on held-out conversations"
    )
    keep_checkpoints: int = Field(default=2, gt=0, description="besides the best one")
    guard_threshold: float = Field(
        default=0.97,
        ge=0.0,
        le=1.0,
        description="teacher guard: least share of greedy tokens that the head must reproduce",
    )
    log_with: Literal["none", "tensorboard", "wandb"] = "none"
    log_every: int = Field(default=10, gt=0)


class EvaluateSection(Section):
    """Greedy chains replayed on held-out conversations."""

    draft_steps: int = Field(default=3, ge=1, le=16, description="K: drafted tokens a chain")
    batch_tokens: int = Field(default=4096, gt=0)


class RunConfig(Section):
    """One run, from prompts to an exported drafter. Every verb reads the same file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    runs: HomePath = Field(default=Path("runs"), description="the run writes into runs/NAME and nowhere else")
    target: TargetSection
    prompts: PromptsSection = PromptsSection()
    synthesize: SynthesizeSection = SynthesizeSection()
    harvest: HarvestSection = HarvestSection()
    vocab: VocabSection = VocabSection()
    drafter: DrafterSection = DrafterSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()

    @property
    def folder(self) -> Path:
        """runs/NAME."""
        return self.runs / self.name

    def conversations(self, split: Split) -> Path:
        """jsonl of the target's answers, `split` being train or heldout."""
        return self.folder / "conversations" / f"{split}.jsonl"

    def store(self, split: Split) -> Path:
        """Folder of harvested hidden states."""
        return self.folder / "harvest" / split

    @property
    def vocab_file(self) -> Path:
        """d2t, t2d and the counts they come from."""
        return self.folder / "vocab.safetensors"

    @property
    def training(self) -> Path:
        """Folder of checkpoints and training metrics."""
        return self.folder / "train"

    @property
    def drafter_folder(self) -> Path:
        """The converted drafter, as engines load it."""
        return self.folder / "drafter"


Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run configuration.

    Args:
        source: a YAML file, or the name of a shipped preset (`smollm2-135m`).
        overrides: `section.key=value` strings; values are YAML (`train.epochs=3`, `target.taps=[2,15,27]`).

    Raises:
        DraftsmithError: no such file or preset, bad YAML, an unknown key (with the nearest known one), a bad value.
    """
    file = _find(source)
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise DraftsmithError(f"the configuration is not valid YAML: {error}", where=file) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DraftsmithError(f"the configuration cannot be read: {error}", where=file) from None
    if not isinstance(values, dict):
        raise DraftsmithError(
            "the configuration holds no mapping",
            where=file,
            found=type(values).__name__,
            expected="name:, target:, ...",
        )
    for override in overrides:
        _apply(values, override)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _explain(error, file) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key which stands twice: the first of two sections would be forgotten."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def preset_names() -> list[str]:
    """Names that `load_config` takes in place of a file."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def _find(source: str | Path) -> Path:
    file = Path(source)
    if file.is_file():
        return file
    preset = PRESETS / f"{source}.yaml"
    if file.name == str(source) and preset.is_file():
        return preset
    raise DraftsmithError(
        "the configuration does not exist",
        where=file,
        expected=f"a YAML file or one of the presets {', '.join(preset_names())}",
    )


def _apply(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise DraftsmithError(
            "an override is not of the form section.key=value", found=override, mend="for example: train.epochs=3"
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DraftsmithError(f"an override's value is not valid YAML: {error}", found=override) from None
    node = values
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if child is None:  # `train:` with nothing below it
            child = node[key] = {}
        if not isinstance(child, dict):
            raise DraftsmithError("an override goes below a plain value", found=override, where=key)
        node = child
    node[keys[-1]] = value


def _explain(error: ValidationError, file: Path) -> DraftsmithError:
    lines = []
    for fault in error.errors():
        place = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            known = _fields(fault["loc"][:-1])
            near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
            lines.append(f"{place}: unknown key; {hint}")
        elif fault["type"] == "missing":
            lines.append(f"{place}: missing")
        else:
            lines.append(f"{place}: {fault['msg']}; found {fault['input']!r}")
    return DraftsmithError(
        "the configuration is refused:\n  " + "\n  ".join(lines),
        where=file,
        mend="edit the file or override the key on the command line",
    )


def _fields(path: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in path:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return sorted(model.model_fields)
