"""Foreign drafters, converted, then loaded and run by both engines' own classes beside our forward of the same files."""

from __future__ import annotations

import json

import pytest

from draftsmith.configs.target import read_target
from draftsmith.convert.engine_loader import report_checks
from draftsmith.convert.write import convert
from tests.convert import foreign
from tests.convert.conftest import make_target
from tests.convert.foreign import Variant

pytestmark = pytest.mark.engine

CASES = {
    "specforge": ("sglang", Variant(head_dim=32), "sglang"),
    "legacy": ("legacy-specforge", Variant(fc_norm=True), "sglang"),
    "four-taps": ("sglang", Variant(taps=(2, 3, 4, 6), norm_output=True), "sglang"),
    "speculators": ("speculators", Variant(norm_before_fc=True), "sglang"),
    "modelopt": ("modelopt", Variant(), "sglang"),
    "safeailab": ("safeailab", Variant(), "sglang"),
    "angelslim": ("angelslim", Variant(full=True), "sglang"),
    "latent": ("torchspec", Variant(mla=True), "sglang"),
    "latent-full": ("modelopt", Variant(mla=True, full=True), "sglang"),
    "to-vllm": ("sglang", Variant(fc_norm=True, norm_output=True), "vllm"),
    "to-vllm-four-taps": ("sglang", Variant(taps=(2, 3, 4, 6)), "vllm"),
    "to-vllm-residual": ("speculators", Variant(norm_before_residual=True), "vllm"),
    "to-vllm-full": ("modelopt", Variant(full=True), "vllm"),
}
"""name -> (form in, drafter, form out)"""


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    room = tmp_path_factory.mktemp("converted")
    make_target(room / "target", torch_dtype="float32")
    for name, (dialect, variant, form) in CASES.items():
        source = foreign.WRITERS[dialect](room / "sources" / name, variant)
        convert(source, room / "target", room / name, to=form)
    return room


@pytest.fixture(scope="module")
def answers(room, script):
    found = {}
    for engine in ("sglang", "vllm"):
        folders = [room / name for name, loader in LOADED if loader == engine]
        out = room / f"{engine}.json"
        done = script(
            f"audit_{engine}.sh", "--target", room / "target", "--out", out, "--forward", "--drafter", *folders
        )
        assert out.is_file(), done.stdout + done.stderr
        answer = json.loads(out.read_text())
        found[engine] = answer["version"], {report["drafter"].split("/")[-1]: report for report in answer["reports"]}
    return found


LOADED = [(name, "vllm") for name in CASES] + [(name, "sglang") for name, case in CASES.items() if case[2] == "sglang"]
"""The speculators format is vLLM's alone."""


@pytest.mark.parametrize(("name", "engine"), LOADED)
def test_both_engines_load_and_compute_what_conversion_wrote(room, answers, name, engine):
    version, reports = answers[engine]
    checks = report_checks(engine, version, reports[name], room / name, read_target(room / "target"))
    assert [check.name.split(".")[-1] for check in checks] == ["load", "context", "forward"]
    assert all(check.status == "pass" for check in checks), checks
