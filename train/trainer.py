"""A training run from its inputs to its report: accelerate for every back end, exact resume, held-out evaluation.

Notable choices: learning rate, order of the data and random seeds are pure functions of the step, so that a checkpoint
needs nothing but weights and AdamW's moments; whatever is decided (stop, save, evaluate) is decided alike on all
processes from figures that all of them have.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

from draftsmith.configs.console import closing, console, meter
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import sha256_json
from draftsmith.configs.schema import RunConfig
from draftsmith.configs.target import read_target
from draftsmith.data.store import HarvestReader
from draftsmith.train import checkpoint as saving
from draftsmith.train.evaluate import Evaluation, replay, summarize
from draftsmith.train.flops import peak_flops
from draftsmith.train.guard import TeacherReport, check_teacher
from draftsmith.train.initial import build_drafter
from draftsmith.train.inputs import Inputs, read_inputs
from draftsmith.train.labels import check_labels
from draftsmith.train.launch import make_accelerator, precision_of, prepare
from draftsmith.train.loader import Loader, same_everywhere
from draftsmith.train.lock import run_lock
from draftsmith.train.loss import Objective
from draftsmith.train.metrics import append_metrics, read_metrics, truncate_metrics
from draftsmith.train.plan import plan_windows
from draftsmith.train.report import write_report
from draftsmith.train.shards import damaged_shards, remember_shards
from draftsmith.train.stale import warn_of_stale_heldout, warn_of_stale_training
from draftsmith.train.state import gather_moments, gather_weights, restore_moments, whole_drafter
from draftsmith.train.step import Optimiser, learning_rate
from draftsmith.train.tracking import Tracker
from draftsmith.train.unroll import Unroll
from draftsmith.train.warm import warn_of_idle
from draftsmith.train.watch import stop_diverged, stop_not_finite

HELDOUT = "heldout"
"""Folder in a run's training folder for the record of held-out shards."""

FREE_TO_CHANGE = {
    "accumulation", "log_with", "log_every", "save_every", "evaluate_every", "keep_checkpoints", "guard_threshold", "init_from",
    "prefetch", "recompute", "check_shards", "damaged_shards", "stop_above", "deterministic",
}  # fmt: skip
"""Settings that a resumed run may change: they touch neither the order of the data nor the maths (the drafter behind
init_from is compared by content)."""


def train(config: RunConfig) -> Path:
    """Train a drafter as `config` says, going on from the newest checkpoint of the run if there is one.

    Returns the best checkpoint's folder.

    Raises:
        DraftsmithError: inputs that are missing or do not fit, damaged shards, labels that the draft vocabulary lacks,
            a teacher that the guard refuses, a checkpoint that is damaged or of another run, another run in the same
            folder, or a loss or gradient that is not finite or diverges.
    """
    settings, folder = config.train, config.training
    dtype = precision_of(settings)
    read_target(config.target.path)  # before anything costs time
    accelerator = make_accelerator(settings)
    damaged = damaged_shards(accelerator, config.store("train"), settings, folder)
    inputs = read_inputs(config, without=damaged)
    if accelerator.is_main_process:
        warn_of_stale_training(config, inputs.train, inputs.vocab)
        if inputs.heldout is not None:
            warn_of_stale_heldout(config, inputs.heldout)
    if inputs.heldout is not None:
        check_heldout(accelerator, config, inputs.heldout)
    longest = min(settings.max_length, settings.batch_tokens)
    windows = plan_windows(inputs.train, longest, settings.unroll_steps, settings.mask)
    check_labels(inputs.train, inputs.vocab.t2d, config, quiet=not accelerator.is_main_process)
    head = inputs.target.require("head").load()
    norm, eps = inputs.target.require("final_norm").load(), inputs.target.rms_norm_eps
    teacher = check_teacher(inputs.train, head, norm, eps, settings.guard_threshold, accelerator.device)
    provenance = inputs.provenance(config)
    with run_lock(folder) if accelerator.is_main_process else nullcontext():
        accelerator.wait_for_everyone()
        identity = run_identity(config, inputs, provenance)
        first, newest = saving.resume_point(folder, identity)
        if not same_everywhere(accelerator, first):
            raise DraftsmithError(
                "the processes do not see the same checkpoints", where=folder, found=f"newest step {first} on process {accelerator.process_index}",
                expected="one run folder for all machines", mend="put `runs` on storage that all machines share",
            )  # fmt: skip
        set_seed(settings.seed)
        embedding = inputs.target.require("embedding").load().float()
        drafter = build_drafter(inputs.spec, inputs.target, embedding, inputs.targets, settings, inputs.start)
        if newest is not None:
            _, tensors, _ = saving.read_drafter(newest)
            drafter.load_state_dict({name: t.float() for name, t in tensors.items() if name not in ("d2t", "t2d")})
        drafter.lm_head.requires_grad_(not settings.freeze_head)
        unroll = Unroll(
            drafter, head[inputs.targets].to(dtype), inputs.targets,
            keep_outside=settings.out_of_vocabulary == "keep", objective=Objective(settings.loss, settings.lk_eta),
            float8=settings.float8, recompute=settings.recompute,
        )  # fmt: skip
        del head
        model, prepared = prepare(accelerator, unroll, dtype, settings)
        if newest is not None:
            restore_moments(accelerator, model, prepared, saving.read_moments(newest), first)
        loader = Loader(
            inputs.train, windows, settings, inputs.spec,
            rank=accelerator.process_index, processes=accelerator.num_processes,
            accumulation=accelerator.gradient_accumulation_steps,
            fill=accelerator.num_processes > 1 or accelerator.state.deepspeed_plugin is not None, pin=accelerator.device.type == "cuda",
            embedding=embedding.to(dtype) if accelerator.device.type == "cuda" else None,
        )  # fmt: skip
        if not same_everywhere(accelerator, loader.mark()):
            raise DraftsmithError(
                "the processes do not see the same data", where=config.store("train"),
                mend="put `runs` on storage that all machines share",
            )  # fmt: skip
        if accelerator.is_main_process:
            if not config.vocab_file.is_file():  # the drafter's own, which training goes on with
                inputs.vocab.save(config.vocab_file)
            remember_shards(config.store("train"), settings, folder, damaged)
            if inputs.heldout is not None:
                remember_shards(config.store("heldout"), settings, folder / HELDOUT, {})
            saving.check_bytes(folder, first)
            truncate_metrics(folder / "metrics.jsonl", first)
            saving.mark_best_again(folder)
            warn_of_idle(config)
            _announce(inputs, loader, accelerator, settings.batch_tokens, teacher, first, dtype)
        run = _Run(config, inputs, accelerator, model, prepared, loader, provenance, identity)
        run.loop(first, dtype)
        accelerator.wait_for_everyone()
        best = saving.best_checkpoint(folder)
        if accelerator.is_main_process:
            saving.check_best(folder)
            written = write_report(config, inputs, provenance, best)
            closing(
                f"{best} (best of {folder}), report in {written}",
                f"draftsmith evaluate CONFIG, then: draftsmith convert {folder} --target {config.target.path} --out {config.drafter_folder}",
            )
    accelerator.end_training()
    return best


