from __future__ import annotations

import pytest

from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job_file import parse_job
from trainer.contract.settings.transcoders import transcoder_problems


def problems_of(sae: dict, d_out: int | None) -> list[str]:
    job, _ = parse_job({"data": {"path": "rows"}, "sae": sae})
    assert job is not None
    return [str(problem) for problem in transcoder_problems(job.sae, 32, d_out)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_with_an_export_format_trains_with_and_without_a_skip(name: str) -> None:
    entry = ARCHITECTURES[name]
    for skip in (False, True):
        sae = {"architecture": name, "skip": skip}
        assert (problems_of(sae, 32) == []) == (entry.transcodes != "no")
        assert (problems_of(sae, 20) == []) == (entry.transcodes == "yes")


def test_the_error_for_an_architecture_with_no_export_format_names_alternatives() -> None:
    others = '"batch_topk" or "matryoshka_batch_topk" or "jumprelu" or "standard", or omit data.target_path'
    assert problems_of({"architecture": "gated"}, 32) == [
        f'sae.architecture: no format supports "gated" transcoders; use {others}'
    ]
    assert problems_of({"architecture": "topk"}, 20) == [
        'sae.architecture: the format for "topk" transcoders requires equal input and output dimensions, but '
        f"this one maps 32 dimensions to 20; use {others}"
    ]


def test_only_a_transcoder_can_have_a_skip_connection() -> None:
    assert problems_of({"skip": False}, None) == []
    assert problems_of({"skip": True}, None) == [
        "sae.skip: only a transcoder has a skip connection; give data.target_path, or set it to false"
    ]
