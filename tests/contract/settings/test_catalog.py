from __future__ import annotations

import inspect

import pytest

from trainer.contract.settings import catalog
from trainer.contract.settings.catalog import Entry, SettingsEntry

REGISTRIES = (catalog.ARCHITECTURES, catalog.OPTIMIZERS, catalog.SOURCES, catalog.PARALLEL, catalog.METRICS)
ENTRIES = {name: entry for registry in REGISTRIES for name, entry in registry.items()}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_registered_class_takes_its_settings_as_keywords_or_in_a_spec(entry: Entry) -> None:
    parameters = inspect.signature(entry.load()).parameters.values()
    if entry in catalog.ARCHITECTURES.values():
        assert [parameter.name for parameter in parameters] == ["spec"]
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return  # a class that accepts any keyword arguments and converts them to its settings
    keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    assert keywords == (list(entry.settings.__struct_fields__) if isinstance(entry, SettingsEntry) else [])


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_registered_class_has_a_docstring(entry: Entry) -> None:
    assert entry.load().__doc__
    assert not inspect.isabstract(entry.load())
