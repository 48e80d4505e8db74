"""Python API: train, open a finished run, predict, recommend and get vectors, as Arrow tables."""

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recsys.config import as_value, load_config
from recsys.config.choices import Device
from recsys.data.inputs import Given
from recsys.errors import LAUNCHER_FILE, UserError, in_words, read_launcher_error
from recsys.runtime.command import run_attended
from recsys.runtime.launch import environment_of_called, rank_of_several
from recsys.runtime.logs import quiet_libraries
from recsys.runtime.world import World, open_world
from recsys.serving.embeddings import open_table, rows_of_tower, table_of, vectors_of_tower
from recsys.serving.finished import OpenRun, find_run
from recsys.serving.predict import (
    Results,
    best_of_users,
    check_recommends,
    kept_columns,
    scored,
    scores_of_rows,
)
from recsys.serving.score import ExportError, as_table, stored
from recsys.training.run_dir import new_run_dir

_TORCHRUN = """from recsys.runtime.launch import end_with_parent
from torch.distributed.run import main
end_with_parent()
main()
"""
_worlds: dict[int, World] = {}  # at most one, under the number of the process that made it
_open = ExitStack()  # leaves that world when the process ends
_LIST_VIEWS = (pa.ListViewType, pa.LargeListViewType)

Data = Any  # a path of Parquet files or a list of these, an Arrow table, or a data frame that Arrow can read


def train(config: str | Path | Mapping[str, Any], *overrides: str, num_processes: int = 1) -> "Run":
    """Train in processes of their own, and open the finished run. Ctrl-C ends them, as it does the command.

    Args:
        config: a YAML file, or its content, in which paths are relative to the current folder. overrides: `key=value`,
            as on the command line.

    Raises:
        UserError: a mistake in the config, the data or an argument, or this process cannot open the run afterwards.
        subprocess.CalledProcessError: training ended with another error, which has been shown.
    """
    _check_alone()
    if not isinstance(num_processes, Integral) or num_processes < 1:
        raise UserError(f"num_processes is {num_processes!r}, but must be a whole number above 0")
    with tempfile.TemporaryDirectory() as folder:
        path = _config_file(config, Path(folder))
        loaded = load_config(path, _texts("overrides", overrides, "'train.epochs=3'"))
        run_dir = loaded.run.dir or str(new_run_dir(loaded))
        launcher = ["-m", "recsys", "train"]
        if num_processes > 1:  # by this machine's own address, since its name may not resolve
            torchrun = ["-c", _TORCHRUN, "--standalone", "--local-addr=127.0.0.1"]
            launcher = [*torchrun, f"--nproc_per_node={num_processes}", *launcher]
        command = [sys.executable, *launcher, str(path), *overrides, f"run.dir={as_value(run_dir)}"]
        error_file = Path(folder) / "error.json"  # torchrun copies the first error of a rank to its own file of errors
        try:
            if status := run_attended(command, {**environment_of_called(), LAUNCHER_FILE: str(error_file)}):
                raise read_launcher_error(error_file) or subprocess.CalledProcessError(status, command)
        finally:
            if loaded.run.dir is None:
                with suppress(OSError):  # it holds a run
                    Path(run_dir).rmdir()
    return open_run(run_dir, trust_code=True)  # the user who trains a class has named it


def _config_file(config: Any, folder: Path) -> Path:
    """Return the file of a config; content without a file is written to the folder."""
    if isinstance(config, str | Path):
        return Path(config)
    if not isinstance(config, Mapping):
        raise UserError(
            f"the config is of type {type(config).__name__}, but must be the path of a YAML file or a mapping"
        )
    content = OmegaConf.to_container(config) if isinstance(config, DictConfig) else _plain_values(config)
    if isinstance(content, dict) and isinstance(content.get("base"), str):
        content["base"] = str(Path(content["base"]).absolute())
    try:
        OmegaConf.save(OmegaConf.create(content), folder / "config.yaml")
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"config key '{error.full_key}': {reason}; values are texts, numbers, booleans, None, lists and mappings"
        ) from error
    return folder / "config.yaml"


