"""docs/config.md is what scripts/config_reference.py makes of the code, and tells of every key."""

import dataclasses

from launch import ROOT

from recsys.config import choices, load_config
from recsys.config.experts import ExpertsConfig
from recsys.config.model import MODELS, find_model
from recsys.config.schema import Config
from scripts.config_reference import PAGE, described, page, sections_of


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python scripts/config_reference.py"


def test_every_key_has_a_meaning() -> None:
    sections = {**sections_of(Config), **{name: find_model(name).Config for name in MODELS}}
    missing = [
        f"{key}.{field.name}"
        for key, section in sections.items()
        for field, _, meaning in described(section)
        if not meaning and field.name != "name"
    ]
    assert missing == []


def test_what_is_said_of_choices_is_a_sentence() -> None:
    """The first line of their docstring is a meaning on the page, and would be cut if it ran on in the next."""
    kinds = [kind for kind in vars(choices).values() if isinstance(kind, type) and kind.__module__ == choices.__name__]
    assert len(kinds) > 20
    assert [kind.__name__ for kind in kinds if not (kind.__doc__ or "").partition("\n")[0].endswith(".")] == []


def test_every_key_of_a_loaded_config_is_on_the_page() -> None:
    config = load_config(
        ROOT / "configs" / "dlrm_sample.yaml", ["tables.user.sparsity.l1=0.1", "optimizer.tables.name=sgd"]
    )
    text = PAGE.read_text()

    def check(section: object, heading: str) -> None:
        rows = text.partition(f"\n## `{heading}`\n")[2].partition("\n## ")[0]
        for field in dataclasses.fields(section):  # type: ignore[arg-type]
            is_key = not field.metadata.get("omegaconf_ignore")
            assert not is_key or f"\n| `{field.name}` | " in rows, (heading, field.name)

    check(config, "CONFIG.yaml")
    for name in ("data", "train", "run", "memory", "topology", "precision", "optimizer"):
        check(getattr(config, name), name)
    check(config.optimizer.tables, "optimizer.tables")
    check(config.train.publish, "train.publish")
    check(config.features["user_id"], "features.NAME")
    check(config.tables["user"], "tables.NAME")
    check(config.tables["user"].sparsity, "tables.NAME.sparsity")
    check(ExpertsConfig(), "tables.NAME.experts")
