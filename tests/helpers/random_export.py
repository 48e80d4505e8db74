"""Draws configs with features of any kind, and data for them, in which test rows also have ids that training lacks.

Models are rankers, or two towers with items, lists of seen items and lists of candidates.
"""

import datetime
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

TRAIN_ROWS, TEST_ROWS, NUM_ITEMS = 300, 211, 45
_DAY = datetime.date(2026, 11, 1)
# Name → an Arrow type, and a function from numbers to ids of that type.
KINDS: dict[str, tuple[pa.DataType, Any]] = {
    "int64": (pa.int64(), lambda i: (-1) ** i * i * 10**15),
    "ends of int64": (pa.int64(), lambda i: (-(2**63), 2**63 - 1)[i % 2] + (-1) ** (i % 2) * i),
    "int8": (pa.int8(), lambda i: i % 256 - 128),
    "uint64": (pa.uint64(), lambda i: 2**64 - 1 - i),
    "whole floats": (pa.float64(), lambda i: float(i)),
    "bool": (pa.bool_(), lambda i: i % 2 == 0),
    "date": (pa.date32(), lambda i: _DAY + datetime.timedelta(i)),
    "timestamp": (pa.timestamp("s"), lambda i: datetime.datetime(2026, 11, 1) + datetime.timedelta(hours=i)),
    "time": (pa.time64("us"), lambda i: datetime.time(i % 24, i % 60)),
    "duration": (pa.duration("ms"), lambda i: datetime.timedelta(seconds=i)),
    "decimal": (pa.decimal128(20, 2), lambda i: decimal.Decimal(i)),
    "odd decimal": (pa.decimal128(20, 2), lambda i: decimal.Decimal(i) / 4),
    "dictionary": (pa.dictionary(pa.int32(), pa.int64()), lambda i: i),
    "string": (pa.string(), lambda i: "ü" * (i % 150) + f"id {i}"),
    "large string": (pa.large_string(), lambda i: f"{i}"),
    "binary": (pa.binary(), lambda i: bytes([i % 256]) * (i % 20)),
    "dictionary of strings": (pa.dictionary(pa.int8(), pa.string()), lambda i: f"{i % 100}"),
}
_FLOATS: dict[str, tuple[pa.DataType, Any]] = {
    "float": (pa.float64(), lambda x: x),
    "int": (pa.int32(), lambda x: int(x * 100)),
    "decimal": (pa.decimal128(12, 3), lambda x: decimal.Decimal(f"{x:.3f}")),
    "timestamp": (pa.timestamp("us"), lambda x: datetime.datetime(2026, 11, 1) + datetime.timedelta(seconds=x)),
}
# Name → functions from a dimension to an Arrow type of vectors, and from a float to a number in these.
_VECTORS: dict[str, tuple[Any, Any]] = {
    "floats": (lambda dim: pa.list_(pa.float32()), lambda x: x),
    "fixed": (lambda dim: pa.list_(pa.float64(), dim), lambda x: x),
    "large": (lambda dim: pa.large_list(pa.float32()), lambda x: x),
    "whole": (lambda dim: pa.list_(pa.int16()), lambda x: int(x * 100)),
    "decimals": (lambda dim: pa.list_(pa.decimal128(12, 3)), lambda x: decimal.Decimal(f"{x:.3f}")),
}
# With these kinds, two numbers may give the same id, which items must not have, or ids that no vocabulary accepts.
_NO_ITEMS = ("bool", "binary", "odd decimal")
_OTHERS = ("mmoe", "ple", "logistic_regression", "fm", "deepfm", "dcn", "final_mlp", "wukong")
_OF_ONE_LABEL = ("fm", "deepfm")


