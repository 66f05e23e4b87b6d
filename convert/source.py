"""Find a drafter's folder and list the tensors in its safetensors files, sharded or not."""

from __future__ import annotations

from pathlib import Path

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK, read_json
from draftsmith.convert.tensors import FileTensor, Tensor, file_tensors

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def locate_source(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder with the drafter's weights, and notes on how it was chosen.

    Args:
        path: a folder with weights, a training checkpoint, its drafter/ folder, or a training folder (then the
            checkpoint that best.json names, else the newest complete one).

    Raises:
        DraftsmithError: there is no such folder, or nothing in it is a drafter.
    """
    mend = "name a training folder (runs/NAME/train), one of its checkpoints, or a converted drafter"
    if not path.is_dir():
        problem = "the drafter must be a folder, not a file" if path.exists() else "the drafter folder does not exist"
        raise DraftsmithError(problem, where=path, mend=mend)
    if (path / "drafter" / "drafter.json").is_file():
        return path / "drafter", ()
    if any((path / name).is_file() for name in ("drafter.json", "config.json")):
        return path, ()
    complete = [
        folder
        for folder in sorted(path.glob("checkpoint-*"))
        if TEMPORARY_MARK not in folder.name and (folder / "drafter" / "drafter.json").is_file()
    ]
    if not complete:
        held = sorted(entry.name for entry in path.iterdir())
        raise DraftsmithError(
            "the folder holds neither a drafter nor a complete checkpoint",
            where=path,
            found=", ".join(held[:8]) + (", ..." if len(held) > 8 else "") if held else "nothing",
            expected="drafter.json, config.json, or checkpoint-*/drafter/drafter.json",
            mend=mend,
        )
    if not (path / "best.json").is_file():
        return complete[-1] / "drafter", (f"no best.json: took the newest checkpoint, {complete[-1].name}",)
    best = read_json(path / "best.json", what="the mark of the best checkpoint").get("checkpoint")
    if best not in [folder.name for folder in complete]:
        raise DraftsmithError(
            "best.json names a checkpoint that is not there",
            where=path / "best.json",
            found=best,
            expected=f"one of {', '.join(folder.name for folder in complete)}",
            mend=f"name the checkpoint: {complete[-1]}",
        )
    return path / str(best) / "drafter", (f"took {best}, which best.json names",)


def drafter_files(folder: Path) -> list[FileTensor]:
    """Every tensor of the safetensors files in `folder`; two of one name stay two.

    Raises:
        DraftsmithError: no safetensors file, only pickles, a damaged file, or an index that names a file outside the
            folder or an absent one, or disagrees with what the files hold.
    """
    files = sorted(file for file in folder.glob("*.safetensors") if TEMPORARY_MARK not in file.name)
    if not files:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
        if pickles:
            raise DraftsmithError(
                "pickled weights are not read: loading them can run code",
                where=folder,
                found=", ".join(pickles),
                expected="*.safetensors",
                mend="save the tensors with safetensors.torch.save_file",
            )
        raise DraftsmithError(
            "the folder has no weights", where=folder, expected="model.safetensors", mend="fetch the folder again"
        )
    if (folder / INDEX).is_file():
        return _indexed(folder, files)
    return [tensor for file in files for tensor in file_tensors(file)]


def _indexed(folder: Path, files: list[Path]) -> list[FileTensor]:
    index = folder / INDEX
    weight_map = read_json(index, what="the weight index").get("weight_map")
    mend = "fetch the folder again, or delete an index that belongs to other files"
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise DraftsmithError("the weight index has no usable weight_map", where=index, mend=mend)
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or name in ("", ".", ".."):
            raise DraftsmithError(
                "the weight index names a file outside its folder", where=index, found=name, expected="a bare file name"
            )
    named = {folder / name for name in weight_map.values()}
    for problem, wrong in (
        ("the weight index names files that are not there", named - set(files)),
        ("the weight index leaves out safetensors files, which engines then ignore", set(files) - named),
    ):
        if wrong:
            raise DraftsmithError(problem, where=index, found=", ".join(sorted(p.name for p in wrong)), mend=mend)
    tensors = [tensor for file in files for tensor in file_tensors(file)]
    held = {(tensor.name, tensor.file.name) for tensor in tensors}
    lines = [f"named but not in {file}: {name}" for name, file in sorted(set(weight_map.items()) - held)]
    lines += [f"in {file} but not named: {name}" for name, file in sorted(held - set(weight_map.items()))]
    if lines:
        raise DraftsmithError(
            "the weight index and the files disagree:\n  " + "\n  ".join(lines), where=index, mend=mend
        )
    return tensors


class Weights:
    def __init__(self, folder: Path) -> None:
        self.folder, self.kind, self.notes = folder, "safetensors", ()
        self.named: list[tuple[str, Tensor]] = [(tensor.name, tensor) for tensor in drafter_files(folder)]


def drafter_weights(folder: Path) -> Weights:
    return Weights(folder)