def check_heldout(accelerator: Accelerator, config: RunConfig, reader: HarvestReader) -> None:
    """What an evaluation in mid-run would stumble over: a shard that is not whole, or nothing to draft."""
    whole = config.train.model_copy(update={"damaged_shards": "stop"})
    damaged_shards(accelerator, config.store("heldout"), whole, config.training / HELDOUT)
    plan_windows(reader, max(reader.lengths), config.evaluate.draft_steps, "aligned")


def run_identity(config: RunConfig, inputs: Inputs, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that fixes the maths of a run and the order of its data, by dotted name; a checkpoint keeps it."""
    values = {
        "train": config.train.model_dump(mode="json", exclude=FREE_TO_CHANGE),
        "drafter": inputs.spec.model_dump(mode="json"),
        "evaluate": {
            "draft_steps": config.evaluate.draft_steps,
            "store": None if inputs.heldout is None else sha256_json(inputs.heldout.manifest.model_dump(mode="json")),
        },
        **{key: value for key, value in provenance.items() if key not in ("tool_version", "target_path")},
    }
    flat: dict[str, Any] = {}
    for section, value in values.items():
        flat |= (
            {f"{section}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {section: value}
        )
    return flat


def _announce(
    inputs: Inputs, loader: Loader, accelerator: Accelerator, batch_tokens: int, teacher: TeacherReport, first: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    agreement = (
        "no greedy text" if teacher.agreement is None else f"{teacher.agreement:.1%} of greedy tokens reproduced"
    )
    windows = sum(len(batch) for epoch, batch in loader.plan if epoch == 0)
    console.print(
        f"train: {inputs.spec.parameter_count():,} parameters, {windows:,} windows, {len(loader):,} steps of "
        f"{batch_tokens:,} tokens, {accelerator.num_processes} process(es) with "
        f"{accelerator.gradient_accumulation_steps} micro-batch(es) each on {accelerator.device}, "
        f"{accelerator.distributed_type.value}, {str(dtype).removeprefix('torch.')}; "
        f"teacher: {agreement}" + (f"; going on from step {first}" if first else ""),
        highlight=False,
    )


@dataclass
class _Clock:
    """What the time since the last logged row went into."""

    since: float
    tokens: int = 0
    flops: int = 0
    waited: float = 0.0

    @classmethod
    def started(cls) -> _Clock:
        return cls(time.monotonic())


class _Run:
    """State of one run's loop."""

    def __init__(
        self, config: RunConfig, inputs: Inputs, accelerator: Accelerator, model: Any, optimizer: Any, loader: Loader,
        provenance: dict[str, Any], identity: dict[str, Any],
    ) -> None:  # fmt: skip
        self.config, self.settings, self.inputs = config, config.train, inputs
        self.accelerator, self.model, self.prepared, self.loader = accelerator, model, optimizer, loader
        self.provenance, self.identity = provenance, identity
        self.metrics = config.training / "metrics.jsonl"
        self.optimiser = Optimiser(accelerator, model, optimizer, self.settings)
        self.rows: list[dict[str, Any]] = []

    def loop(self, first: int, dtype: torch.dtype) -> None:
        """Optimiser steps from `first` to the end."""
        settings, accelerator, loader = self.settings, self.accelerator, self.loader
        total = len(loader)
        self.rows = [r for r in read_metrics(self.metrics) if r["step"] <= first and "loss" in r]
        self.peak = peak_flops(accelerator.device, dtype) if first < total else 1.0
        tracker = Tracker(self.config, first=first, enabled=accelerator.is_main_process)
        quiet = not accelerator.is_main_process
        with meter("train", loader.tokens(), "tokens", loader.tokens() - loader.tokens(first), quiet=quiet) as bar:
            clock, read, asked = _Clock.started(), first, time.monotonic()
            for step, share in enumerate(loader.steps(first), start=first):
                clock.waited += time.monotonic() - asked
                rate = learning_rate(step, total, settings)
                self.optimiser.step(share, rate, seed=settings.seed * 1_000_003 + step)
                clock.tokens, clock.flops = clock.tokens + share.tokens, clock.flops + share.flops
                done, note = step + 1, ""
                evaluating = done % settings.evaluate_every == 0 or done == total
                saving_now = evaluating or done % settings.save_every == 0
                if saving_now or done % settings.log_every == 0:
                    row = self._row(done, read, share.epoch, rate, clock)
                    note = f"step {done}/{total} loss {row['loss']:.3f} accept {row['accept_length']:.2f} MFU {row['mfu']:.1%}"
                    self._log(row, tracker)
                    clock, read = _Clock.started(), done
                bar.advance(share.tokens, note)
                if saving_now:
                    self._save(done, self._evaluate(done, tracker) if evaluating else None)
                    clock.since = time.monotonic()
                asked = time.monotonic()
        tracker.close()

    def _row(self, done: int, read: int, epoch: int, rate: float, clock: _Clock) -> dict[str, Any]:
        """Means since the last row, over all processes; stops the run where they are not finite."""
        figures = self.optimiser.figures()
        seconds = time.monotonic() - clock.since
        stop_not_finite(figures, read, self.loader.conversations)
        total = sum(self.settings.step_decay**i * value for i, value in enumerate(figures.loss))
        row = {
            "step": done, "epoch": epoch, "loss": total, "loss_i": figures.loss, "acc_i": figures.acc, "accept_i": figures.accept,
            "accept_length": 1 + sum(figures.accept), "outside": figures.outside,
            "supervised": figures.supervised / max(1, clock.tokens), "grad_norm": figures.norms[-1],
            "grad_norm_max": max(figures.norms), "learning_rate": rate, "tokens_per_second": clock.tokens / seconds,
            "waiting": clock.waited / seconds, "mfu": clock.flops / seconds / self.peak,
        }  # fmt: skip
        if self.accelerator.device.type == "cuda":
            row["peak_memory"] = torch.cuda.max_memory_allocated(self.accelerator.device)
        self.rows.append(row)
        stop_diverged(self.rows, self.settings.stop_above, self.loader.conversations(done - 1))
        return row

    def _log(self, row: dict[str, Any], tracker: Tracker) -> None:
        if self.accelerator.is_main_process:
            append_metrics(self.metrics, row)
            tracker.log(row, row["step"])

    def _evaluate(self, done: int, tracker: Tracker) -> Evaluation | None:
        """Accept length on held-out conversations, which the processes share out."""
        if self.inputs.heldout is None:
            return None
        accelerator, settings = self.accelerator, self.config.evaluate
        with whole_drafter(accelerator, self.model) as drafter:
            chains = replay(
                drafter, self.inputs.targets, self.inputs.heldout, settings.draft_steps, settings.batch_tokens,
                share=(accelerator.process_index, accelerator.num_processes), quiet=True,
            )  # fmt: skip
        evaluation = summarize(dict(sorted(gather_object(list(chains.items())))), settings.draft_steps)
        row = {
            "step": done,
            "heldout_accept_length": evaluation.as_served.accept_length,
            "heldout_accept_per_position": evaluation.as_served.accept_per_position,
            "heldout_acc": evaluation.acc,
            "heldout_by_context": {name: part.accept_length for name, part in evaluation.by_context.items()},
        }
        self._log(row, tracker)
        return evaluation

    def _save(self, done: int, evaluation: Evaluation | None) -> None:
        folder, accelerator = self.config.training, self.accelerator
        tensors = gather_weights(accelerator, self.model, self.prepared)
        moments = gather_moments(accelerator, self.model, self.prepared)
        if accelerator.is_main_process:
            tensors |= {"d2t": self.inputs.vocab.d2t, "t2d": self.inputs.vocab.t2d}
            measured = evaluation.as_served.model_dump(mode="json") if evaluation else None
            provenance = self.provenance | {"accept_length": measured}
            saved = saving.save_checkpoint(folder, done, tensors, moments, self.inputs.spec, provenance, self.identity)
            if evaluation is not None:
                saving.mark_best(folder, saved, evaluation.as_served.accept_length)
            saving.rotate(folder, self.settings.keep_checkpoints)
        accelerator.wait_for_everyone()
