"""Tests that an SAE on the hub is read from the local cache, and is downloaded first if it is not cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
from support.hub import Hub
from support.layouts import sparsify

from trainer.contract.errors import UserError
from trainer.sharing.finding import find
from trainer.sharing.from_hub import parse


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Start a fake hub with an SAE for each of two layers, and use an empty cache."""
    hub = Hub()
    for name, value in hub.environment(str(tmp_path / "home")).items():
        monkeypatch.setenv(name, value)
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    for layer in (3, 12):
        sparsify({}, f"layers.{layer}")(tmp_path / "there")
    files = [file for file in (tmp_path / "there").rglob("*") if file.is_file()]
    hub.private["ada/saes"] = False
    hub.files["ada/saes"] = {str(file.relative_to(tmp_path / "there")): file.read_bytes() for file in files}
    monkeypatch.chdir(tmp_path)
    yield hub
    hub.close()


def test_a_hub_sae_is_downloaded_only_once_and_without_files_from_other_saes(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = find(Path("ada/saes/layers.3"))
    assert (found.form, found.place.parent.parent.parent.name) == ("sparsify", "models--ada--saes")
    assert {file.name for file in found.place.iterdir()} == {"cfg.json", "sae.safetensors"}
    assert found.reader.read(found.place).metadata["model_name"] == "gpt2-small"
    assert not (found.place.parent / "layers.12").exists()
    assert "ada/saes: file 1 of 3, " in capsys.readouterr().err
    # The second read sends no request to the hub.
    hub.asked.clear()
    assert find(Path("hf:ada/saes/layers.3")).place == found.place
    assert hub.asked == []


def test_the_error_for_a_repository_with_several_saes_names_a_few_of_them(hub: Hub) -> None:
    listed = r"ada/saes contains 2 SAEs, e.g. layers.\d+ and layers.\d+; give ada/saes/FOLDER"
    with pytest.raises(UserError, match=listed):
        find(Path("ada/saes"))
    with pytest.raises(UserError, match=r"ada/saes/layers\.4 on the hub contains no SAE that can be imported"):
        find(Path("ada/saes/layers.4"))
    with pytest.raises(UserError, match="nothing at ada/other, and the hub has no model ada/other you can access"):
        find(Path("ada/other"))


def test_without_the_hub_the_cache_is_read_and_a_missing_sae_is_reported(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(Path("ada/saes/layers.3"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert find(Path("ada/saes/layers.3")).form == "sparsify"
    with pytest.raises(UserError, match=r"contains an SAE in layers\.3; give the path of one"):
        find(Path("ada/saes"))
    with pytest.raises(UserError) as refused:
        find(Path("ada/other/layers.3"))
    (line,) = str(refused.value).splitlines()
    assert (
        "nothing at ada/other/layers.3, and the hub cannot be reached (HF_HUB_OFFLINE is set); run `hf download" in line
    )


def test_paths_take_precedence_and_only_valid_names_are_requested_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    sparsify({}, ".")(tmp_path / "ada" / "saes")
    assert find(Path("ada/saes")).place == Path("ada/saes")
    for path in ("/ada/saes2", "./ada/../saes2", "../ada/saes2", "saes2", "~/ada/saes2"):
        with pytest.raises(UserError, match="there is nothing at"):
            find(Path(path))
    (tmp_path / "runs").mkdir()
    with pytest.raises(
        UserError, match="nothing at runs/9/sae; give a folder or a file, or hf:runs/9/sae for an SAE on"
    ):
        find(Path("runs/9/sae"))
    assert hub.asked == []


def test_a_hub_name_consists_of_a_repository_a_revision_and_a_folder() -> None:
    assert parse("hf:/a/b") == ("a/b", None, "")
    assert parse("a/b@v1.0/layers.3/mlp") == ("a/b", "v1.0", "layers.3/mlp")
    assert [parse(text) for text in ("a", "/a/b", "a/../b", "a/b c", "a//b", "a/b/-x", ".a/b")] == [None] * 7
