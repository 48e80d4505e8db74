"""What keys of a config may be in a search: ranges and choices, as they are written."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from recsys.errors import UserError


@dataclass(frozen=True)
class Space:
    """Keys of a config with what they may be.

    Attributes:
        texts: by key `LOW..HIGH`, whole numbers where both are; with `:log` by their logarithm, with `:STEP` in steps;
            or a list of choices, of any values.
    """

    texts: dict[str, Any]

    @staticmethod
    def parse(words: Sequence[str]) -> "Space":
        """Return the space that words describe: each `key=RANGE`, `key=[a, b]`, or a YAML file of such.

        Raises:
            UserError: a word that is neither, or a range that is none.
        """
        texts: dict[str, Any] = {}
        for word in words:
            key, is_pair, text = word.partition("=")
            try:
                ranges = {key: yaml.safe_load(text)} if is_pair else yaml.safe_load(Path(word).read_text())
            except (OSError, ValueError, yaml.YAMLError) as error:
                raise UserError(f"--space: '{word}' is neither key=LOW..HIGH, key=[a, b] nor a YAML file") from error
            if not isinstance(ranges, Mapping):
                raise UserError(f"--space: '{word}' holds no keys with ranges or lists")
            texts |= ranges
        space = Space(texts)
        space.bounds()
        if not texts:
            raise UserError(
                "--space: there is nothing to search; give key=LOW..HIGH, key=[a, b] or a YAML file of such"
            )
        return space

    def bounds(self) -> dict[str, list[Any]]:
        """Return by key low, high and step of a range (a number, `log` or None), or the choices of a list as JSON."""
        bounds: dict[str, list[Any]] = {}
        for key, text in self.texts.items():
            if isinstance(text, list) and text:
                bounds[key] = [json.dumps(value) for value in text]
                continue
            low, _, rest = str(text).partition("..")
            high, _, how = rest.partition(":")
            numbers = [word for word in (low, high, how) if word not in ("", "log")]
            kind: type[int | float] = int if all(word.lstrip("-").isdecimal() for word in numbers) else float
            try:
                ends, step = [kind(low), kind(high)], None if how in ("", "log") else kind(how)
                is_range = ends[0] < ends[1] and (how != "log" or ends[0] > 0) and (step is None or step > 0)
            except ValueError:
                is_range = False
            if not is_range:
                raise UserError(
                    f"--space: {key}={text} is no range; write LOW..HIGH, LOW..HIGH:log, LOW..HIGH:STEP or a list"
                )
            bounds[key] = [*ends, how if how == "log" else step]
        return bounds

    def distributions(self) -> dict[str, Any]:
        """Return the same for optuna."""
        from optuna import distributions as kinds

        distributions: dict[str, Any] = {}
        for key, values in self.bounds().items():
            if isinstance(self.texts[key], list):
                distributions[key] = kinds.CategoricalDistribution(values)
                continue
            low, high, how = values
            is_log, step = how == "log", None if how == "log" else how
            if isinstance(low, int):
                distributions[key] = kinds.IntDistribution(low, high, log=is_log, step=step or 1)
            else:
                distributions[key] = kinds.FloatDistribution(low, high, log=is_log, step=step)
        return distributions

    def overrides(self, params: Mapping[str, Any]) -> list[str]:
        """Return values as `key=value`."""
        return [f"{key}={value}" for key, value in params.items()]

    def first(self) -> list[str]:
        """Return the first value of each key, to check the keys with."""
        return self.overrides({key: values[0] for key, values in self.bounds().items()})
