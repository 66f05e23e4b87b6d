"""The dimensions of a foreign drafter: what its tensors' shapes tell, and from its config only what they cannot.

Configs are often copied from templates and wrong; a shape cannot be. Where both speak and differ, the shape counts and
a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftsmith.configs.drafter import LLAMA, MLA, DrafterSpec, MlaSpec
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.target import Target
from draftsmith.convert.dialects import attention_window
from draftsmith.convert.tensors import Tensor

ATTENTION = "midlayer.self_attn."
MLA_MARK = ATTENTION + "kv_a_proj_with_mqa.weight"


def make_spec(values: Mapping[str, Any], where: object) -> DrafterSpec:
    """DrafterSpec from plain values; a value it refuses becomes one DraftsmithError."""
    try:
        return DrafterSpec(**values)
    except ValidationError as error:
        lines = [
            ".".join(str(part) for part in fault["loc"]) + (": " if fault["loc"] else "") + fault["msg"]
            for fault in error.errors()
        ]
        raise DraftsmithError(
            "these dimensions describe no drafter that engines can serve:\n  " + "\n  ".join(lines), where=where
        ) from None


def dimensions(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target, where: Path
) -> tuple[dict[str, Any], list[str]]:
    """Every dimension of DrafterSpec but taps, RoPE and the draft vocabulary, and notes on what was corrected.

    Args:
        config: flat, without nulls.
        tensors: by canonical name.

    Raises:
        DraftsmithError: a dimension that neither config nor tensors tell, or that they tell in a way that fits nothing.
    """
    return _Reader(config, tensors, target, where).read()


class _Reader:
    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Target, where: Path) -> None:
        self.config, self.tensors, self.target, self.where = config, tensors, target, where
        self.notes: list[str] = []

    def read(self) -> tuple[dict[str, Any], list[str]]:
        values: dict[str, Any] = {
            "hidden_size": self._settle("hidden_size", self._rows("norm.weight")),
            "intermediate_size": self._settle("intermediate_size", self._rows("midlayer.mlp.gate_proj.weight")),
            "vocab_size": self._vocab_size(),
            "target_hidden_size": self._target_hidden_size(),
            "target_num_layers": self.target.num_layers,
            "rms_norm_eps": self._number("rms_norm_eps"),
            "max_position_embeddings": self._positive("max_position_embeddings"),
            "norm_output": self._flag("norm_output"),
            "norm_before_residual": self._flag("norm_before_residual"),
            "fc_norm": self._switch("fc_norm", "fc_norm.", self._flag("fc_norm") or self._flag("use_aux_norm")),
            "norm_before_fc": self._switch(
                "norm_before_fc", "input_norm.",
                self._flag("norm_before_fc") or bool(self._eagle("norm_before_fc")),
            ),
            "fc_bias": "fc.bias" in self.tensors,
            "sliding_window": self._sliding_window(),
        }  # fmt: skip
        if values["norm_output"]:
            self.notes.append(
                "WARNING: norm_output is true: engines hand the normed state to the next step; SpecForge means something else "
                "by it (a norm before lm_head, which engines always apply)"
            )
        values |= self._latent() if MLA_MARK in self.tensors else self._grouped()
        layers = self._optional("num_hidden_layers")
        if layers not in (None, 1):
            self.notes.append(f"num_hidden_layers was {layers}; the file holds one layer")
        return values, self.notes

    def _grouped(self) -> dict[str, Any]:
        query, key = self._rows(ATTENTION + "q_proj.weight"), self._rows(ATTENTION + "k_proj.weight")
        heads, dim = self._optional("num_attention_heads"), self._optional("head_dim")
        if heads is None and dim is None:
            raise self._unknown("num_attention_heads")
        if query is not None and heads is not None and query % heads == 0:
            dim = self._settle("head_dim", query // heads)
        elif query is not None and dim is not None and query % dim == 0:
            heads = self._settle("num_attention_heads", query // dim)
        elif query is not None:
            raise DraftsmithError(
                "q_proj cannot be divided into the config's heads", where=self.where,
                found=f"{query} rows; num_attention_heads {heads}, head_dim {dim}", mend="correct num_attention_heads",
            )  # fmt: skip
        dim = dim or self.target.head_dim
        if key is not None and key % dim:
            raise DraftsmithError(
                "k_proj cannot be divided into heads", where=self.where, found=f"{key} rows, head_dim {dim}",
                mend="correct num_attention_heads; head_dim follows from it and from q_proj",
            )  # fmt: skip
        shared = None if key is None else key // dim
        return {
            "architecture": LLAMA,
            "num_attention_heads": heads,
            "head_dim": dim,
            "num_key_value_heads": self._settle("num_key_value_heads", shared),
        }

    def _latent(self) -> dict[str, Any]:
        heads = self._positive("num_attention_heads")
        kv_rank = self._rows(ATTENTION + "kv_a_layernorm.weight") or self._positive("kv_lora_rank")
        rope = (self._rows(MLA_MARK) or 0) - kv_rank
        query = (self._rows(ATTENTION + "q_b_proj.weight") or 0) // heads
        value = self._columns(ATTENTION + "o_proj.weight") // heads
        sizes = {
            "q_lora_rank": self._rows(ATTENTION + "q_a_proj.weight"),
            "kv_lora_rank": kv_rank,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": query - rope,
            "v_head_dim": value,
        }
        settled = {name: self._settle(name, size) for name, size in sizes.items()}
        interleaved = self.config.get("rope_interleave", True)
        try:
            mla = MlaSpec(**settled, rope_interleave=interleaved)
        except ValidationError as error:
            raise DraftsmithError(
                f"the sizes of latent attention fit no drafter: {error.errors()[0]['loc'][0]}",
                where=self.where,
                found=settled,
            ) from None
        return {
            "architecture": MLA,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": mla.qk_rope_head_dim,
            "mla": mla,
        }

    def _vocab_size(self) -> int:
        told = self._optional("vocab_size")
        marks = self._rows("t2d")
        if told is not None and marks in (None, told):
            return told
        size = marks or self.target.vocab_size
        self.notes.append(
            f"vocab_size is {told}; {size:,} is what {'t2d says' if marks else 'the target has'}"
            if told is not None
            else f"vocab_size is absent; {size:,} is what {'t2d says' if marks else 'the target has'}"
        )
        return size

    def _target_hidden_size(self) -> int:
        told = self._optional("target_hidden_size")
        columns = self._columns("fc.weight")
        if told is not None and columns % told == 0:
            return told
        return self.target.hidden_size

    def _sliding_window(self) -> int | None:
        window = attention_window(self.config)
        if window is not None:
            self.notes.append(
                f"trained with a sliding window of {window:,} tokens: SGLang has no config field for it; serve with "
                f"--speculative-draft-window-size {window}"
            )
        return window

    def _switch(self, name: str, beginning: str, said: bool) -> bool:
        """Norms that were trained are meant to be used, whatever the config says."""
        held = any(key.startswith(beginning) for key in self.tensors)
        if held and not said:
            self.notes.append(f"{name} was not set, but the file holds {beginning}*: set, or engines drop the weights")
        return held or said

    def _settle(self, name: str, shape: int | None) -> int:
        """The config's value, corrected by what a tensor's shape says."""
        told = self._optional(name)
        if shape is None:
            return told if told is not None else self._raise_unknown(name)
        if told is None:
            self.notes.append(f"{name} is absent; {shape:,} is what the tensors say")
        elif told != shape:
            self.notes.append(f"{name} was {told:,}; {shape:,} is what the tensors say")
        return shape

    def _rows(self, name: str) -> int | None:
        tensor = self.tensors.get(name)
        return tensor.shape[0] if tensor is not None and tensor.shape else None

    def _columns(self, name: str) -> int:
        tensor = self.tensors.get(name)
        return tensor.shape[1] if tensor is not None and len(tensor.shape) == 2 else 0

    def _eagle(self, name: str) -> Any:
        inner = self.config.get("eagle_config")
        return inner.get(name) if isinstance(inner, Mapping) else None

    def _flag(self, name: str) -> bool:
        value = self.config.get(name, False)
        if not isinstance(value, bool):
            raise DraftsmithError(f"the config's {name} is no bool", where=self.where, found=repr(value))
        return value

    def _optional(self, name: str) -> int | None:
        return None if self.config.get(name) is None else self._positive(name)

    def _positive(self, name: str) -> int:
        value = self.config.get(name)
        if value is None:
            self._raise_unknown(name)
        if type(value) is not int or value <= 0:
            raise DraftsmithError(f"the config's {name} is no positive int", where=self.where, found=repr(value))
        return value

    def _number(self, name: str) -> float:
        value = self.config.get(name)
        if value is None:
            self._raise_unknown(name)
        if type(value) not in (int, float):
            raise DraftsmithError(f"the config's {name} is no float", where=self.where, found=repr(value))
        return float(value)  # type: ignore[arg-type]

    def _raise_unknown(self, name: str) -> Any:
        raise self._unknown(name)

    def _unknown(self, name: str) -> DraftsmithError:
        return DraftsmithError(
            f"the config does not say {name}", where=self.where, expected="the value that training used",
            mend="write it into the config",
        )  # fmt: skip
