"""Columns of one kind in all data sets: what is told apart is refused, and what is the same gets the same rows."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import fork_train, must_train
from parquet_files import open_columns

from recsys.config import Config, Device, load_config
from recsys.data.footer_cache import kept_schema
from recsys.data.inputs import open_inputs
from recsys.data.parquet import read_column
from recsys.errors import UserError
from recsys.runtime.world import open_world

CONFIG = """
data: {{train: {folder}/train, valid: {folder}/valid, label_column: label, num_streams: 2}}
features: {{user: {{table: user}}, region: {{table: region}}, pair: {{cross: [user, color], table: pair}}}}
tables:
  user: {{num_embeddings: 100, embedding_dim: 4}}
  region: {{num_embeddings: 100, embedding_dim: 4}}
  pair: {{num_embeddings: 100, embedding_dim: 4}}
model: {{name: logistic_regression}}
train: {{global_batch_size: 20, max_steps: 2}}
"""


def write(folder: Path, regions: list[str], **types: pa.DataType) -> None:
    """Write 40 rows for each region, a key in the paths, with columns of other types than integers."""
    numbers = np.random.default_rng(0).integers(0, 9, (3, 40))
    for region in regions:
        columns = {name: pa.array(numbers[i]) for i, name in enumerate(("user", "color", "label"))}
        columns["label"] = pa.array(numbers[2] % 2)
        table = pa.table({name: column.cast(types.get(name, column.type)) for name, column in columns.items()})
        (folder / f"region={region}").mkdir(parents=True)
        pq.write_table(table, folder / f"region={region}" / "a.parquet")


def config_of(folder: Path) -> Config:
    (folder / "c.yaml").write_text(CONFIG.format(folder=folder))
    return load_config(folder / "c.yaml")


def test_a_partition_key_is_text_wherever_it_is_so_in_training(tmp_path: Path) -> None:
    """Digits alone would be numbers, and `01` of data.valid another id than `01` of data.train."""
    write(tmp_path / "train", ["01", "A"])
    write(tmp_path / "valid", ["01"])
    with open_world(Device.cpu) as world:
        config = config_of(tmp_path)
        inputs = open_inputs(config, world, tmp_path / "footers")
        assert inputs.datasets["valid"].schema.field("region").type == pa.string()
        assert kept_schema(tmp_path / "footers/train.footers").field("region").type == pa.string()
        later = open_inputs(config, world, known=tmp_path / "footers", roles=["valid"])  # as of a finished run
        assert later.datasets["valid"].schema.field("region").type == pa.string()


def test_a_partition_key_that_is_a_number_in_training_alone_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train", ["01"])
    write(tmp_path / "valid", ["01", "A"])
    with open_world(Device.cpu) as world, pytest.raises(UserError, match=r"'tables.region'.* a partition key in paths"):
        open_inputs(config_of(tmp_path), world)


def test_a_partition_key_of_more_than_32_bits_is_text_and_said_to_be_so(tmp_path: Path) -> None:
    write(tmp_path / "train", ["1", str(2**31)])
    write(tmp_path / "valid", ["1", str(2**31 - 1)])
    with open_world(Device.cpu) as world:
        schemas = {role: data.schema for role, data in open_inputs(config_of(tmp_path), world).datasets.items()}
        assert {schema.field("region").type for schema in schemas.values()} == {pa.string()}  # as it is in data.train
    file = tmp_path / "valid/region=1/a.parquet"
    table = pq.read_table(file, partitioning=None)
    pq.write_table(table.append_column("region", pa.array([2**31] * len(table))), tmp_path / "valid.parquet")
    config = load_config(tmp_path / "c.yaml", [f"data.valid={tmp_path}/valid.parquet"])
    message = (
        r"ids are string in column 'region' of data.train and int64 .* where all its values are integers of 32 bits"
    )
    with open_world(Device.cpu) as world, pytest.raises(UserError, match=message):
        open_inputs(config, world)


def test_columns_of_a_cross_are_of_one_kind_too(tmp_path: Path) -> None:
    write(tmp_path / "train", ["1"])
    write(tmp_path / "valid", ["1"], color=pa.string())
    message = (
        r"'features.pair.cross': its ids are string in column 'color' of data.valid and int64 in column 'color' of "
        r"data.train"
    )
    with open_world(Device.cpu) as world, pytest.raises(UserError, match=message):
        open_inputs(config_of(tmp_path), world)


@pytest.mark.slow
def test_tables_are_not_taken_for_ids_of_another_kind(tmp_path: Path) -> None:
    write(tmp_path / "train", ["1"])
    write(tmp_path / "valid", ["1"])
    config_of(tmp_path)
    config, first = str(tmp_path / "c.yaml"), tmp_path / "first"
    must_train(config, f"run.dir={first}")
    write(tmp_path / "texts", ["1"], user=pa.string())
    options = (f"data.train={tmp_path}/texts", "data.valid=null", f"train.init_from={first}")
    done = fork_train(config, *options, f"run.dir={tmp_path}/second")
    assert done.returncode != 0 and "config key 'tables.user': its ids are string in column 'user' of " in done.stderr
    assert "which train.init_from takes; write both with the same type" in done.stderr
    must_train(config, *options, f"run.dir={tmp_path}/third", "train.init.tables=none")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [pa.decimal128(2, 2), pa.decimal128(5, 2), pa.decimal128(38, 30)], ids=str)
@pytest.mark.parametrize("integer", [pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.uint64()], ids=str)
def test_integers_of_one_file_go_with_decimals_of_another(
    integer: pa.DataType, kind: pa.DataType, is_first: bool, tmp_path: Path
) -> None:
    least, most = np.iinfo(str(integer)).min, np.iinfo(str(integer)).max
    values = [Decimal(int(least)), Decimal(int(most)), None], [Decimal("0.25"), None]
    for name, column in zip("ab" if is_first else "ba", values, strict=True):
        of_file = pa.array(column, kind if column is values[1] else pa.decimal128(20, 0))
        of_file = of_file if column is values[1] else of_file.cast(integer)
        lists = pa.ListArray.from_arrays(range(len(column) + 1), of_file)
        pq.write_table(pa.table({"number": of_file, "list": lists}), tmp_path / f"{name}.parquet")
    dataset = open_columns(tmp_path, "number", "list")
    expected = [*values[not is_first], *values[is_first]]
    assert read_column(dataset, "number").to_pylist() == expected
    assert read_column(dataset, "list").to_pylist() == [[value] for value in expected]
    above = open_columns(tmp_path, "number", filter="number > 1")
    assert read_column(above, "number").to_pylist() == [values[0][1]]


@pytest.mark.parametrize("scale", [1, 9])
def test_decimals_beside_floats_become_the_nearest_floats(scale: int, tmp_path: Path) -> None:
    """Arrow makes 0.30000000000000004 of 0.3, and 247.99999999999997 of an id that a warehouse wrote with a scale."""
    of_file: list[Decimal | None] = [None, *(Decimal(i) / 10 for i in range(999)), *map(Decimal, range(999))]
    numbers = pa.array(of_file, pa.decimal128(38, scale))
    lists = pa.ListArray.from_arrays([0, None, *range(2, len(numbers) + 1)], numbers)
    files = pa.table({"number": numbers, "list": lists}), pa.table({"number": [0.5], "list": [[0.5, None]]})
    for name, table in zip("ab", files, strict=True):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    dataset = open_columns(tmp_path, "number", "list")
    floats = [number if number is None else float(number) for number in of_file]
    assert read_column(dataset, "number").to_pylist() == [*floats, 0.5]
    expected = [floats[:2], None, *([number] for number in floats[2:]), [0.5, None]]
    assert read_column(dataset, "list").to_pylist() == expected


@pytest.mark.parametrize("nulls", ["reserved", "refuse"])
@pytest.mark.parametrize("without", ["train", "valid"])
def test_a_column_without_a_type_is_of_null_lists_where_other_data_have_lists(
    without: str, nulls: str, tmp_path: Path
) -> None:
    """Writers give no type to a column without a value, such as of users who have done nothing yet."""
    lists = {"tags": pa.array([[1, 2], []] * 20), "of_tags": pa.array([[0.5, 2.0], []] * 20)}
    for role in ("train", "valid"):
        write(tmp_path / role, ["1"])
        file = tmp_path / role / "region=1/a.parquet"
        table = pq.read_table(file, partitioning=None)
        for name, column in lists.items():
            table = table.append_column(name, pa.nulls(40) if role == without else column)
        pq.write_table(table, file)
    config_of(tmp_path)
    config = load_config(tmp_path / "c.yaml", [f"features.tags={{table: user, weights: of_tags, nulls: {nulls}}}"])
    with open_world(Device.cpu) as world:
        inputs = open_inputs(config, world)
        for role in ("train", "valid"):
            batches = list(inputs.loader(role).batches())
            assert sum(int(batch.ids["tags"].lengths().sum()) for batch in batches) == 40 * (role != without)