class Drawn:
    """A config and its data; `rows(n, most)` returns n rows with numbers of ids below `most`.

    Attributes:
        sides: features of users and of items, for two towers.
    """

    def __init__(self, seed: int, towers: bool = False) -> None:
        self.dice = np.random.default_rng(seed)
        self.columns: dict[str, Any] = {}  # name → (type, function from a number to a value)
        self.features: dict[str, dict[str, Any]] = {}
        self.tables: dict[str, dict[str, Any]] = {}
        self.dim = int(self.dice.choice([4, 8]))
        if towers:
            self._item_feature()
        for number in range(self.dice.integers(3, 7)):
            self._id_feature(f"id_{number}")
        for number in range(self.dice.integers(0, 4)):
            self._float_feature(f"float_{number}")
        some = [name for name in self.features if name != "item" and self._chance(0.4)]
        some = some[1:] if len(some) == len(self.features) - towers else some  # so that users have a feature
        self.sides = [[name for name in self.features if name not in ("item", *some)], ["item", *some]]
        for name in list(self.tables) if self._chance(0.5) else ():
            self._narrow_or_expert(name)
        if self._chance(0.5) and not towers:
            names = [str(name) for name in self.dice.choice(["a", "b"], 2, replace=False)]
            self.columns |= {name: self._scalars(*KINDS[self._kind()], nulls=0.1) for name in names}
            self.features["crossed"] = {"cross": names, "table": "crossed"}
            self.tables["crossed"] = self._table(["hash", "vocabulary", "quotient_remainder"])

    def _chance(self, p: float) -> bool:
        return bool(self.dice.random() < p)

    def _kind(self) -> str:
        return str(self.dice.choice(list(KINDS)))

    def _scalars(self, kind: pa.DataType, value: Any, nulls: float) -> Any:
        return kind, lambda i: None if self._chance(nulls) else value(i)

    def _table(self, mappings: list[str]) -> dict[str, Any]:
        table = {"num_embeddings": int(self.dice.integers(50, 90)), "embedding_dim": self.dim, "init_range": 0.5}
        mapping = str(self.dice.choice(mappings))
        table |= {"mapping": mapping, "data_type": str(self.dice.choice(["FP32", "FP16"]))}
        table |= {"pooling": str(self.dice.choice(["sum", "mean"])), "hash_seed": int(self.dice.integers(0, 2**60))}
        if mapping == "hash":
            table |= {"num_hashes": int(self.dice.integers(1, 4))}
        if mapping == "quotient_remainder":
            table |= {"num_ids": 500}
        if mapping == "vocabulary":
            table |= {"num_embeddings": 500, "num_buckets": int(self.dice.integers(1, 4)), "min_count": 2}
        if self._chance(0.3) and mapping != "quotient_remainder" and table.get("num_hashes", 1) == 1:
            table |= {"quantize": str(self.dice.choice(["FP16", "INT8", "INT4"])), "sharding_type": "table_wise"}
        return table

    def _narrow_or_expert(self, name: str) -> None:
        """Randomly give a table another width, and a further expert, if it may have these."""
        table = self.tables[name]
        if self.dim > 4 and self._chance(0.5):
            table |= {"embedding_dim": 4, "projected_dim": self.dim}
        by = {"vocabulary": "frequency", "hash": "hash"}.get(table["mapping"])
        if by and name != "item" and self._chance(0.4):
            alike = {key: table[key] for key in ("pooling", "data_type")}
            other = {"num_embeddings": 40, "embedding_dim": self.dim, "hash_seed": int(self.dice.integers(0, 99))}
            self.tables[f"{name}_rest"] = {**alike, **other, "num_hashes": int(self.dice.integers(1, 3))}
            gate = str(self.dice.choice(["none", "table", "features"]))
            table["experts"] = {"others": [f"{name}_rest"], "by": by, "gate": gate}
            if by == "frequency":
                table |= {"num_embeddings": 20, "min_count": 1}
            table.pop("quantize", None)

    def _item_feature(self) -> None:
        kind, value = KINDS[str(self.dice.choice([name for name in KINDS if name not in _NO_ITEMS]))]
        self.columns["item"] = kind, value
        self.features["item"] = {"table": "item"}
        self.tables["item"] = {**self._table(["hash"]), "num_hashes": 1}

    def _id_feature(self, name: str) -> None:
        kind_name = self._kind()
        kind, value = KINDS[kind_name]
        mappings = ["hash", "vocabulary", "quotient_remainder"]
        if kind_name == "odd decimal":
            mappings.remove("vocabulary")
        if kind_name == "bool":
            mappings.append("identity")
        settings: dict[str, Any] = {"table": name, "column": f"column of {name}"}
        settings["nulls"] = str(self.dice.choice(["reserved", "empty", "refuse"]))
        nulls = 0.0 if settings["nulls"] == "refuse" else 0.15
        column = settings["column"]
        self.tables[name] = self._table(mappings)
        if self._chance(0.15):
            settings["boundaries"] = [-0.5, 0.0, 0.25, 1.0]
            self.columns[column] = self._scalars(pa.float32(), lambda i: float(np.sin(i)), nulls)
            self.tables[name] = {"mapping": "identity", "num_embeddings": 5, "embedding_dim": self.dim}
        elif not pa.types.is_dictionary(kind) and self._chance(0.4):
            self._list_column(column, kind, value, nulls, settings)
        else:
            self.columns[column] = self._scalars(kind, value, nulls)
        self.features[name] = settings

    def _list_column(self, column: str, kind: Any, value: Any, nulls: float, settings: dict[str, Any]) -> None:
        if self._chance(0.5):
            settings |= {"max_length": 3, "keep": str(self.dice.choice(["first", "last"]))}

        def ids(i: int) -> list[Any] | None:
            if self._chance(0.1):
                return None
            return [None if self._chance(nulls) else value(i + j) for j in range(self.dice.integers(0, 6))]

        def text(i: int) -> str | None:
            parts = ids(i)
            return None if parts is None else " |".join(f"{part}" for part in parts if part is not None)

        self.columns[column] = pa.list_(kind), ids
        if self.tables[settings["table"]]["mapping"] != "identity" and self._chance(0.3):
            self.columns[column] = pa.string(), text
            settings |= {"separator": "|", "integers": kind == pa.int64() and self._chance(0.5)}
        elif self._chance(0.4):
            settings["weights"] = f"weights of {column}"

    def _vector_feature(self, name: str) -> None:
        of_dim, value = _VECTORS[str(self.dice.choice(list(_VECTORS)))]
        dim, nulls = int(self.dice.integers(1, 7)), str(self.dice.choice(["reserved", "mean", "refuse"]))
        settings: dict[str, Any] = {"type": "float", "dim": dim, "nulls": nulls, "standardise": self._chance(0.5)}
        if self._chance(0.4):
            settings |= {"clip": [0.0, 50.0], "log1p": self._chance(0.5)}
        missing = 0.0 if nulls == "refuse" else 0.2

        def vector(x: float) -> list[Any] | None:
            numbers = [None if self._chance(missing / 2) else value(x + float(np.cos(j * x))) for j in range(dim)]
            return None if self._chance(missing) else numbers

        self.columns[name] = of_dim(dim), vector
        self.features[name] = settings

    def _float_feature(self, name: str) -> None:
        if self._chance(0.35):
            self._vector_feature(name)
            return
        kind, value = _FLOATS[str(self.dice.choice(list(_FLOATS)))]
        settings: dict[str, Any] = {"type": "float"}
        if self._chance(0.5) or pa.types.is_timestamp(kind):
            settings |= {"standardise": True}
        if self._chance(0.5) and not pa.types.is_timestamp(kind):
            settings |= {"clip": [0.0, 50.0], "log1p": self._chance(0.7)}
        # A fill of 0.5 would be half a second after 1970, so far from the mean that losses are infinite.
        is_named = self._chance(0.5) or pa.types.is_timestamp(kind)
        settings |= {"nulls": str(self.dice.choice(["mean", "refuse"]))} if is_named else {"fill": 0.5}
        self.columns[name] = self._scalars(kind, value, 0.0 if settings.get("nulls") == "refuse" else 0.2)
        self.features[name] = settings

    def rows(self, count: int, most: int) -> pa.Table:
        """Return rows whose ids have numbers below `most`, with labels."""
        arrays = {}
        for name, (kind, value) in self.columns.items():
            numbers = self.dice.integers(0, most, count)
            is_float = name.startswith("float")
            values = [value(abs(float(np.sin(i))) * 9 if is_float else int(i)) for i in numbers]
            arrays[name] = _array(values, kind)
        for feature in self.features.values():
            if "weights" in feature:
                lists = arrays[feature["column"]].to_pylist()
                weights = [None if ids is None else [float(self.dice.random()) for _ in ids] for ids in lists]
                arrays[feature["weights"]] = pa.array(weights, pa.list_(pa.float32()))
        labels = {"label": pa.array(self.dice.integers(0, 2, count)), "rating": pa.array(self.dice.random(count))}
        return pa.table({**arrays, **labels})

    def model(self, num_labels: int) -> dict[str, Any]:
        """Return the section of a model that fits the features and the number of labels."""
        others = [name for name in _OTHERS if num_labels == 1 or name not in _OF_ONE_LABEL]
        name = str(self.dice.choice(["dlrm", "dlrm", *others]))
        model: dict[str, Any] = {"name": name}
        if name == "dlrm":
            model["interaction"] = str(self.dice.choice(["dot", "dot_and_embeddings"]))
        elif name in ("deepfm", "dcn", "final_mlp") and self._chance(0.5):
            model["layer_norm"] = True
        ids = [name for name in self.features if self.features[name].get("type") != "float"]
        lists = [name for name in ids if "column" in self.features[name] and self._is_list(name)]
        queries = [name for name in ids if name not in lists]
        if name == "logistic_regression" or not (lists and queries):
            return model
        self.tables.pop(f"{lists[0]}_rest", None)  # an expert of the table that is replaced
        self.tables[lists[0]] = {**self._table(["hash"]), "num_hashes": 1}
        return {**model, "attention": {lists[0]: queries[0]}}

    def _is_list(self, name: str) -> bool:
        return pa.types.is_list(self.columns[self.features[name]["column"]][0])


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    return pa.array(values, kind)


