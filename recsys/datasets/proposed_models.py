"""The model of a config that `recsys inspect` proposes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from recsys.errors import UserError

_PLAIN = re.compile(r"[A-Za-z_][\w-]*")
_LONGEST = 200  # most items that SASRec looks back at


def yaml_text(text: str) -> str:
    """Return a text as YAML writes it: plain if possible."""
    known = text.lower() in ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
    return text if _PLAIN.fullmatch(text) and not known else json.dumps(text, ensure_ascii=False)


def ranker(condition: str | None, num_features: int) -> tuple[str, str]:
    """Return section `model` for DLRM, and the metric that chooses the best step; empty: none.

    Args:
        condition: filter of the rows with label 1; None if the label is any number.
    """
    alone = ", interaction: dot_and_embeddings" if num_features == 1 else ""
    return f"model: {{name: dlrm, top_mlp: [256, 64]{alone}}}", "auc" if condition else ""


def towers(names: Mapping[str, str], of_items: Sequence[str]) -> tuple[str, str]:
    """Return the same for two towers. Raises UserError if a tower has no feature.

    Args:
        names: of features, by column. of_items: columns of data.items, the ids first.
    """
    items = [names[name] for name in of_items if name in names]
    users = [name for column, name in names.items() if column not in of_items]
    if not (items and users):
        raise UserError(
            f"two towers need columns of users and of items: data.train has {', '.join(names)}, and data.items has "
            f"{', '.join(of_items)}"
        )
    keys = [
        f"user_features: [{', '.join(map(yaml_text, users))}]",
        f"item_features: [{', '.join(map(yaml_text, items))}]",
    ]
    keys += [f"item_id: {yaml_text(items[0])}", "user_mlp: []", "item_mlp: []", "output_dim: 32"]
    return "\n  ".join(["model:", "name: two_tower", *keys]), "recall@20"


def sequences(history: str, item: str, num_items: int, longest: int, data: Sequence[str]) -> str:
    """Return a config of SASRec, for rows that are a user with a list of items.

    Args:
        history: column of the lists. item: column of ids in data.items. num_items: how many ids are in the lists.
        longest: items in a list, at most. data: lines of section `data`.
    """
    stop = ", early_stop: {metric: ndcg@10}" if any(line.startswith("  valid:") for line in data) else ""
    names = [name if _PLAIN.fullmatch(name) else plain for name, plain in ((history, "history"), (item, "item"))]
    columns = [f", column: {yaml_text(name)}" if name not in names else "" for name in (history, item)]
    length = min(max(2, longest), _LONGEST + 1)
    return "\n".join(
        [
            *data,
            "features: # SASRec reads the lists of items alone",
            f"  {yaml_text(names[0])}: {{table: item, max_length: {length}{columns[0]}}} # {num_items:,} ids",
            f"  {yaml_text(names[1])}: {{table: item{columns[1]}}}",
            "tables:",
            f"  item: {{num_embeddings: {2 * num_items + 20}, embedding_dim: 64, mapping: vocabulary}}",
            "model:",
            "  name: sasrec",
            f"  history: {yaml_text(names[0])}",
            f"  item_id: {yaml_text(names[1])}",
            "  dim: 64",
            f"  max_length: {length - 1}",
            "optimizer: {tables: {name: adam, learning_rate: 0.002}, dense: {name: adam, learning_rate: 0.002}}",
            f"train: {{global_batch_size: 64, epochs: 50, eval_every_epochs: 2{stop}}}",
            "",
        ]
    )
