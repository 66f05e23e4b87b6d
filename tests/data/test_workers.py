"""Several processes: their faults reach the person as their own."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.data import workers


def refused() -> None:
    raise DraftsmithError("the target has no weights", where="here", mend="fetch them")


def test_a_worker_that_cannot_get_ready_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_work", None)
    workers._start(refused, (), torch.get_num_threads(), os.getppid())
    with pytest.raises(DraftsmithError, match="no weights") as error:
        workers._do(1)
    sent = pickle.loads(pickle.dumps(error.value))
    assert (str(sent), sent.mend) == (str(error.value), "fetch them")
