"""Export of a finished run to a self-contained folder: tables, dense part, mappings of ids, and a program to score.

manifest.json describes the folder (docs/serving.md); `score.py` in it reads it with numpy, pyarrow and onnxruntime.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa

from recsys.checkpoint import FOOTERS, Source, verify_checkpoint
from recsys.checkpoint.tensors import TABLES
from recsys.config import Config, IdMappingType, TableConfig
from recsys.config.choices import Device, Route
from recsys.config.experts import experts_with
from recsys.config.features import averaged_features, dims_of, float_columns, float_features, with_experts
from recsys.data.checks import has_text_ids
from recsys.data.decode import SegmentReader
from recsys.data.footer_cache import kept_schema
from recsys.data.inputs import Inputs, open_inputs
from recsys.data.spec import FloatColumn
from recsys.data.wanted import columns_of, item_column, needed_columns, role_features, with_separators
from recsys.errors import UserError
from recsys.ids import ROUTE_SEED
from recsys.runtime.files import replace_file
from recsys.runtime.folders import whole_folder
from recsys.runtime.logs import quiet_libraries
from recsys.runtime.signals import ending_orderly
from recsys.runtime.versions import installed_versions
from recsys.runtime.world import World, open_world
from recsys.serving.export_dense import (
    DenseExport,
    GraphInputs,
    GraphSpec,
    check_packages,
    load_dense,
    package_versions,
    write_program,
)
from recsys.serving.export_tables import Files, write_index, write_kept, write_table
from recsys.serving.finished import Finished
from recsys.serving.score import FORMAT, MANIFEST, Scorer, checksum, sha256
from recsys.training.learning import learn_facts

_PROGRAMS = ("score.py", "serve.py", "follow.py")  # copied as they are


def export(run: Finished, out: Path, tables: str = "fp32") -> int:
    """Export a finished run to a folder; return the exit status, 0.

    The folder appears once all is written and compared with the run. Memory does not grow with the tables.

    Args:
        out: a folder that does not exist, or is empty.
        tables: encoding of rows, a TableEncoding's name; a table with `quantize` is written in that code.

    Raises:
        UserError: the folder is not empty, the checkpoint is corrupt, a package is missing, or torch cannot export the
            model.
    """
    check_packages()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"'{out}' already exists; name another folder, or remove it")
    quiet_libraries()
    with open_world(Device.cpu, run.config.run.num_threads) as world:
        if world.world_size > 1:
            raise UserError("recsys export runs one process; start it without torchrun")
        source = Source(run.checkpoint, verify_checkpoint(run.checkpoint, world), init=None)
        with ending_orderly(), whole_folder(out) as folder:
            _Export(run, source, world, Files(folder), tables).write()
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: step {source.marker.state.step} of {run.run_dir}, {size:,} bytes", flush=True)
    return 0


class _Export:
    """An export in progress."""

    def __init__(self, run: Finished, source: Source, world: World, files: Files, encoding: str) -> None:
        self._run, self._source, self._files, self._encoding = run, source, files, encoding
        needs, footers = run.config.model.needs(), run.run_dir / FOOTERS
        self._has_items = needs.item_id is not None and run.config.data.items is not None
        roles = ["items"] if self._has_items else []
        inputs = open_inputs(run.config, world, known=footers, roles=roles)
        self._inputs: Inputs = learn_facts(inputs, run.run_dir, source)
        self._config: Config = self._inputs.config
        self._schema = kept_schema(footers / "train.footers")

    def write(self) -> None:
        """Write all files, the manifest last."""
        for name in _PROGRAMS:
            shutil.copyfile(Path(__file__).with_name(name), self._files.folder / name)
        state, config = self._source.marker.state, self._config
        manifest: dict[str, Any] = {
            "made": {
                "run": self._run.run_dir.name,
                "checkpoint": self._source.path.name,
                "step": state.step,
                "versions": {**installed_versions(), **package_versions()},
            },
            "model": config.model.name,
            "features": self._features(),
            "floats": float_features(config),
            "texts": [field.name for field in self._schema if pa.types.is_string(field.type)],
            "tables": {name: self._table(name, table) for name, table in config.tables.items()},
            **self._dense(),
        }
        self._write_manifest(manifest)
        if self._has_items:
            manifest["items"] = self._items()
        # Checksums of the files that score.py does not read, and so does not verify.
        beside = [path for name in (*_PROGRAMS, "dense.pt2") if (path := self._files.folder / name).exists()]
        manifest["beside"] = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in beside}
        self._write_manifest(manifest)

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        content = {"format": FORMAT, **manifest, "files": self._files.entries}
        content["sha256"] = checksum(content)
        replace_file(self._files.folder / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def _features(self) -> list[dict[str, Any]]:
        """Return the manifest's entries of the features, in the order of the config."""
        config, spec = self._config, self._inputs.spec("rows")
        floats = {column.name: _float_entry(column) for column in spec.floats}
        averaged, unpooled = averaged_features(config), config.unpooled_features()
        dtypes = dict(zip(self._schema.names, self._schema.types, strict=True))
        entries = []
        for column in spec.ids:
            feature = config.features[column.name]
            entry: dict[str, Any] = {"name": column.name, "type": "id", "table": feature.table}
            # What is hidden is null in all rows, as a cross of no columns is.
            columns = [] if column.column is None else columns_of(config, column.name)
            entry |= {"column": columns[0]} if len(columns) == 1 else {"column": None, "cross": columns}
            entry |= {} if feature.separator is None else {"separator": feature.separator, "lists": True}
            entry |= {"pooling": "none" if column.name in unpooled else "mean" if column.name in averaged else "sum"}
            entry |= {"averaged_over": averaged.get(column.name)}
            entry |= {"nulls": column.null.name, "max_length": column.max_length, "keep": column.keep.name}
            dtype = dtypes.get(column.column, pa.null())  # null for a column that is made of others
            if not pa.types.is_null(dtype):
                entry["lists"] = pa.types.is_nested(dtype)
            entry |= {"weights": column.weights, "boundaries": column.boundaries and list(column.boundaries)}
            entry |= {"route": _route_entry(config, feature.table or "")}
            entries.append(entry)
        by_name = {**floats, **{entry["name"]: entry for entry in entries}}
        return [by_name[name] for name in config.features]

    def _table(self, name: str, table: TableConfig) -> dict[str, Any]:
        """Write a table and its mapping of ids; return their entry in the manifest."""
        encoding = table.quantize.name.lower() if table.quantize else self._encoding
        entry = self._source.marker.tensors[TABLES + name]
        vectors = write_table(self._files, name, self._source.path, entry, encoding)
        text = has_text_ids(self._config, name, self._schema)
        return {"mapping": self._mapping(name, table), "text": text, "vectors": vectors}

    def _mapping(self, name: str, table: TableConfig) -> dict[str, Any]:
        vocabulary, kept = self._inputs.facts.of_table(name) if self._inputs.facts else (None, None)
        entry: dict[str, Any] = {"type": table.mapping.name, "seed": table.hash_seed}
        entry["rows"] = table.num_embeddings if kept is None else kept.num_before
        if table.mapping is IdMappingType.hash:
            entry["num_hashes"] = table.num_hashes
        if table.mapping is IdMappingType.quotient_remainder:
            entry["num_ids"] = table.num_ids
        if table.mapping is IdMappingType.vocabulary and vocabulary is not None:
            index = write_index(self._files, f"mappings/{name}.arrow", vocabulary, table.hash_seed)
            entry |= {"num_ids": len(vocabulary), "num_buckets": table.num_buckets, "index": index}
        return entry if kept is None else {**entry, "kept": write_kept(self._files, name, kept)}

    def _dense(self) -> dict[str, Any]:
        """Write the graphs and weights of the dense part; return their entries in the manifest."""
        config, needs = self._config, self._config.model.needs()
        model = load_dense(config, self._source)
        dims = dims_of(config)
        weighted = self._inputs.spec("rows").weighted
        sequences = {name: config.features[name].max_length for name in config.unpooled_features()}
        inputs = GraphInputs(dims, len(float_columns(config)), sequences, weighted)
        dense = DenseExport(self._files, model, inputs, config.precision.dense_int8)
        weights = {} if config.precision.dense_int8 else {"weights": dense.write_weights()}
        features = role_features(config, "rows")
        graphs = [GraphSpec("score", "dense.onnx", features, *dense.predictions())]
        if needs.item_id is not None:
            of_items = with_experts(config, needs.item_features)
            of_users = [name for name in features if name not in of_items]
            # These are copies: if the model returns a vector unchanged, its input would get the name of the output.
            graphs.append(GraphSpec("user", "user.onnx", of_users, ["user"], lambda outputs: [outputs[0].clone()]))
            graphs.append(GraphSpec("item", "item.onnx", of_items, ["item"], lambda outputs: [outputs[1].clone()]))
        entries = {}
        for graph in graphs:
            program = dense.write_graph(graph)
            if graph.name == "score" and weights:
                program.example_inputs = None  # which torch would write as a pickle
                write_program(program, self._files.folder / "dense.pt2")
            entries[graph.name] = {"file": graph.file, "features": graph.features, "outputs": graph.outputs}
        return {**weights, "graphs": entries}

    def _items(self) -> dict[str, Any]:
        """Write ids and vectors of the items; return their entry in the manifest."""
        config, corpus = self._config, self._inputs.corpus
        assert corpus is not None
        reader = SegmentReader(self._inputs.datasets["items"], list(needed_columns(config, "items")))
        rows = self._files.parquet("items/rows.parquet", reader.tables())
        vectors = Scorer(self._files.folder).vectors_of_items(self._files.folder / rows)
        dim = config.model.needs().vector_dim
        file = self._files.write("items/vectors.bin", vectors, always_verified=False)
        return {
            "rows": rows,
            "ids": self._files.arrow("items/ids.arrow", {item_column(config): corpus}),
            "index": write_index(self._files, "items/index.arrow", corpus, 0),
            "vectors": {"file": file, "encoding": "fp32", "rows": len(corpus), "columns": dim, "stride": 4 * dim},
            "seen": config.data.seen_column,
            "separators": {
                columns_of(config, n)[0]: config.features[n].separator for n in with_separators(config, "users")
            },
            "candidates": config.data.candidates_column,
        }


def _route_entry(config: Config, table: str) -> dict[str, Any] | None:
    """Return the entry in the manifest for the ids that a table is looked up for; None: all ids."""
    experts, names = experts_with(config, table) or (None, [])
    if experts is None:
        return None
    place = names.index(table)
    if experts.by is Route.hash:
        return {"experts": len(names), "active": experts.active, "place": place, "seed": ROUTE_SEED}
    return {"before": names[:place], "own": None if table == names[-1] else table}


def _float_entry(column: FloatColumn) -> dict[str, Any]:
    transform = column.transform
    entry = {"name": column.name, "type": "float", "column": column.column, "fill": column.fill, "dim": column.dim}
    if transform is None:
        return entry
    clip = None if transform.clip is None else list(transform.clip)
    return {**entry, "clip": clip, "log1p": transform.log1p, "mean": transform.mean, "std": transform.std}
