"""Typed access to the fields of a parsed config.json, with one-sentence errors."""

from collections.abc import Mapping
from typing import Any, TypeVar

from sglang_dsv4.errors import ConfigError

T = TypeVar("T")


class ConfigFields:
    """Reads fields by name or dotted path; a null counts as absent.

    Getters take alternative names: the first one present is read. Each raises `ConfigError` when
    none is present or the value has another type or range than wanted.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"config.json: found a {type(config).__name__}, a JSON object was wanted; "
                "correct the file."
            )
        self._config = config

    def _get(self, path: str) -> Any:
        value: Any = self._config
        for part in path.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return value

    def _first(self, names: tuple[str, ...], wanted: str) -> tuple[str, Any]:
        for name in names:
            value = self._get(name)
            if value is not None:
                return name, value
        raise ConfigError(
            f"config.json: {' or '.join(names)} is missing, {wanted} was wanted; add it."
        )

    @staticmethod
    def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(
            f"config.json: {name} is {value!r}, {wanted} was wanted; correct the file."
        )

    def has(self, path: str) -> bool:
        """Whether the field exists and is not null."""
        return self._get(path) is not None

    def count(self, *names: str, minimum: int = 1) -> int:
        """An integer of at least `minimum`."""
        wanted = f"an integer >= {minimum}"
        name, value = self._first(names, wanted)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._wrong(name, value, wanted)
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """A positive number; `default` where the field is absent."""
        if default is not None and not any(self.has(name) for name in names):
            return default
        name, value = self._first(names, "a positive number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def flag(self, *names: str) -> bool:
        """A boolean."""
        name, value = self._first(names, "true or false")
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, *names: str) -> str:
        """A string."""
        name, value = self._first(names, "a string")
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def fixed(self, name: str, wanted: Any) -> None:
        """Nothing if the field is absent or equals `wanted`; else the model is not served."""
        value = self._get(name)
        if value is not None and value != wanted:
            raise ConfigError(
                f"config.json: {name} is {value!r}, {wanted!r} was wanted; "
                "this model is not served."
            )

    def items(self, name: str, meaning: Mapping[Any, T], length: int) -> tuple[T, ...] | None:
        """The meanings of a list's first `length` entries; None if the field is absent."""
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) < length:
            found = f"{len(value)} entries" if isinstance(value, list | tuple) else repr(value)
            raise ConfigError(
                f"config.json: {name} has {found}, a list of at least {length} was wanted; "
                "correct the file."
            )
        known = list(meaning)
        for index, entry in enumerate(value[:length]):
            if entry not in known:
                raise self._wrong(f"{name}[{index}]", entry, f"one of {known}")
        return tuple(meaning[entry] for entry in value[:length])
