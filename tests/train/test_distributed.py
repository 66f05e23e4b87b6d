"""Every back end of accelerate trains as one process does: losses, gradient norms and final weights, to rounding."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch

from draftsmith.configs.schema import load_config
from tests.preparing import make_ready
from tests.train.launching import ROOT, final_tensors, losses, run, start

CONFIGS = sorted((ROOT / "configs/accelerate").glob("*.yaml"))
STEPS = ("train.epochs=2", "train.batch_tokens=192", "train.log_every=1")


@pytest.fixture(scope="module")
def alone(prepared, tmp_path_factory, module_copy, warm_python):
    """The run of one process without accumulation."""
    folder = tmp_path_factory.mktemp("alone")
    return run(module_copy("alone"), *STEPS, back_end="single", tmp_path=folder, python=warm_python)


def same_run(one, other, *, norms=1e-4, weights=2e-6):
    curves = losses(one), losses(other)
    assert len(curves[0]) == len(curves[1]) > 5
    for (step, loss, norm), (also, their_loss, their_norm) in zip(*curves, strict=True):
        assert also == step
        assert their_loss == pytest.approx(loss, rel=1e-5)
        assert their_norm == pytest.approx(norm, rel=norms)
    tensors = final_tensors(one), final_tensors(other)
    assert tensors[0].keys() == tensors[1].keys()
    for name, value in tensors[0].items():
        torch.testing.assert_close(tensors[1][name], value, rtol=1e-4, atol=weights, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("back_end", "accumulation"),
    [("ddp", 1), ("ddp", 4), ("zero1", 4), ("zero2", 1), ("zero2", 4), ("zero3", 1), ("zero3", 4), ("zero2-offload", 1),
     ("zero3-offload", 4)],
)  # fmt: skip
def test_two_processes_train_as_one(copy, alone, tmp_path, warm_python, back_end, accumulation):
    """Those that no other test starts with the real python are started with it here."""
    python = warm_python if back_end in ("ddp", "zero2") or (back_end, accumulation) == ("zero3", 1) else None
    config = run(
        copy(), *STEPS, f"train.accumulation={accumulation}", back_end=back_end, tmp_path=tmp_path, python=python
    )
    same_run(alone, config)


@pytest.mark.slow
def test_accumulation_in_one_process_changes_nothing(copy, alone, tmp_path, warm_python):
    same_run(alone, run(copy(), *STEPS, "train.accumulation=4", tmp_path=tmp_path, python=warm_python))


@pytest.mark.slow
@pytest.mark.parametrize("back_end", ["multi-node-ddp", "multi-node-zero2"])
def test_two_machines_train_as_one(copy, alone, tmp_path, back_end):
    """Two launches, as on two machines of one process each, that meet at an address."""
    file = copy()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    launches = [
        start(file, *STEPS, back_end=back_end, processes=2, launcher=[*meeting, "--machine_rank", str(rank)],
              log=tmp_path / f"machine-{rank}.log")
        for rank in range(2)
    ]  # fmt: skip
    for rank, launch in enumerate(launches):
        assert launch.wait(240) == 0, (tmp_path / f"machine-{rank}.log").read_text()[-6000:]
    same_run(alone, load_config(file, list(STEPS)))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_accelerate_reads_every_configuration(file):
    """What `accelerate launch` itself makes of the file: the launcher it would choose, the ZeRO stage, the machines."""
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(file))
    name = file.stem
    kind = "NO" if name == "single" else "MULTI_GPU" if "ddp" in name else "DEEPSPEED"
    assert found.distributed_type.value == kind
    assert (found.num_machines, found.num_processes) == (
        (2, 16) if "multi" in name else (1, 1 if name == "single" else 2)
    )
    if kind == "DEEPSPEED":
        assert f"zero{found.deepspeed_config['zero_stage']}" in name
        assert (found.deepspeed_config["offload_optimizer_device"] == "cpu") == name.endswith("-offload")
    else:
        assert not found.deepspeed_config


def test_no_configuration_is_without_a_test():
    assert {file.stem for file in CONFIGS} == {
        "single", "ddp", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload", "multi-node-ddp", "multi-node-zero2",
    }  # fmt: skip


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory, target_folder):
    """The preset's run on SmolLM2-135M-Instruct with a few short conversations, ready to train."""
    folder = tmp_path_factory.mktemp("smollm2")
    for split in ("train", "heldout"):
        rows = [{"id": f"{split}-{n}", "turns": [f"Name {n + 2} {split} words."]} for n in range(6)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "name": "smol", "runs": str(folder / "runs"), "target": {"path": str(target_folder)},
        "prompts": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl"), "heldout_limit": 2},
        "synthesize": {"batch_size": 8, "max_new_tokens": 24},
    }  # fmt: skip
    file = folder / "smol.yaml"
    preset = load_config("smollm2-135m").model_dump(mode="json", exclude_unset=True)
    for section in ("synthesize", "harvest", "vocab", "train"):
        values[section] = preset.get(section, {}) | values.get(section, {})
    file.write_text(json.dumps(values))
    make_ready(load_config(file))
    return file


@pytest.mark.slow
def test_two_processes_train_a_drafter_of_smollm2_under_zero_2_and_3(smollm2, tmp_path, warm_python):
    """The real target's dimensions; masters and moments must meet those of one process."""
    few = ("train.epochs=3", "train.batch_tokens=160", "train.log_every=1")
    runs = {}
    for back_end in ("single", "zero2", "zero3"):
        values = json.loads(smollm2.read_text())
        file = tmp_path / f"{back_end}.yaml"
        runs_folder = tmp_path / back_end
        (runs_folder / "smol").mkdir(parents=True)
        for name in ("harvest", "vocab.safetensors", "conversations"):
            (runs_folder / "smol" / name).symlink_to(Path(values["runs"]) / "smol" / name)
        file.write_text(json.dumps(values | {"runs": str(runs_folder)}))
        runs[back_end] = run(file, *few, back_end=back_end, tmp_path=tmp_path, python=warm_python)
    same_run(runs["single"], runs["zero2"], norms=1e-3, weights=1e-5)
    same_run(runs["single"], runs["zero3"], norms=1e-3, weights=1e-5)
