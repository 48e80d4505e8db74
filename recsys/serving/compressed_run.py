"""A compressed run, written as a run directory of its own: config, vocabularies, and one checkpoint."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pyarrow as pa
import torch

from recsys.checkpoint import FACTS, FOOTERS, facts_of, footers_of
from recsys.checkpoint.files import write_file
from recsys.checkpoint.state import Marker, aside_of, name_of
from recsys.checkpoint.tensor_files import SUFFIX, LocalShard, LocalTensor, read_tensors, write_tensors
from recsys.checkpoint.tensors import DENSE, TABLES, owner_of
from recsys.config import Config, IdMappingType, config_text
from recsys.config.meaning import meaning
from recsys.data.facts import Facts, kept_rows_file, unseen_runs_of, vocabulary_file
from recsys.errors import UserError
from recsys.ids import KeptRows
from recsys.models.projections import PROJECTIONS
from recsys.runtime.files import copy_files, make_folder, replace_file, sync
from recsys.runtime.run_lock import RunLock, beside_lock
from recsys.serving.neurons import narrower, without_neurons
from recsys.serving.trials import Compression, Pruning, Trials, sharding_by_id
from recsys.training.learning import facts_entries
from recsys.training.run_dir import MARKER

_UNFINISHED = ".unfinished"  # marks the folder of a run that is being written
_WRITTEN = ("logs", "distill-*", "config.yaml", "checkpoints", FACTS, FOOTERS, MARKER, "compression.*", "*.tmp")


def begin_folder(out: Path, lock: RunLock) -> None:
    """Make and lock the folder of a run that is to be written, and remove files of an interrupted attempt.

    Raises:
        UserError: it cannot be made, another process writes to it, or it holds other files.
    """
    make_folder(out)
    lock.take(out)
    if (out / _UNFINISHED).exists():
        for path in chain.from_iterable(map(out.glob, _WRITTEN)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if any(path.name != _UNFINISHED for path in beside_lock(out)):
        raise UserError(f"OUT: '{out}' is not empty; name another folder")
    (out / _UNFINISHED).touch()


def finish_folder(out: Path) -> None:
    """Mark a run and its reports as finished."""
    (out / _UNFINISHED).unlink()


def write_run(trials: Trials, compression: Compression, shared: dict[str, torch.Tensor], out: Path) -> None:
    """Write a compressed run, with the training state of the original; on one rank.

    Args:
        shared: `Trials.shared_vector` of each pruned table.
        out: a folder that holds nothing but reports.
    """
    path, marker = trials.source.path, trials.source.marker
    facts = _facts(trials, compression)
    model = narrower(trials.trained.model, trials.layers, compression.neurons)
    config = replace(_config(trials.trained, compression, facts, out), model=model)
    facts.save(out / FACTS)
    copy_files(footers_of(path), out / FOOTERS)
    tensors = {}
    for name, tensor in _read(path, marker):
        owner = owner_of(name)
        table, parameter = owner.removeprefix(TABLES), owner.removeprefix(DENSE)
        if owner.startswith(TABLES) and (pruning := compression.pruned.get(table)) is not None:
            tensor = _compacted(tensor, pruning, shared[table] if name == owner else None)
        if owner.startswith(DENSE):
            tensor = without_neurons(parameter, tensor, trials.layers, compression.neurons)
        tensors[name] = tensor
    _write(out, config, replace(marker, facts=facts_entries(facts, out)), tensors)
    (out / MARKER).touch()


def narrow_tables(out: Path, config: Config, widths: Mapping[str, int]) -> None:
    """Replace the checkpoint of a run of `write_run` by one with low-rank factors instead of tables.

    A table becomes the product of the projections of its rows on their principal directions (the eigenvectors of
    rows.T @ rows, largest first), and a matrix of the dense part with these directions. The optimizer's state of such a
    table is dropped.

    Args:
        config: of the run, with the new embedding_dim and projected_dim. widths: the new embedding_dim by table.
    """
    [path] = (out / "checkpoints").glob("step-*")
    marker = Marker.read(path)
    before = dict(_read(path, marker))
    narrowed = {TABLES + table for table in widths}
    after = {name: tensor for name, tensor in before.items() if owner_of(name) not in narrowed}
    for table, width in widths.items():
        rows, matrix = before[TABLES + table], f"{DENSE}{PROJECTIONS}.{table}.weight"
        vectors = rows.double()
        directions = torch.linalg.eigh(vectors.T @ vectors)[1].flip(1)[:, :width]
        after[TABLES + table] = (vectors @ directions).to(rows.dtype)
        wider = before[matrix].double() @ directions if matrix in before else directions
        after[matrix] = wider.float().contiguous()
    shutil.rmtree(path)
    _write(out, config, marker, after)


def _read(path: Path, marker: Marker) -> Iterator[tuple[str, torch.Tensor]]:
    for name, entry in marker.tensors.items():
        tensor = entry.empty()
        read_tensors(path, {name: entry}, {name: LocalTensor.of(tensor)})
        yield name, tensor


def _write(out: Path, config: Config, marker: Marker, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a run's config and one checkpoint."""
    replace_file(out / "config.yaml", config_text(config))
    folder = out / "checkpoints" / name_of(marker.state.step)
    aside = aside_of(folder)
    aside.mkdir(parents=True)
    local = {n: LocalTensor(tuple(t.shape), t.dtype, (LocalShard(t, (0,) * t.dim()),)) for n, t in tensors.items()}
    entries, file = write_tensors(aside / f"rank_0{SUFFIX}", local)
    files = {f"rank_0{SUFFIX}": file, "config.yaml": write_file(aside / "config.yaml", config_text(config).encode())}
    replace(marker, meaning=meaning(config), files=files, tensors=entries).write(aside)
    aside.rename(folder)
    sync(folder.parent)