def _plain_values(value: Any) -> Any:
    """Return values in the types of a config: paths as texts, numbers of NumPy as those of Python."""
    if isinstance(value, Mapping):
        return {name: _plain_values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_values(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if isinstance(value, np.generic) else value


def _texts(name: str, values: Any, example: str) -> Any:
    """Return an argument if it is a list of texts, or None; a single text would be read letter by letter."""
    texts = None if isinstance(values, str) or not isinstance(values, Iterable) else [*values]
    if values is not None and (texts is None or not all(isinstance(text, str) for text in texts)):
        raise UserError(f"{name}: found {values!r}, but must be a list of texts, such as [{example}]")
    return texts


def open_run(run: str | Path, *overrides: str, trust_code: bool = False) -> "Run":
    """Open a finished run in this process; arguments and errors as of `recsys.serving.finished.find_run`."""
    return Run(str(run), _texts("overrides", overrides, "'data.filter=null'"), trust_code)


class Run:
    """A finished run with its model in memory.

    Results have a row for each row of the data, in the same order. `keep` names columns of the data that are returned
    with them; default: columns of ids that the model reads, without lists.
    """

    def __init__(self, run: str, overrides: Sequence[str], trust_code: bool) -> None:
        _check_alone()
        quiet_libraries()
        with _in_words_of_python():
            finished = find_run(run, overrides, trust_code).absolute()  # the current folder may change
        world = _world(finished.config.run.device, finished.config.run.num_threads)
        self._run = finished.in_order(world_size=1)
        self._opened = OpenRun(self._run, world, [])

    def __repr__(self) -> str:
        return f"<Run {self._run.run_dir} at step {self._opened.source.marker.state.step}>"

    def predict(self, data: Data, keep: Sequence[str] | None = None) -> pa.Table:
        """Return `score` of each row; see `recsys.serving.predict.predict`."""
        return self._scored(data, "rows", keep, lambda: scores_of_rows(self._opened))

    def recommend(self, users: Data, k: int = 20, keep: Sequence[str] | None = None) -> pa.Table:
        """Return the best `k` items of each user as `items` and `scores`; see `recsys.serving.predict.recommend`."""
        check_recommends(self._run, k)
        if "items" not in self._opened.inputs.datasets:
            self._opened.inputs = self._opened.beside(["items"])
        return self._scored(users, "users", keep, lambda: best_of_users(self._opened, k))

    def embeddings(self, name: str, data: Data = None, keep: Sequence[str] | None = None) -> pa.Table:
        """Return vectors by raw id; see `recsys.serving.embeddings.embeddings`."""
        _check_not_forked()
        keep = _texts("keep", keep, "'user_id'")
        with _in_words_of_python(), nullcontext() if data is None else _as_files(data) as paths:
            table = table_of(self._run, name, keep)
            if table is not None:
                vectors = open_table(self._run, self._opened.source.marker, self._opened.world, table, paths)
                return pa.concat_tables(vectors.tables(0, vectors.num_ids))
            return self._given(rows_of_tower(self._run, name, paths, keep), lambda: vectors_of_tower(name))

    def _scored(self, data: Data, role: str, keep: Sequence[str] | None, results_of: Callable[[], Results]) -> pa.Table:
        _check_not_forked()
        keep = _texts("keep", keep, "'user_id'")
        with _as_files(data) as paths, _in_words_of_python():
            return self._given(self._run.given(role, paths, keep), results_of)

    def _given(self, given: Given, results_of: Callable[[], Results]) -> pa.Table:
        opened, inputs = self._opened, self._opened.beside([], given)
        loader, kept = inputs.loader(given.role), kept_columns(inputs, given)
        return pa.concat_tables(scored(opened, loader, kept, results_of()))


def _in_words_of_python() -> AbstractContextManager[None]:
    """Make errors name options of commands and DATA as the arguments of Python are named."""
    names = {"--trust-code": "trust_code=True", "--data": "`data`", "--keep": "`keep`"}
    return in_words({f"config key '{Given.key}'": Given.key, **names})


def _check_alone() -> None:
    """Refuse a process that is one of several ranks: each would get only part of the rows, or wait for the others.

    Raises:
        UserError: names the launcher or process group that this process belongs to.
    """
    if rank := rank_of_several():
        raise UserError(
            f"a run can be opened in one process only, but a launcher started this one as {rank} (the "
            f"environment variables RANK and WORLD_SIZE); start it without a launcher, or give the launcher a "
            f"command: torchrun … -m recsys predict RUN DATA OUT"
        )
    _check_not_forked()
    if not _worlds and dist.is_initialized():
        raise UserError(
            "this process is in a process group of torch.distributed, but an open run needs its own; open it in "
            "a separate process, or call torch.distributed.destroy_process_group() first"
        )


def _check_not_forked() -> None:
    """Refuse a process that is a fork of one with an open run: it would wait for threads that a fork does not copy.

    Raises:
        UserError: says how to start a process that may open a run.
    """
    if _worlds and os.getpid() not in _worlds:
        raise UserError(
            "this process was forked from one that has a run open, and lacks its compute threads; open the run in "
            "spawned processes, by multiprocessing.get_context('spawn')"
        )


def _world(device: Device, num_threads: int | None) -> World:
    """Return a world of only this process, which lasts as long as the process; there is at most one.

    A number of threads applies to the whole process; the last run that sets it decides.

    Raises:
        UserError: it was made for another device.
    """
    if not _worlds:
        atexit.register(_open.close)
        _worlds[os.getpid()] = _open.enter_context(open_world(device, num_threads))
    elif num_threads is not None:
        torch.set_num_threads(num_threads)
    (world,) = _worlds.values()
    if device is not Device.auto and device.value != world.device.type:
        raise UserError(
            f"config key 'run.device' is {device.value}, but this process has a run open on {world.device.type}; open "
            f"it in a separate process"
        )
    return world


@contextmanager
def _as_files(data: Data) -> Iterator[str | list[str]]:
    """Yield paths of Parquet files with the data; tables are first written to a temporary folder."""
    if isinstance(data, str | Path):
        yield str(data)
    elif isinstance(data, list | tuple) and all(isinstance(path, str | Path) for path in data):
        yield [str(path) for path in data]
    else:
        try:
            table = as_table(dict(data) if isinstance(data, Mapping) else data)
        except ExportError as error:
            raise UserError(
                f"DATA is of type {type(data).__name__}, but must be paths, an Arrow table, a data frame or a mapping "
                f"of columns of the same length{_reason(data, error.__cause__)}"
            ) from error
        with tempfile.TemporaryDirectory() as folder:
            try:
                pq.write_table(_plain(table), Path(folder) / "rows.parquet", row_group_size=1 << 16)
            except (ValueError, pa.ArrowException) as error:
                raise UserError(
                    f"DATA has a column that Parquet cannot hold ({' '.join(str(error).split())})"
                ) from error
            file = f"{folder}/rows.parquet"
            columns = {f" (in {file})": "", f"the Parquet files of '{folder}'": "the columns given"}
            with in_words({**columns, f"'{file}'": Given.key}):
                yield folder


def _reason(data: Data, cause: BaseException | None) -> str:
    """Return why Arrow refuses a mapping or a data frame; for anything else, its type says it all."""
    if isinstance(cause, OverflowError):
        return ", numbers from 2**63 on as uint64 of NumPy or Arrow"
    if cause is None or not (isinstance(data, Mapping) or hasattr(type(data), "columns")):
        return ""
    return f" ({' '.join('; '.join(map(str, cause.args)).split())[:300]})"


def _plain(table: pa.Table) -> pa.Table:
    """Return a table with types that pyarrow writes to Parquet: no run-end encoding, views or nulls in dictionaries."""
    for place, field in enumerate(table.schema):
        if pa.types.is_run_end_encoded(field.type):
            chunks = [pc.run_end_decode(chunk) for chunk in table.column(place).chunks]
            table = table.set_column(place, field.name, pa.chunked_array(chunks, field.type.value_type))
    table = table.cast(pa.schema([field.with_type(_rebuilt(field.type, _without_view)) for field in table.schema]))
    for place, field in enumerate(table.schema):
        if any(map(_has_null_entry, table.column(place).chunks)):
            listed = map(_listed, table.column(place).chunks)
            chunks = [chunk.cast(_rebuilt(chunk.type, _without_dictionary)) for chunk in listed]
            table = table.set_column(place, field.with_type(chunks[0].type), pa.chunked_array(chunks))
    return table


def _listed(array: pa.Array) -> pa.Array:
    """Return views of lists as lists, since Arrow cannot cast the values of views."""
    return stored(array) if isinstance(array.type, _LIST_VIEWS) else array


def _has_null_entry(array: pa.Array) -> bool:
    """Return whether a null is among the entries of an array's dictionary, or of one inside lists or structs."""
    dtype = array.type
    if pa.types.is_dictionary(dtype):
        return bool(array.dictionary.null_count)
    if pa.types.is_struct(dtype):
        return any(_has_null_entry(array.field(place)) for place in range(dtype.num_fields))
    is_list = pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype)
    return (is_list or isinstance(dtype, _LIST_VIEWS)) and _has_null_entry(array.values)


def _rebuilt(dtype: pa.DataType, replacement: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type with `replacement` applied to each type inside it, and then to itself."""
    if pa.types.is_dictionary(dtype):
        dtype = pa.dictionary(dtype.index_type, _rebuilt(dtype.value_type, replacement), dtype.ordered)
    elif pa.types.is_struct(dtype):
        dtype = pa.struct([field.with_type(_rebuilt(field.type, replacement)) for field in dtype])
    elif pa.types.is_fixed_size_list(dtype):
        dtype = pa.list_(_rebuilt(dtype.value_type, replacement), dtype.list_size)
    elif pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        dtype = (pa.list_ if pa.types.is_list(dtype) else pa.large_list)(_rebuilt(dtype.value_type, replacement))
    return replacement(dtype)


def _without_view(dtype: pa.DataType) -> pa.DataType:
    """Return a type without views, such as texts of Polars, which Arrow does not write in structs and dictionaries."""
    return {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(dtype, dtype)


def _without_dictionary(dtype: pa.DataType) -> pa.DataType:
    return dtype.value_type if pa.types.is_dictionary(dtype) else dtype
