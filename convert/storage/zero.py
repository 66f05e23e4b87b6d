"""Checkpoint folders of DeepSpeed: the float32 masters of ZeRO-1, 2 and 3, put together from their flat partitions.

Every process writes its part of each parameter group as one flat tensor; the shapes that cut it stand in the model
states. ZeRO-1 and 2 cut a group as a whole into equal parts (and drop the padding of the last), ZeRO-3 cuts every
parameter by itself and fills its last part up. Buffers and frozen parameters are not in the partitions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.storage.names import Named
from draftsmith.convert.storage.pickles import BYTES, Inert, RawTensor
from draftsmith.convert.storage.runs import Run, RunTensor, part
from draftsmith.convert.storage.torch_file import TorchFile, read_torch_file
from draftsmith.convert.tensors import Tensor

MODEL_STATES = "mp_rank_00_model_states.pt"
PARTITION = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
PARTITIONED_MODEL = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
STATE_FILES = ("_model_states.pt", "_optim_states.pt")
MEND = "copy the whole checkpoint folder again, or name an earlier one"


@dataclass(frozen=True)
class ZeroWeights:
    """What a DeepSpeed checkpoint holds: tensors by the names of the module, the kind, and notes."""

    named: Named
    kind: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Flat:
    """The flat tensors of one process, as runs that follow each other."""

    file: Path
    runs: list[Run]
    dtype: str

    @property
    def count(self) -> int:
        return sum(run.count for run in self.runs)


@dataclass
class _Model:
    """The model states of one process, and the tensors of its module."""

    opened: TorchFile
    module: dict[str, RawTensor] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        return self.opened.tree.get(key)


def tag_folder(folder: Path) -> tuple[Path, tuple[str, ...]] | None:
    """The folder of a DeepSpeed checkpoint that `folder` is or holds, with notes; none if it is nothing of the kind.

    Raises:
        DraftsmithError: `latest` names a folder outside or absent; or there is no `latest` and several to choose from.
    """
    if _holds_states(folder):
        return folder, ()
    tags = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and _holds_states(entry))
    latest = folder / "latest"
    if latest.is_file():
        with latest.open("rb") as handle:
            tag = handle.read(4096).decode(errors="replace").strip()
        if Path(tag).name != tag or tag in ("", ".", ".."):
            raise DraftsmithError(
                "latest names a folder outside the checkpoint", where=latest, found=tag, expected="a bare folder name"
            )
        if tag not in tags:
            raise DraftsmithError(
                "latest names a folder that is absent or holds no states of DeepSpeed",
                where=latest,
                found=tag,
                expected=f"one of {', '.join(tags)}" if tags else f"{tag}/*{STATE_FILES[0]}",
                mend=f"name the folder: {folder / tags[-1]}" if tags else MEND,
            )
        others = [name for name in tags if name != tag]
        passed = f"; passed over {', '.join(others)}" if others else ""
        return folder / tag, (f"took {tag}, which latest names{passed}",)
    if not tags:
        return None
    if len(tags) > 1:
        raise DraftsmithError(
            "several DeepSpeed checkpoints and no file latest that chooses",
            where=folder,
            found=", ".join(tags),
            mend=f"name one of them: {folder / tags[-1]}",
        )
    return folder / tags[0], (f"no file latest: took {tags[0]}, the only checkpoint",)


def read_zero(folder: Path) -> ZeroWeights:
    """The tensors of the checkpoint whose state files lie in `folder`.

    Raises:
        DraftsmithError: a missing or surplus file of a process, a partition of the wrong size, model parallelism, or
            a file that is no state of DeepSpeed.
    """
    _no_model_parallelism(folder)
    partitions = _by_rank(folder, PARTITION)
    if not partitions:
        return _unpartitioned(folder)
    opened = {rank: _states(file) for rank, file in partitions.items()}
    optimizers = {rank: _optimizer(states) for rank, states in opened.items()}
    first = optimizers[min(optimizers)]
    stage, world = _stage(first, opened[min(opened)]), _world(first, opened[min(opened)].file)
    _all_ranks(folder, partitions, world, PARTITION)
    if first.get("ds_zero_partition_groups"):
        raise DraftsmithError(
            "parameters partitioned over groups of processes of their own are not read",
            where=partitions[0],
            mend="convert the checkpoint with DeepSpeed's ds_to_universal.py, or save the gathered weights",
        )
    models = _models(folder, stage, world)
    masters = _stage_three(opened, optimizers, models) if stage == 3 else _stage_two(opened, optimizers, models[0])
    named, notes = _with_rest(masters, models)
    note = f"put the masters of ZeRO-{stage} together from {world} partition{'s' if world > 1 else ''}"
    return ZeroWeights(named, f"deepspeed-zero{stage}", (note, *notes))


def _holds_states(folder: Path) -> bool:
    return any(entry.name.endswith(STATE_FILES) and entry.is_file() for entry in folder.iterdir())


def _no_model_parallelism(folder: Path) -> None:
    for file in sorted(folder.glob("*mp_rank_*_states.pt")):
        match = re.search(r"mp_rank_(\d+)_", file.name)
        if match and int(match[1]):
            raise DraftsmithError(
                "a checkpoint of model parallelism is not read",
                where=file,
                expected="mp_rank_00 alone",
                mend="save the gathered weights of the drafter",
            )


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):
        match = pattern.fullmatch(file.name)
        if not match:
            continue
        rank = int(match[1])
        if rank in found:
            raise DraftsmithError(
                "two files are the part of one process",
                where=folder,
                found=f"{found[rank].name} and {file.name}",
                mend="delete the one of an earlier run",
            )
        found[rank] = file
    return found


def _all_ranks(folder: Path, files: dict[int, Path], world: int, pattern: re.Pattern[str]) -> None:
    missing = [rank for rank in range(world) if rank not in files]
    surplus = [file.name for rank, file in sorted(files.items()) if rank >= world]
    kind = "optim" if pattern is PARTITION else "model"
    if missing or surplus:
        raise DraftsmithError(
            "files of some processes are missing" if missing else "there are files of more processes than trained",
            where=folder,
            found=", ".join(surplus or (file.name for _, file in sorted(files.items()))),
            expected=", ".join(f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in missing[:8])
            if missing
            else f"the files of {world} processes",
            mend=MEND,
        )


def _states(file: Path) -> TorchFile:
    opened = read_torch_file(file)
    if not isinstance(opened.tree, dict):
        raise _foreign(file, "no mapping")
    return opened


def _optimizer(states: TorchFile) -> dict[str, Any]:
    value = states.tree.get("optimizer_state_dict")
    if not isinstance(value, dict):
        raise _foreign(states.file, "no optimizer_state_dict")
    return value


def _stage(optimizer: dict[str, Any], states: TorchFile) -> int:
    """The stage that the optimizer records; the bfloat16 optimizer with float32 gradients, ZeRO-1, records none."""
    value = optimizer.get("zero_stage")
    if isinstance(value, Inert):
        value = value.args[0] if value.args else None
    if value is None and "single_partition_of_fp32_groups" in optimizer:
        value = 1
    if not isinstance(value, int) or value not in (1, 2, 3):
        raise DraftsmithError("an unknown stage of ZeRO", where=states.file, found=value, expected="1, 2 or 3")
    return value


def _world(optimizer: dict[str, Any], file: Path) -> int:
    value = optimizer.get("partition_count")
    counts = value if isinstance(value, list) else [value]
    whole = [count for count in counts if isinstance(count, int) and 0 < count <= 65536]
    if not counts or len(whole) < len(counts):
        raise _foreign(file, f"partition_count {value}")
    if len(set(whole)) > 1:
        raise DraftsmithError(
            "parameter groups partitioned over different numbers of processes (experts) are not read",
            where=file,
            found=whole,
        )
    return whole[0]


def _models(folder: Path, stage: int, world: int) -> list[_Model]:
    """The model states: of every process for ZeRO-3, else of the first, which are those of all."""
    if stage == 3:
        files = _by_rank(folder, PARTITIONED_MODEL)
        _all_ranks(folder, files, world, PARTITIONED_MODEL)
        return [_model(files[rank]) for rank in range(world)]
    if not (folder / MODEL_STATES).is_file():
        raise DraftsmithError("the model states are missing", where=folder, expected=MODEL_STATES, mend=MEND)
    return [_model(folder / MODEL_STATES)]


def _model(file: Path) -> _Model:
    opened = _states(file)
    module = opened.tree.get("module")
    if not isinstance(module, dict):
        raise _foreign(file, "no module")
    return _Model(
        opened, {key: raw for key, raw in module.items() if isinstance(key, str) and isinstance(raw, RawTensor)}
    )


def _flat(states: TorchFile, name: str, values: Any) -> _Flat:
    """Flat tensors of one process as one row of runs."""
    raws = values if isinstance(values, list) else [values]
    runs: list[Run] = []
    dtypes = set()
    for raw in raws:
        tensor = states.tensor(name, raw) if isinstance(raw, RawTensor) else None
        if not isinstance(tensor, RunTensor) or len(tensor.shape) != 1:
            raise _foreign(states.file, f"{name} is no flat tensor")
        dtypes.add(tensor.dtype)
        runs += tensor.runs
    if len(dtypes) != 1:
        raise _foreign(states.file, f"{name} of dtypes {', '.join(sorted(dtypes)) or 'none'}")
    return _Flat(states.file, runs, dtypes.pop())


def _shapes(model: _Model) -> list[dict[str, tuple[int, ...]]]:
    groups = model.get("param_shapes")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise _foreign(model.opened.file, "no param_shapes")
    for group in groups:
        for name, shape in group.items():
            _check_shape(model, name, shape)
    return groups


def _check_shape(model: _Model, name: Any, shape: Any) -> None:
    if not isinstance(name, str) or not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise _foreign(model.opened.file, f"shape {shape} of {name}")


def _stage_two(
    opened: dict[int, TorchFile], optimizers: dict[int, dict[str, Any]], model: _Model
) -> dict[str, RunTensor]:
    """ZeRO-1 and 2: each group's partitions one after the other are its parameters one after the other."""
    shapes, world = _shapes(model), len(opened)
    masters: dict[str, RunTensor] = {}
    paddings = optimizers[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    for rank in range(world):
        held = optimizers[rank].get("single_partition_of_fp32_groups")
        if not isinstance(held, list) or len(held) != len(shapes):
            raise _foreign(opened[rank].file, "other parameter groups than the model states have")
    for number, group in enumerate(shapes):
        flats = [
            _flat(opened[rank], f"group {number}", optimizers[rank]["single_partition_of_fp32_groups"][number])
            for rank in range(world)
        ]
        gaps = paddings[number] if isinstance(paddings, list) and number < len(paddings) else None
        if not isinstance(gaps, list) or len(gaps) != len(group) or not all(type(n) is int and n >= 0 for n in gaps):
            raise _foreign(opened[0].file, f"param_alignment_paddings {gaps}")
        counts = [prod(shape) for shape in group.values()]
        _check_partitions(flats, sum(counts) + sum(gaps), len(group) if any(gaps) else 0, number)
        start, row = 0, [run for flat in flats for run in flat.runs]
        for (name, shape), count, gap in zip(group.items(), counts, gaps, strict=True):
            runs = part(row, start, count, BYTES[flats[0].dtype])
            masters[name] = RunTensor(name, f"{name} in {opened[0].file.parent}", shape, flats[0].dtype, runs)
            start += count + gap
    return masters


def _check_partitions(flats: list[_Flat], needed: int, gapped: int, number: int) -> None:
    """Equal partitions, of which the last may lack its padding, that hold what the parameters need.

    A group is padded to twice the number of processes, with `gapped` aligned parameters somewhat further.
    """
    world, align = len(flats), 2 * len(flats)
    full = -(-needed // align) * align // world
    if world > 1 and full <= flats[0].count <= full + (16 * gapped) // world:
        full = flats[0].count
    for rank, flat in enumerate(flats):
        least = min(full, max(0, needed - rank * full))
        most = full + (16 * gapped if world == 1 else 0)
        if not least <= flat.count <= most or (needed > (rank + 1) * full and flat.count != full):
            raise DraftsmithError(
                f"a partition of parameter group {number} has the wrong size",
                where=flat.file,
                found=f"{flat.count:,} elements",
                expected=f"{least:,}" + f" to {most:,}" * (most > least),
                mend=MEND,
            )
        if flat.dtype != flats[0].dtype:
            raise _foreign(flat.file, f"masters of {flat.dtype}, not {flats[0].dtype}")


def _stage_three(
    opened: dict[int, TorchFile], optimizers: dict[int, dict[str, Any]], models: list[_Model]
) -> dict[str, RunTensor]:
    """ZeRO-3: every process holds its part of each parameter, one parameter after the other."""
    world = len(opened)
    shapes = {name: shape for group in _shapes(models[0]) for name, shape in group.items()}
    flats = [_flat(opened[rank], "fp32_flat_groups", optimizers[rank].get("fp32_flat_groups")) for rank in range(world)]
    expected = sum(-(-prod(shape) // world) for shape in shapes.values())
    for flat in flats:
        if flat.count != expected:
            raise DraftsmithError(
                "a process's partition has the wrong size",
                where=flat.file,
                found=f"{flat.count:,} elements",
                expected=f"{expected:,}",
                mend=MEND,
            )
    masters, start = {}, 0
    for name, shape in shapes.items():
        share = -(-prod(shape) // world)
        masters[name] = _gathered(name, shape, [(flat, start) for flat in flats])
        start += share
    return masters


def _gathered(name: str, shape: tuple[int, ...], parts: list[tuple[_Flat, int]]) -> RunTensor:
    """A tensor whose equal shares begin at an element of each process's row; the last share may be filled up."""
    share, left, runs = -(-prod(shape) // len(parts)), prod(shape), []
    dtype = parts[0][0].dtype
    for flat, start in parts:
        if flat.dtype != dtype:
            raise _foreign(flat.file, f"{name} of {flat.dtype}, not {dtype}")
        runs += part(flat.runs, start, min(share, left), BYTES[dtype])
        left -= min(share, left)
    return RunTensor(name, f"{name} in {parts[0][0].file.parent}", shape, dtype, runs)


def _with_rest(masters: dict[str, RunTensor], models: list[_Model]) -> tuple[Named, list[str]]:
    """The masters, and from the module what they lack: buffers, frozen and shared parameters."""
    first = models[0]
    tensors: dict[str, Tensor] = dict(masters)
    frozen = _frozen(models)
    tensors |= frozen
    shared = first.get("shared_params")
    for name, source in shared.items() if isinstance(shared, dict) else ():
        if isinstance(name, str) and source in tensors:
            tensors[name] = tensors[source]
    # a module under two names shares its parameters too; DeepSpeed records that nowhere but in the places of storages
    owners = {_place(raw): name for name, raw in first.module.items() if name in masters}
    rest: list[str] = []
    empty: list[str] = []
    for name, raw in first.module.items():
        if name in tensors:
            continue
        stored = first.opened.tensor(name, raw)
        whole = prod(stored.shape) > 0
        if whole and _place(raw) in owners:
            tensors[name] = masters[owners[_place(raw)]]
        else:
            tensors[name] = stored
            (rest if whole else empty).append(name)
    taken = [*sorted(frozen), *rest]
    notes = [f"not in the partitions, taken from the model states: {', '.join(taken)}"] if taken else []
    notes += [f"without elements in every file: {', '.join(empty)}"] if empty else []
    return list(tensors.items()), notes


def _place(raw: RawTensor) -> str:
    return repr((raw.storage, raw.offset, raw.shape, raw.stride))


def _frozen(models: list[_Model]) -> dict[str, Tensor]:
    """Parameters that were not trained: whole in ZeRO-2, in equal shares in ZeRO-3, only in the module in ZeRO-1."""
    shapes = models[0].get("frozen_param_shapes")
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items() if isinstance(shapes, dict) else ():
        _check_shape(models[0], name, shape)
        parts = []
        for model in models:
            fragments = model.get("frozen_param_fragments")
            raw = fragments.get(name) if isinstance(fragments, dict) else None
            if not isinstance(raw, RawTensor):
                raise _foreign(model.opened.file, f"no part of the frozen {name}")
            tensor = model.opened.tensor(name, raw)
            share = -(-prod(shape) // len(models))
            if not isinstance(tensor, RunTensor) or prod(tensor.shape) != share:
                raise DraftsmithError(
                    f"the part of the frozen {name} has the wrong size",
                    where=model.opened.file,
                    found=f"{prod(tensor.shape):,} elements",
                    expected=f"{share:,}",
                    mend=MEND,
                )
            parts.append((_Flat(model.opened.file, list(tensor.runs), tensor.dtype), 0))
        found[name] = _gathered(name, shape, parts)
    return found


def _unpartitioned(folder: Path) -> ZeroWeights:
    """A run without ZeRO: the module itself is whole."""
    if not (folder / MODEL_STATES).is_file():
        raise DraftsmithError(
            "the partitions of the optimizer are missing",
            where=folder,
            expected="zero_pp_rank_0_mp_rank_00_optim_states.pt",
            mend=MEND,
        )
    model = _model(folder / MODEL_STATES)
    if model.get("param_shapes"):
        raise DraftsmithError(
            "the model states are those of a ZeRO run, but its partitions are missing",
            where=folder,
            expected="zero_pp_rank_0_mp_rank_00_optim_states.pt",
            mend=MEND,
        )
    named: Named = [(name, model.opened.tensor(name, raw)) for name, raw in model.module.items()]
    return ZeroWeights(named, "torch", ("a DeepSpeed run without ZeRO: took the module's weights as stored",))


def _foreign(file: Path, found: str) -> DraftsmithError:
    return DraftsmithError("the file is no state of DeepSpeed that is known", where=file, found=found, mend=MEND)
