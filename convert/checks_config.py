"""Checks of config.json by itself: the class, the fields that engines would fill in by themselves, the switches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from draftsmith.configs.drafter import LLAMA, MLA
from draftsmith.convert.check import Check, Subject, failed, passed, warned
from draftsmith.convert.dialects import MISSING, look_up
from draftsmith.convert.tensors import TORCH_NAMES

SILENT = {
    "hidden_size": "4096",
    "intermediate_size": "11008",
    "num_attention_heads": "32",
    "num_key_value_heads": "num_attention_heads",
    "head_dim": "hidden_size / num_attention_heads",
    "vocab_size": "32000",
    "rms_norm_eps": "1e-6",
    "max_position_embeddings": "2048",
    "num_aux_hidden_states": "the number of nested ids, or 3",
    "tie_word_embeddings": "false",
    "attention_bias": "false",
    "hidden_act": "silu",
}
"""Field -> what engines take in silence when it is absent."""

WRONG_DEFAULTS = frozenset(SILENT) - {"num_aux_hidden_states", "tie_word_embeddings", "attention_bias", "hidden_act"}
"""Fields whose silent default is hardly ever the trained value."""


def check_config(subject: Subject) -> Iterator[Check]:
    """Every check of this file, in the order of the report."""
    yield _architecture(subject)
    yield _fields(subject)
    yield _draft_vocab_size(subject)
    yield _target_hidden_size(subject)
    yield _tied(subject)
    yield from _switches(subject)
    yield _dtype(subject)
    yield _quantisation(subject)
    yield _heads(subject)


def _architecture(subject: Subject) -> Check:
    name = "config.architecture"
    found, kind = subject.config.get("architectures"), subject.config.get("model_type")
    if subject.speculators:
        if kind not in ("llama", "qwen3"):
            return failed(
                name, f"transformer_layer_config.model_type is {kind}, expected llama or qwen3: vLLM knows no other",
                subject.convert_command,
            )  # fmt: skip
        return warned(
            name,
            "the speculators format: vLLM loads it, SGLang does not (no model_type, nested config)",
            f"for SGLang: draftsmith convert {subject.folder} --target {subject.target.path} --out NEW_FOLDER",
        )
    if found not in ([LLAMA], [MLA]):
        return failed(
            name,
            f"architectures is {found}, expected ['{LLAMA}'] or ['{MLA}']: engines pick the class by it, whatever the "
            "target is",
            subject.convert_command,
        )
    if found == [MLA] and kind == "deepseek_v3":
        return failed(
            name, "model_type deepseek_v3: vLLM takes the drafter for a multi-token predictor; kimi_k2 serves in both",
            subject.convert_command,
        )  # fmt: skip
    if found == [MLA] and subject.config.get("rope_interleave") is False:
        return warned(name, "rope_interleave false: SGLang turns halves as trained, vLLM always neighbours")
    wanted = ("llama",) if found == [LLAMA] else ("kimi_k2",)
    if kind not in wanted:
        return failed(
            name,
            f"model_type is {kind}, expected {' or '.join(wanted)}: transformers parses the config by it",
            subject.convert_command,
        )
    return passed(name, f"{found[0]}, model_type {kind}")


def _fields(subject: Subject) -> Check:
    name = "config.fields"
    missing = [key for key in SILENT if subject.config.get(key) is None]
    layers = subject.config.get("num_hidden_layers")
    if layers != 1:
        return failed(
            name,
            f"num_hidden_layers is {layers}, expected 1 (absent: engines build 32 layers)",
            subject.convert_command,
        )
    said = "; ".join(f"{key} (engines take {SILENT[key]})" for key in missing)
    if WRONG_DEFAULTS & set(missing):
        return failed(name, f"absent or null, filled in silence: {said}", subject.convert_command)
    if missing:
        return warned(name, f"left to the engines' defaults: {said}", subject.convert_command)
    return passed(name, "no field is left to an engine's default")


def _draft_vocab_size(subject: Subject) -> Check:
    name = "config.draft_vocab_size"
    found = subject.config.get("draft_vocab_size", MISSING)
    if found is MISSING:
        return failed(
            name, "absent: SGLang stops with an AttributeError, vLLM takes vocab_size", subject.convert_command
        )
    if found is None:
        return failed(
            name,
            "null: SGLang throws the drafter's own lm_head away and borrows the target's",
            subject.convert_command,
        )
    vocab = subject.config.get("vocab_size")
    if (
        not isinstance(found, int)
        or isinstance(found, bool)
        or found <= 0
        or (isinstance(vocab, int) and found > vocab)
    ):
        return failed(name, f"{found!r}, expected an integer in 1..{vocab}", subject.convert_command)
    return passed(name, f"{found:,} of {vocab:,}" if isinstance(vocab, int) else f"{found:,}")


def _target_hidden_size(subject: Subject) -> Check:
    name, wanted = "config.target_hidden_size", subject.target.hidden_size
    found = subject.config.get("target_hidden_size", MISSING)
    if found is None:
        return failed(name, "null: both engines multiply by it and stop with a TypeError", subject.convert_command)
    if found is MISSING:
        own = subject.config.get("hidden_size")
        if own == wanted:
            return passed(name, "absent; engines take hidden_size, which is the target's")
        return failed(name, f"absent: engines take hidden_size {own}, the target has {wanted}", subject.convert_command)
    if found != wanted:
        return failed(name, f"{found}, the target has {wanted}", subject.convert_command)
    return passed(name, f"{found}, the target's")


def _tied(subject: Subject) -> Check:
    name = "config.tie_word_embeddings"
    if subject.config.get("tie_word_embeddings"):
        return failed(
            name,
            "true: SGLang drops the trained lm_head in silence and takes the first rows of the target's embedding",
            subject.convert_command,
        )
    return passed(name, "false: the drafter keeps its own head")


def _switches(subject: Subject) -> Iterator[Check]:
    config = subject.config

    def on(path: str) -> bool:
        value: Any = look_up(config, path)
        return bool(value) and value is not MISSING

    biases = {name for name in subject.tensors if name.endswith(".bias")}
    served = biases == {"fc.bias", "midlayer.self_attn.o_proj.bias"} and on("bias") and not subject.speculators
    biased = [key for key in ("attention_bias", "bias", "mlp_bias") if on(key)] + sorted(biases)
    yield (
        warned("config.bias", "fc and o_proj have a bias, which SGLang serves; vLLM drops both in silence")
        if served
        else failed(
            "config.bias",
            f"{', '.join(biased)}: SGLang drops q, k, v and fc biases in silence, and leaves o_proj.bias uninitialised "
            "when the file lacks it",
            "train without biases",
        )
        if biased
        else passed("config.bias", "no bias anywhere")
    )
    yield (
        _residual_of_vllm(config)
        if subject.speculators
        else failed(
            "config.norm_before_residual",
            "true: SGLang adds the un-normed hidden state whatever this says, so it drafts with another network; no "
            "weights can make up for it",
            "serve with vLLM, or train with it off",
        )
        if on("norm_before_residual")
        else passed("config.norm_before_residual", "off, as SGLang computes")
    )
    before = on("norm_before_fc") or on("eagle_config.norm_before_fc")
    each = on("fc_norm") or on("use_aux_norm")
    pairs = (
        ("norm_before_fc", before, [n for n in subject.tensors if n.startswith("input_norm.")]),
        ("fc_norm", each, [n for n in subject.tensors if n.startswith("fc_norm.")]),
    )
    faults = [
        f"{flag} is set but its weights are absent: engines norm with ones"
        for flag, set_, held in pairs
        if set_ and not held
    ]
    faults += [
        f"{', '.join(held)} is in the file but {flag} is not set: SGLang drops it"
        for flag, set_, held in pairs
        if held and not set_
    ]
    if before and each:
        faults.append("norm_before_fc and fc_norm are both set; a drafter is trained with one of them")
    if look_up(config, "eagle_config.use_aux_hidden_state") is False:
        faults.append("eagle_config.use_aux_hidden_state is false: SGLang captures no taps and skips fc")
    yield (
        failed("config.features", "; ".join(faults), subject.convert_command)
        if faults
        else passed("config.features", "switches and tensors agree")
    )
    yield (
        failed(
            "config.num_nextn_predict_layers",
            f"{config['num_nextn_predict_layers']}: it belongs to other drafters and changes SGLang's cache budget",
            subject.convert_command,
        )
        if "num_nextn_predict_layers" in config
        else passed("config.num_nextn_predict_layers", "absent")
    )


def _residual_of_vllm(config: Mapping[str, Any]) -> Check:
    name, found = "config.norm_before_residual", config.get("norm_before_residual")
    if type(found) is not bool:
        return failed(name, f"{found}: vLLM takes true when it is absent, speculators itself false", "write it out")
    return passed(name, f"{str(found).lower()}, written out")


def _dtype(subject: Subject) -> Check:
    name = "config.dtype"
    spelled = {key: str(subject.config[key]) for key in ("dtype", "torch_dtype") if subject.config.get(key)}
    if not spelled:
        return failed(name, "absent: SGLang then serves the drafter in float16", subject.convert_command)
    if len(set(spelled.values())) > 1:
        return failed(name, f"dtype and torch_dtype differ: {spelled}", subject.convert_command)
    found, wanted = next(iter(spelled.values())), subject.target.dtype.removeprefix("torch.")
    if found not in TORCH_NAMES:
        return failed(name, f"{found}, expected one of {', '.join(TORCH_NAMES)}", subject.convert_command)
    if found == "float32":
        return warned(name, "float32: SGLang's --dtype auto makes float16 of it; pass --dtype to the server")
    if found != wanted:
        return warned(
            name, f"{found}, the target has {wanted}; engines cast the drafter to the target's", subject.convert_command
        )
    return passed(name, f"{found}, the target's")


def _quantisation(subject: Subject) -> Check:
    name = "config.quantization"
    found = [key for key in ("quantization_config", "compression_config") if subject.config.get(key)]
    found += [file for file in ("hf_quant_config.json",) if (subject.folder / file).is_file()]
    if found:
        return failed(name, f"{', '.join(found)}: a drafter is served unquantised", subject.convert_command)
    return passed(name, "none; launch SGLang with --speculative-draft-model-quantization unquant")


def _heads(subject: Subject) -> Check:
    name, spec = "config.heads", subject.spec
    if spec is None:
        return failed(name, f"cannot be told: {subject.spec_fault}", subject.convert_command)
    sizes = [
        size
        for size in (1, 2, 4, 8, 16)
        if spec.num_attention_heads % size == 0
        and spec.intermediate_size % size == 0
        and (spec.num_key_value_heads % size == 0 or size % spec.num_key_value_heads == 0)
    ]
    said = f"tensor parallel sizes that divide heads and MLP: {', '.join(map(str, sizes))}"
    if spec.head_dim != subject.target.head_dim and "kv_lora_rank" not in subject.target.text_config:
        return warned(
            name,
            f"head_dim {spec.head_dim}, the target has {subject.target.head_dim}: vLLM may not share KV pages; {said}",
        )
    return passed(name, said)
