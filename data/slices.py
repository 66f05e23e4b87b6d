"""One target over several processes: each holds a slice of every product, as transformers' plan of the model says.

The residual stream, and so every harvested row, is whole on each of them; they call the trunk on the same tokens at the
same time, and one of them writes.
"""

from __future__ import annotations

from typing import Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import TargetSection

OTHERWISE = (
    "without harvest.tensor_parallel a process spreads the layers over its accelerators; harvest.backend=vllm or sglang "
    "have a tensor parallelism of their own"
)


def slicing(section: TargetSection, config: Any, count: int) -> dict[str, Any]:
    """What `from_pretrained` is told, so that each of `count` processes loads its slice.

    Raises:
        DraftsmithError: `target.device_map` is set too, or the heads cannot be shared out evenly.
    """
    if section.device_map is not None:
        raise DraftsmithError(
            "a device map and tensor parallelism exclude each other", where="target.device_map", found=section.device_map,
            mend="target.device_map=null or harvest.tensor_parallel=false",
        )  # fmt: skip
    text = config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if heads and heads % count:
            raise DraftsmithError(
                f"{heads} heads cannot be shared out evenly over {count} processes", where=f"{section.path}: {name}",
                expected="a number of processes that divides the heads", mend=f"accelerate launch --num_processes; {OTHERWISE}",
            )  # fmt: skip
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=count)}


def refuse_whole(section: TargetSection, model: Any) -> None:
    """Stop if transformers has a plan for nothing in this model and every process would hold and compute all of it.

    Raises:
        DraftsmithError: no parameter was sliced.
    """
    from torch.distributed.tensor import DTensor

    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise DraftsmithError(
            "transformers has no plan to slice this target", where=section.path, found=type(model).__name__,
            expected="a class with base_model_tp_plan", mend=OTHERWISE,
        )  # fmt: skip
