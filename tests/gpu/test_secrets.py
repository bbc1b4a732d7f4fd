"""Tests that secrets in command lines and environment variables are hidden, in every format that programs document."""

from __future__ import annotations

import pytest

from sae_tui.gpu.owner import command_line
from sae_tui.gpu.secrets import is_harmless, masked, masked_arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--hf-token", "hf_SECRETxyz"], ["train.py", "--password=SECRET"], ["t.py", "--api_key", "SECRET"],
        ["t.py", "-token", "SECRET"], ["t.py", "--hfToken=SECRET"], ["t.py", "--wandb-key", "-SECRET"],
        ["mysql", "-uroot", "-pSECRET"], ["curl", "-u", "ann:SECRET", "https://h"], ["curl", "-uann:SECRET"],
        ["curl", "-H", "Authorization: Bearer SECRET"], ["curl", "-H", "X-Api-Key: SECRET"],
        ["sshpass", "-p", "SECRET"], ["sshpass", "-pSECRET", "ssh", "h"],
        ["env", "MYSQL_PWD=SECRET", "x"], ["bash", "-c", "HF_TOKEN=SECRET python t.py"], ["train hf_SECRETabc"],
        ["bash", "-c", "mysql -uroot -pSECRET db; x"], ["python t.py --hf-token SECRET --n_tokens=10"],
        ["t", "postgres://u:p/SECRET@h/db"], ["t", "postgres://u:p@SECRET@h"], ["t", "https://SECRET@github.com/a"],
        ["t", "http://u:p SECRET@h"], ["t", "https://s3/x?X-Amz-Signature=SECRET&a=1"],
        ["t", '{"password": "SECRET"}'],
        ["t", "AccountName=a;AccountKey=SECRET=="], ["t", "Server=h;Pwd=SECRET;"], ["t", "eyJhbGciOi.SECRET"],
        ["t", "ghp_SECRET"], ["t", "sk-proj-SECRET"], ["t", "AKIASECRET"], ["t", "-----BEGIN KEY-----\nSECRET"],
        ["sudo", "/usr/bin/mysql", "-pSECRET"], ["docker", "exec", "db", "mysql", "-pSECRET"],
        ["timeout", "10", "curl", "-u", "ann:SECRET"], ["curl", "--user", "ann:SECRET"], ["curl", "--user=ann:SECRET"],
        ["bash", "-c", "curl -u ann:SECRET https://h"], ["bash", "-c", "sshpass -p SECRET ssh h"],
        ["docker", "login", "-p", "SECRET"], ["wandb", "login", "SECRET"], ["redis-cli", "-a", "SECRET"],
        ["aws", "configure", "set", "aws_secret_access_key", "SECRET"],
        ["curl", "-H", "Authorization:", "Bearer", "SECRET"], ["t", "token:", "SECRET"],
        ["t", "https://hooks.slack.com/services/T0/SECRET"], ["t", "--set", "train.api_key=SECRET"],
    ],
)  # fmt: skip
def test_secrets_in_a_command_line_are_masked(arguments: list[str]) -> None:
    assert "SECRET" not in "".join(masked_arguments(arguments))
    assert "SECRET" not in command_line(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["python", "train.py", "--n-tokens", "10M", "--n_tokens=10M", "--lr=1e-3", "--max-tokens", "5"],
        ["sae-tui", "launch", "job.toml", "--set", "train.n_tokens=10M", "--tag", "paper"],
        ["python", "-m", "torch.distributed.run", "--nproc-per-node=8", "--master-port", "29500"],
        ["python", "/home/ann/passes/tokenize.py", "--tokenizer=gpt2", "--data=/data/a@v1", "user@host:/x"],
        ["git", "clone", "https://github.com/a/b", "--depth", "1"],
        ["docker", "run", "-p", "8080:80", "image"],
        ["mysql", "-p", "database"],
        ["curl", "--user-agent", "x", "h"],
    ],
)
def test_arguments_that_are_not_secret_are_shown_unchanged(arguments: list[str]) -> None:
    assert masked_arguments(arguments) == arguments


def test_only_values_of_variables_known_to_be_harmless_are_shown() -> None:
    for name in ("PATH", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "RANK", "LC_ALL", "HF_HOME", "PYTHONPATH",
                 "PWD", "TORCH_HOME"):  # fmt: skip
        assert is_harmless(name)
    for name in ("MYSQL_PWD", "GH_PAT", "DSN", "NAME", "PATHS", "SLURM_JWT", "CUDA_TOKEN", "PIN", "OPENAI", "X_PATH",
                 "HF_TOKEN", "WANDB_API_KEY", "TORCH_AUTH"):  # fmt: skip
        assert not is_harmless(name)


def test_masking_any_text_is_fast() -> None:
    for text in ("a=" * 50_000, "://" * 50_000, "--x " * 50_000, "mysql " * 20_000, '"' * 100_000):
        assert masked(text)
