"""The training loop: accelerate for every back end, exact resume, held-out evaluation, atomic checkpoints.

Notable choices: the learning rate is a pure function of the step, so no scheduler state exists; the loss is a sum over
this process's positions divided by the global count, then multiplied by what accelerate and the back end divide by, so
that the gradient does not depend on how a step is split.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.configs.console import closing, console, meter
from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.files import sha256_json
from draftsmith.configs.schema import RunConfig, TrainSection
from draftsmith.train import checkpoint as saving
from draftsmith.train.evaluate import Evaluation, replay, summarize
from draftsmith.train.guard import check_teacher
from draftsmith.train.initial import build_drafter
from draftsmith.train.inputs import Inputs, read_inputs
from draftsmith.train.launch import make_accelerator
from draftsmith.train.loader import Loader, Share
from draftsmith.train.model import Drafter
from draftsmith.train.plan import plan_windows
from draftsmith.train.report import draw_curves
from draftsmith.train.tracking import Tracker
from draftsmith.train.unroll import StepResult, Unroll, loss_coefficients

FREE_TO_CHANGE = {"log_with", "log_every", "save_every", "evaluate_every", "keep_checkpoints", "guard_threshold"}
"""Settings that a resumed run may change: they touch neither the order of the data nor the maths."""


def train(config: RunConfig) -> Path:
    """Train a drafter as `config` says, going on from the newest checkpoint of the run if there is one.

    Returns the best checkpoint's folder.

    Raises:
        DraftsmithError: inputs that are missing or do not fit, a teacher that the guard refuses, a checkpoint of
            another run, or a loss or gradient that is not finite.
    """
    inputs = read_inputs(config)
    settings = config.train
    head = inputs.target.require("head").load()
    report = check_teacher(
        inputs.train,
        head,
        inputs.target.require("final_norm").load(),
        inputs.target.rms_norm_eps,
        settings.guard_threshold,
    )
    accelerator = make_accelerator(settings.precision)
    torch.manual_seed(settings.seed)
    embedding = inputs.target.require("embedding").load().float()
    drafter = build_drafter(inputs.spec, inputs.target, embedding, inputs.targets, settings)
    unroll = Unroll(
        drafter, head[inputs.targets].float(), inputs.targets, keep_outside=settings.out_of_vocabulary == "keep"
    )
    del head
    optimizer = torch.optim.AdamW(
        unroll.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=torch.cuda.is_available(),
    )
    windows = plan_windows(inputs.train, settings.max_length, settings.unroll_steps, settings.mask)
    loader = Loader(
        inputs.train, windows, settings,
        rank=accelerator.process_index, processes=accelerator.num_processes,
        accumulation=accelerator.gradient_accumulation_steps,
    )  # fmt: skip
    model, prepared = accelerator.prepare(unroll.to(accelerator.device), optimizer)
    provenance = inputs.provenance(config)
    run_hash = sha256_json(
        {
            "settings": settings.model_dump(mode="json", exclude=FREE_TO_CHANGE),
            "spec": inputs.spec.model_dump(mode="json"),
            **{key: value for key, value in provenance.items() if key not in ("tool_version", "target_path")},
        }
    )
    first = saving.load_state(accelerator, config.training, run_hash)
    metrics = config.training / "metrics.jsonl"
    if accelerator.is_main_process:
        saving.truncate_metrics(metrics, first)
        saving.mark_best_again(config.training)
        agreement = (
            "no greedy text" if report.agreement is None else f"{report.agreement:.1%} of greedy tokens reproduced"
        )
        console.print(
            f"train: {inputs.spec.parameter_count():,} parameters, {len(windows):,} windows, {len(loader):,} steps of "
            f"{settings.batch_tokens:,} tokens, {accelerator.num_processes} process(es) on {accelerator.device}; "
            f"teacher: {agreement}" + (f"; going on from step {first}" if first else ""),
            highlight=False,
        )
    run = _Run(config, inputs, accelerator, model, prepared, loader, provenance, run_hash, metrics)
    run.loop(first)
    best = saving.best_checkpoint(config.training)
    if accelerator.is_main_process:
        draw_curves(saving.read_metrics(metrics), config.training / "curves.png")
        closing(
            f"{best} (best of {config.training}), curves in {config.training / 'curves.png'}",
            f"draftsmith evaluate CONFIG, then: draftsmith convert {config.training} --target {config.target.path} --out {config.drafter_folder}",
        )
    accelerator.end_training()
    return best


def learning_rate(step: int, steps: int, settings: TrainSection) -> float:
    """Linear warm-up over warmup_ratio of the steps, then half a cosine down to the minimum at the last step."""
    warmup = max(1, round(settings.warmup_ratio * steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    low = settings.min_learning_rate_ratio
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


class _Run:
    """State of one run's loop."""

    def __init__(
        self, config: RunConfig, inputs: Inputs, accelerator: Accelerator, model: Any, optimizer: Any, loader: Loader,
        provenance: dict[str, Any], run_hash: str, metrics: Path,
    ) -> None:  # fmt: skip
        self.config, self.settings, self.inputs = config, config.train, inputs
        self.accelerator, self.model, self.optimizer, self.loader = accelerator, model, optimizer, loader
        self.provenance, self.run_hash, self.metrics = provenance, run_hash, metrics
        self.sums = torch.zeros(4, self.settings.unroll_steps, device=accelerator.device)
        self.counts = [0] * self.settings.unroll_steps

    def loop(self, first: int) -> None:
        """Optimiser steps from `first` to the end."""
        settings, accelerator = self.settings, self.accelerator
        total = len(self.loader)
        tracker = Tracker(self.config, enabled=accelerator.is_main_process)
        quiet = not accelerator.is_main_process
        with meter(
            "train", self.loader.tokens(), "tokens", self.loader.tokens() - self.loader.tokens(first), quiet=quiet
        ) as bar:
            since, tokens, waited, clock = time.monotonic(), 0, 0.0, time.monotonic()
            for step, share in enumerate(self.loader.steps(first), start=first):
                waited += time.monotonic() - clock
                norm = self._optimise(share, learning_rate(step, total, settings))
                tokens += share.tokens
                done = step + 1
                note = ""
                evaluating = done % settings.evaluate_every == 0 or done == total
                saving_now = evaluating or done % settings.save_every == 0
                if saving_now or done % settings.log_every == 0:
                    row = self._row(
                        done,
                        share,
                        norm,
                        tokens,
                        waited,
                        time.monotonic() - since,
                        learning_rate(step, total, settings),
                    )
                    since, tokens, waited = time.monotonic(), 0, 0.0
                    note = f"step {done}/{total} loss {row['loss']:.3f} accept {row['accept_length']:.2f}"
                    if accelerator.is_main_process:
                        saving.append_metrics(self.metrics, row)
                        tracker.log(row, done)
                bar.advance(share.tokens, note)
                if saving_now:
                    self._save(done, self._evaluate(done, tracker) if evaluating else None)
                clock = time.monotonic()
        tracker.close()

    def _optimise(self, share: Share, rate: float) -> float:
        """One optimiser step; returns the global gradient norm before clipping."""
        accelerator = self.accelerator
        scale = accelerator.num_processes * accelerator.gradient_accumulation_steps
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm: Any = None
        coefficients = [scale * value for value in loss_coefficients(share.counts, self.settings.step_decay)]
        for batch in share.batches:
            with accelerator.accumulate(self.model):
                weights = [0.0] * len(coefficients) if batch is None else coefficients
                loss, results = self.model((share.filler if batch is None else batch).to(accelerator.device), weights)
                accelerator.backward(loss)
                if batch is not None:
                    self._count(results)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
        for index, count in enumerate(share.counts):
            self.counts[index] += count
        return float(norm) if norm is not None else float(self.model.get_global_grad_norm() or 0.0)

    def _count(self, results: list[StepResult]) -> None:
        for index, step in enumerate(results):
            parts = (step.loss, step.right.sum(), step.chain.sum(), step.outside.sum())
            self.sums[:, index] += torch.stack([part.float() for part in parts])

    def _row(
        self, done: int, share: Share, norm: float, tokens: int, waited: float, seconds: float, rate: float
    ) -> dict[str, Any]:
        """Means since the last row, over all processes."""
        summed: Tensor = self.accelerator.reduce(self.sums, "sum")
        loss, right, chain, outside = (summed / torch.tensor(self.counts, device=summed.device).clamp(min=1)).tolist()
        total = sum(self.settings.step_decay**i * value for i, value in enumerate(loss))
        if not math.isfinite(total):
            self._stop_diverged(done, "loss", total)
        if not math.isfinite(norm):
            self._stop_diverged(done, "gradient's norm", norm)
        self.sums.zero_()
        supervised = self.counts[0]
        self.counts = [0] * len(self.counts)
        return {
            "step": done, "epoch": share.epoch, "loss": total, "loss_i": loss, "acc_i": right, "accept_i": chain,
            "accept_length": 1 + sum(chain), "outside": outside[0], "supervised": supervised / max(1, tokens),
            "grad_norm": norm, "learning_rate": rate, "tokens_per_second": tokens / seconds, "waiting": waited / seconds,
        }  # fmt: skip

    def _stop_diverged(self, done: int, label: str, value: float) -> None:
        epoch, windows = self.loader.plan[done - 1]
        raise DraftsmithError(
            f"training stopped: the {label} is not finite",
            where=f"step {done} (epoch {epoch}), conversations {[self.inputs.train.ids[w.conversation] for w in windows][:8]}",
            found=value,
            mend="lower train.learning_rate; the last checkpoint is untouched",
        )

    def _evaluate(self, done: int, tracker: Tracker) -> Evaluation | None:
        """Accept length on held-out conversations, computed by the first process with the gathered weights."""
        if self.inputs.heldout is None:
            return None
        tensors = saving.full_drafter_tensors(self.accelerator, self.model)
        evaluation = None
        if self.accelerator.is_main_process:
            evaluation = evaluate_tensors(self.config, self.inputs, tensors, self.accelerator.device)
            row = {
                "step": done,
                "heldout_accept_length": evaluation.as_served.accept_length,
                "heldout_accept_per_position": evaluation.as_served.accept_per_position,
                "heldout_acc": evaluation.acc,
            }
            saving.append_metrics(self.metrics, row)
            tracker.log(row, done)
        self.accelerator.wait_for_everyone()
        return evaluation

    def _save(self, done: int, evaluation: Evaluation | None) -> None:
        folder, accelerator = self.config.training, self.accelerator
        tensors = saving.full_drafter_tensors(accelerator, self.model)
        tensors |= {"d2t": self.inputs.vocab.d2t, "t2d": self.inputs.vocab.t2d}
        provenance = self.provenance | {
            "accept_length": evaluation.as_served.model_dump(mode="json") if evaluation else None
        }
        saved = saving.save_checkpoint(accelerator, folder, done, tensors, self.inputs.spec, provenance, self.run_hash)
        if accelerator.is_main_process:
            if evaluation is not None:
                saving.mark_best(folder, saved, evaluation.as_served.accept_length)
            saving.rotate(folder, self.settings.keep_checkpoints)


def evaluate_tensors(config: RunConfig, inputs: Inputs, tensors: dict[str, Tensor], device: torch.device) -> Evaluation:
    """Replay held-out conversations with these weights (served names) and summarise."""
    assert inputs.heldout is not None
    drafter = Drafter(inputs.spec, inputs.target.require("embedding").load().float())
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items() if name not in ("d2t", "t2d")})
    chains = replay(
        drafter.to(device),
        inputs.targets,
        inputs.heldout,
        config.evaluate.draft_steps,
        config.evaluate.batch_tokens,
        quiet=True,
    )
    return summarize(chains, config.evaluate.draft_steps)
