"""How bad input is reported."""

from trainer.contract.errors import JobFileError, Problem, UserError, errors


def test_a_problem_reads_as_its_setting_and_what_is_wrong() -> None:
    assert str(Problem("train.lr", "must be positive")) == "train.lr: must be positive"
    assert str(Problem("", "nothing to do")) == "nothing to do"


def test_a_job_that_cannot_run_tells_every_reason_on_its_own_line() -> None:
    error = JobFileError(iter([Problem("a", "x"), Problem("b", "y")]))
    assert isinstance(error, UserError)
    assert str(error) == "a: x\nb: y"
    assert [problem.path for problem in error.problems] == ["a", "b"]


def test_a_warning_does_not_keep_a_job_from_running() -> None:
    error = Problem("a", "x")
    assert errors([Problem("b", "y", "warning"), error]) == [error]
