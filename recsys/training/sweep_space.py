"""Space of a search: ranges and choices of config keys, parsed and checked without torch."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice, product
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recsys.config import Config, load_config
from recsys.config.names import check_metric_name
from recsys.errors import UserError
from recsys.runtime.versions import is_installed

# Keys that a sweep sets itself in each trial, and the reason for messages.
_OF_SWEEP = {
    "seed": "--seeds says by how many seeds each trial is trained",
    "run.dir": "trials lie under --out",
    "run.overwrite": "a trial that was cut short is started again",
    "run.resume": "a trial that was cut short is started again",
    "data.test": "trials are compared on data.valid",
    "train.publish.dir": "trials publish nothing",
}
# The other words of a trial: see `Space.parse`.
OF_TRIALS = ("run.overwrite=true", "run.resume=false", "data.test=null", "train.publish.dir=null")
_TRIED = 8  # combinations to try a value with before it is refused


def open_space(
    config: str, overrides: Sequence[str], words: Sequence[str], out: Path, metric: str | None
) -> tuple["Space", str]:
    """Parse and check the arguments of a sweep; return its space and its metric.

    Args:
        words: of keys with ranges or choices; see `Space.parse`.
        metric: default: that of early stopping, or the model's first.

    Raises:
        UserError: optuna is not installed, `out` holds a run, or config, space or metric do not fit each other.
    """
    import_optuna()
    if (out / "config.yaml").exists():
        raise UserError(f"--out: '{out}' holds a run; name another folder")
    refuse_own_keys((word.partition("=")[0] for word in overrides), "config key ")
    space = Space.parse(words)
    if not Path(config).is_file():
        load_config(config)  # which says so, not of a value of the space
    configs = space.loaded(lambda words: load_config(config, [*overrides, *words, *OF_TRIALS]))
    chosen = metric or configs[0].train.early_stop.metric or configs[0].model.metric_names(configs[0])[0]
    for loaded in configs:
        check_metric_name("--metric", chosen, loaded.model.metric_names(loaded))
        if loaded.data.valid is None:
            raise UserError("config key 'data.valid' is not set, but trials are compared on it")
    return space, chosen


def import_optuna() -> Any:
    """Import and return optuna, which logs only errors from now on.

    Raises:
        UserError: it is not installed.
    """
    if not is_installed("optuna"):
        raise UserError("recsys sweep needs optuna, which is not installed; `pip install optuna` installs it")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def refuse_own_keys(keys: Iterable[str], where: str) -> None:
    """Raise a UserError, which begins with `where`, if a sweep sets one of these keys of a config itself."""
    for key in keys:
        if key in _OF_SWEEP:
            raise UserError(f"{where}'{key}' is set by the sweep itself ({_OF_SWEEP[key]}); leave it out")


@dataclass(frozen=True)
class Space:
    """Keys of a config with their ranges or choices.

    Attributes:
        texts: by key, `LOW..HIGH`, which are whole numbers if both are, with `:log` by logarithm and with `:STEP` in
            steps; or a list of choices, of any values.
    """

    texts: dict[str, Any]

    @staticmethod
    def parse(words: Sequence[str]) -> "Space":
        """Parse a space from words: each is `key=RANGE`, `key=[a, b]`, or a YAML file with these.

        Raises:
            UserError: a word or a range is not valid.
        """
        texts: dict[str, Any] = {}
        for word in words:
            key, is_pair, text = word.partition("=")
            try:
                # As configs are read: 1e-3 is a number, and 2026-11-01 a text, not a day.
                read = OmegaConf.from_dotlist([f"it={text}"]) if is_pair else OmegaConf.load(word)
                content: Any = OmegaConf.to_container(read)
                ranges = {key: content["it"]} if is_pair else content
            except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
                raise UserError(f"--space: '{word}' is neither key=LOW..HIGH, key=[a, b] nor a YAML file") from error
            if not isinstance(ranges, Mapping):
                raise UserError(f"--space: '{word}' holds no keys with ranges or lists")
            texts |= ranges
        refuse_own_keys(texts, "--space: ")
        space = Space(texts)
        space.bounds()
        if not texts:
            raise UserError(
                "--space: there is nothing to search; give key=LOW..HIGH, key=[a, b] or a YAML file of such"
            )
        return space

    def bounds(self) -> dict[str, list[Any]]:
        """Return, by key, low, high and step of a range (a number, `log` or None), or the choices of a list as JSON.

        With a step, high is the last value that steps from low reach.
        """
        bounds: dict[str, list[Any]] = {}
        for key, text in self.texts.items():
            if isinstance(text, list) and text:
                bounds[key] = [json.dumps(value, ensure_ascii=False) for value in text]  # YAML has no surrogates
                continue
            low, _, after_low = str(text).partition("..")
            high, _, option = after_low.partition(":")
            try:
                ends, step = [_number(low), _number(high)], None if option in ("", "log") else _number(option)
                are_whole = all(isinstance(end, int) for end in ends) and (step is None or step % 1 == 0)
                to_number: type[int | float] = int if are_whole else float
                ends, step = [*map(to_number, ends)], step if step is None else to_number(step)
                is_range = ends[0] < ends[1] and (option != "log" or ends[0] > 0) and (step is None or step > 0)
                is_range &= all(map(math.isfinite, (*ends, step or 0)))
                if is_range and step is not None:
                    ends[1] = _last_step(ends[0], ends[1], step)
            except (ValueError, ArithmeticError):  # no number, one that no float holds, or too many steps
                is_range = False
            if not is_range:
                raise UserError(
                    f"--space: {key}={text} is not a range; write LOW..HIGH, LOW..HIGH:log, LOW..HIGH:STEP or a list"
                )
            bounds[key] = [*ends, option if option == "log" else step]
        return bounds

    def distributions(self) -> dict[str, Any]:
        """Return the bounds as optuna's distributions, by key."""
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

    def samples(self) -> list[list[str]]:
        """Return a few lists of `key=value` that cover all choices and what `_checked` names of ranges; the first has
        the first of each key."""
        choices = self._checked()
        return [[words[min(i, len(words) - 1)] for words in choices] for i in range(max(map(len, choices)))]

    def loaded(self, load: Callable[[list[str]], Config]) -> list[Config]:
        """Load configs with lists of `key=value` that cover all choices, and both ends of ranges and a value between.

        Combinations of values that do not fit each other are not refused: their trials fail, and others succeed.

        Raises:
            UserError: a value fits none of several combinations of values of the other keys.
        """
        configs: list[Config] = []
        fitting: set[str] = set()
        for words in self.samples():
            try:
                configs.append(load(words))
                fitting.update(words)
            except UserError:
                continue  # the word that caused it is found below
        choices = self._checked()
        for place, words in enumerate(choices):
            for word in words:
                if word in fitting:
                    continue
                try:
                    configs.append(_first_that_loads(load, [*choices[:place], [word], *choices[place + 1 :]]))
                except UserError as error:
                    raise error.within(f"--space: {word}, which it holds") from error
        return configs

    def _checked(self) -> list[list[str]]:
        """Return, for each key, `key=value` of the choices of a list, or of both ends of a range and the value behind
        the first, if it has steps: what a key allows of the two, it allows of all, such as multiples of 4."""
        checked = self.bounds()
        for key, text in self.texts.items():
            if isinstance(text, list):
                continue
            low, high, how = checked[key]
            step = how if isinstance(how, int | float) else 1 if isinstance(low, int) else high - low
            second = _last_step(low, low + step, step)
            checked[key] = [low, second, high] if low < second < high else [low, high]
        return [[f"{key}={value}" for value in values] for key, values in checked.items()]


def _number(text: str) -> int | float:
    """Return a number as configs write it, such as 1_000, +5 or 1e-3; raises ValueError."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _last_step(low: float, high: float, step: float) -> float:
    """Return the last of low, low + step, low + 2 step, … up to high, computed with the decimals as written."""
    first, size = Decimal(str(low)), Decimal(str(step))
    last = first + (Decimal(str(high)) - first) // size * size
    return int(last) if isinstance(high, int) else float(last)


def _first_that_loads(load: Callable[[list[str]], Config], choices: Sequence[Sequence[str]]) -> Config:
    """Return the config of the first combination of choices that is valid; raise the first error if none is."""
    problems: list[UserError] = []
    for words in islice(product(*choices), _TRIED):
        try:
            return load(list(words))
        except UserError as error:
            problems.append(error)
    raise problems[0]