def _config(config: Config, compression: Compression, facts: Facts, out: Path) -> Config:
    tables = {}
    for name, table in config.tables.items():
        code = compression.codes.get(name)
        if code is not None:  # quantised tables are looked up id by id
            table = replace(table, sharding_type=sharding_by_id(table), l2_all_rows=0.0)
        table = replace(table, quantize=code)
        if name in compression.pruned and name in facts.kept_rows:
            path = str(out / FACTS / kept_rows_file(name))
            table = replace(table, num_embeddings=facts.kept_rows[name].num_rows, kept_rows=path)
        elif name in compression.pruned:
            table = replace(table, vocabulary=str(out / FACTS / vocabulary_file(name)))
        tables[name] = table
    run = replace(config.run, dir=str(out), plan=None)
    precision = replace(config.precision, dense_int8=compression.dense_int8)
    return replace(config, tables=tables, run=run, precision=precision)


def _facts(trials: Trials, compression: Compression) -> Facts:
    """Return the facts of the compressed tables; a run that resumes counts again how often rows occur."""
    facts = trials.facts
    vocabularies, kept_rows = dict(facts.vocabularies), dict(facts.kept_rows)
    unseen_runs = unseen_runs_of(facts_of(trials.source.path), vocabularies)
    for name, pruning in compression.pruned.items():
        kept = pruning.kept.numpy()
        if trials.config.tables[name].mapping is IdMappingType.vocabulary:
            kept = kept[1 : 1 + len(vocabularies[name])]
            vocabularies[name] = vocabularies[name].filter(pa.array(kept))
            unseen_runs[name] = unseen_runs[name][kept[: len(unseen_runs[name])]]
        else:
            before = kept_rows.get(name)
            if before is not None:  # of which rows these were
                all_kept = before.kept.to_numpy(zero_copy_only=False).copy()
                all_kept[all_kept] = kept[:-1]
                kept = all_kept
            kept_rows[name] = KeptRows(pa.array(kept))
    return Facts(vocabularies, facts.floats, unseen_runs=unseen_runs, kept_rows=kept_rows)


def _compacted(tensor: torch.Tensor, pruning: Pruning, shared: torch.Tensor | None) -> torch.Tensor:
    """Return the kept rows, then the shared ones, [remaining rows, …]."""
    if shared is None:
        shared = (pruning.weights @ tensor.float().view(len(tensor), -1)).view(tensor.shape[1:])
    rows = shared.to(tensor.dtype).expand(pruning.num_shared, *tensor.shape[1:])
    return torch.cat([tensor[pruning.kept], rows])