def write_random(folder: Path, seed: int) -> Path:
    """Write data and the config of a random run; return the config."""
    drawn = Drawn(seed)
    pq.write_table(drawn.rows(TRAIN_ROWS, 60), folder / "train.parquet", row_group_size=71)
    pq.write_table(drawn.rows(TEST_ROWS, 90), folder / "test.parquet", row_group_size=37)
    labels: dict[str, Any] = {"label_column": "label"}
    if drawn._chance(0.4):
        labels = {"labels": {"like": "label", "stars": {"column": "rating", "loss": "squared"}}}
    config = {
        "data": {"train": f"{folder}/train.parquet", "num_streams": 1, **labels},
        "features": drawn.features,
        "model": drawn.model(len(labels.get("labels", ("label",)))),
        "tables": drawn.tables,
        "optimizer": {"tables": {"learning_rate": 0.5}},
        "train": {"global_batch_size": 64},
    }
    (folder / "config.yaml").write_text(yaml.dump(config, allow_unicode=True))
    return folder / "config.yaml"


def write_random_towers(folder: Path, seed: int) -> Path:
    """Write data and the config of random two towers; return the config. Users are in test.parquet, with lists."""
    drawn = Drawn(seed, towers=True)
    kind, value = drawn.columns["item"]
    columns = [[drawn.features[name].get("column", name) for name in side] for side in drawn.sides]
    columns[1] += [drawn.features[name]["weights"] for name in drawn.sides[1] if "weights" in drawn.features[name]]
    items = drawn.rows(NUM_ITEMS, 60).select(columns[1])
    items = items.set_column(0, "item", _array([value(i) for i in range(NUM_ITEMS)], kind))
    pq.write_table(items, folder / "items.parquet", row_group_size=17)
    for name, count, most in (("train", TRAIN_ROWS, 60), ("test", TEST_ROWS, 90)):
        rows = drawn.rows(count, most).drop_columns(columns[1])
        taken = items.take(pa.array(drawn.dice.integers(0, NUM_ITEMS, count)))
        for column in columns[1]:
            rows = rows.append_column(column, taken[column])
        for column in ("seen", "candidates"):
            rows = rows.append_column(column, _lists_of_items(drawn, count, kind, value))
        pq.write_table(rows, folder / f"{name}.parquet", row_group_size=37)
    data = {"train": f"{folder}/train.parquet", "items": f"{folder}/items.parquet", "num_streams": 1}
    users, of_items = drawn.sides
    mlps = {key: [8] if drawn._chance(0.5) else [] for key in ("user_mlp", "item_mlp")}
    model = {"name": "two_tower", "user_features": users, "item_features": of_items, "item_id": "item", **mlps}
    config = {
        "data": {**data, "candidates_column": "candidates" if drawn._chance(0.3) else None},
        "features": drawn.features,
        "model": {**model, "output_dim": 8, "normalize": drawn._chance(0.5)},
        "tables": drawn.tables,
        "train": {"global_batch_size": 64},
    }
    (folder / "config.yaml").write_text(yaml.dump(config, allow_unicode=True))
    return folder / "config.yaml"


def _lists_of_items(drawn: Drawn, count: int, kind: pa.DataType, value: Any) -> pa.Array:
    """Return lists of items, some of which are unknown, null or repeated; some lists are null."""
    flat = kind.value_type if pa.types.is_dictionary(kind) else kind
    lists = [
        None
        if drawn._chance(0.1)
        else [
            None if drawn._chance(0.05) else value(int(i)) for i in drawn.dice.integers(0, 60, drawn.dice.integers(30))
        ]
        for _ in range(count)
    ]
    return pa.array(lists, pa.list_(flat))
