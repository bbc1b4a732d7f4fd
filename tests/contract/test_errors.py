"""Tests for error messages about invalid input."""

import io
import os

import pytest
import torch

from trainer.contract.errors import JobFileError, Problem, UserError, errors, first_line
from trainer.contract.wording import distinct_sizes


def test_a_problems_text_contains_its_setting_and_its_message() -> None:
    assert str(Problem("train.lr", "must be positive")) == "train.lr: must be positive"
    assert str(Problem("", "nothing to do")) == "nothing to do"


def test_a_job_file_error_lists_each_problem_on_its_own_line() -> None:
    error = JobFileError(iter([Problem("a", "x"), Problem("b", "y")]))
    assert isinstance(error, UserError)
    assert str(error) == "a: x\nb: y"
    assert [problem.path for problem in error.problems] == ["a", "b"]


def test_a_warning_does_not_stop_a_job_from_running() -> None:
    error = Problem("a", "x")
    assert errors([Problem("b", "y", "warning"), error]) == [error]


def test_advice_from_torch_to_load_an_unsafe_pickle_is_hidden() -> None:
    class Own:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("true",)

    torch.save({"a": Own()}, file := io.BytesIO())
    file.seek(0)
    with pytest.raises(Exception, match="weights_only") as refused:
        torch.load(file, weights_only=True)
    assert first_line(refused.value) == "it is a pickle that contains more than tensors, so it could run code"


def test_different_sizes_below_a_mebibyte_are_displayed_differently() -> None:
    assert distinct_sizes(90_000, 40_960) == ("87.9 KiB", "40.0 KiB")
