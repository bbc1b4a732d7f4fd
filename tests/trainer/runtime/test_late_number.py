from __future__ import annotations

import torch

from trainer.runtime.late_number import LateNumber


def test_what_is_read_is_what_was_written_however_the_tensor_changes_later() -> None:
    late, number = LateNumber(torch.device("cpu")), torch.tensor(2**40 + 1)
    late.write(number)
    number.zero_()
    assert late.read() == 2**40 + 1
