"""Declares GPU sensors once, as fields of a reading, for all views and the JSON output.

Drivers sometimes return impossible values, such as a number with all bits set, or a negative number that was converted
to an unsigned one. Readings from all vendors are checked, because a single impossible value would corrupt the sums,
stored values and plots for all GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_type_hints

from trainer.contract.printable import printable

IMPOSSIBLE = "impossible value"
Limits = tuple[float, float]
BYTES = (0, 1 << 50)  # The largest machines have about 2^45 bytes.
PERCENT = (0, 200)  # Fans can exceed 100 % of their rated speed, and some drivers report 105 % utilisation.
MHZ = (0, 20_000)
WATTS = (0.0, 10_000.0)
DEGREES = (-60, 200)
COUNT = (0, 1 << 48)
JOULES = (0.0, 1e13)  # About 10 kW for 30 years.


class Unit(NamedTuple):
    """A unit, and the corresponding base unit in Prometheus; one unit equals `times / per` base units."""

    words: str
    base: str
    times: float = 1
    per: float = 1


# Maps the last part of a field name to the field's unit. The field `utilization` has no unit in its name.
UNITS: Mapping[str, Unit] = {
    "utilization": Unit("%", "utilization_ratio", per=100),
    "percent": Unit("%", "ratio", per=100),
    "bytes": Unit("bytes", "bytes"),
    "c": Unit("°C", "celsius"),
    "w": Unit("W", "watts"),
    "j": Unit("J", "joules"),
    "mhz": Unit("MHz", "hertz", times=1_000_000),
}


@dataclass(frozen=True, slots=True)
class Sensor:
    """Declares a measured value.

    `words` describe the value in the JSON reference and in Prometheus; a value without `words` is not exported.
    `public` is the value's name in JSON, and `null` explains what null means there. `limits` are the lowest and the
    highest possible values, inclusive. A sensor with a `heading` is a column in every GPU list, and also appears in
    each GPU's panel and in the map. In a narrow terminal, the columns with the highest `drop` are omitted first. A
    sensor with a `title` is an entry in a `group` on a GPU's page.
    """

    words: str = ""
    limits: Limits | None = None
    public: str = ""
    null: str = "not supported"
    heading: str = ""
    drop: int = 3
    title: str = ""
    group: Literal["speed", "heat"] = "heat"
    name: str = ""

    @property
    def unit(self) -> Unit | None:
        return UNITS.get(self.name.rpartition("_")[2])

    @property
    def meaning(self) -> str:
        """The value's description in the JSON reference."""
        unit = self.unit
        return f"{self.words}{f', in {unit.words}' if unit else ''}; null if {self.null}."

    @property
    def metric(self) -> str:
        """The sensor's name in Prometheus."""
        stem, _, _ = self.name.rpartition("_")
        return "_".join(filter(None, (stem, self.unit.base))) if self.unit else self.name

    def in_base_unit(self, value: object) -> float | None:
        """Return a value in Prometheus's base unit, or None if it is not a number."""
        if not isinstance(value, int | float):
            return None
        return value * self.unit.times / self.unit.per if self.unit else value


_FOUND: dict[type[Any], Mapping[str, Sensor]] = {}


def sensors_of(kind: type[Any]) -> Mapping[str, Sensor]:
    """Return a dict mapping each field of a reading class to its sensor."""
    if kind not in _FOUND:
        hints = get_type_hints(kind, include_extras=True)
        _FOUND[kind] = {
            name: replace(one, name=name, public=one.public or name)
            for name, hint in hints.items()
            for one in getattr(hint, "__metadata__", ())
            if isinstance(one, Sensor)
        }
    return _FOUND[kind]


def exported(kind: type) -> Mapping[str, Sensor]:
    """Return a dict mapping each field exported to JSON to its sensor."""
    return {name: one for name, one in sensors_of(kind).items() if one.words}


def public_values(reading: Any) -> dict[str, Any]:
    """Return the values of a reading under the names used in JSON."""
    return {one.public: getattr(reading, name) for name, one in exported(type(reading)).items()}


def is_possible(value: object, limits: Limits | None) -> bool:
    """Return whether a value is within its sensor's limits; None (unknown) is always allowed."""
    if value is None or limits is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    lowest, highest = limits
    return lowest <= value <= highest  # False for NaN.


def drop_impossible(reading: Any) -> dict[str, str]:
    """Set fields with impossible values to None; return a dict mapping each of these fields to the reason."""
    sensors = sensors_of(type(reading))
    names = [name for name, one in sensors.items() if not is_possible(getattr(reading, name), one.limits)]
    failed = {name: _words(getattr(reading, name)) for name in names}
    for name in names:
        # Readings are frozen, but this function is called only while a reading is being constructed.
        object.__setattr__(reading, name, None)
    return failed


def _words(value: object) -> str:
    return f"{IMPOSSIBLE} ({f'{value:g}' if isinstance(value, float) else printable(str(value)[:40])})"
