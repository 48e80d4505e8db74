"""Prediction of a rank's memory by phase and kind: arithmetic on a plan and on facts of the model and the data.

Nothing here allocates tensors or communicates, so it can be called dozens of times.
"""

from collections.abc import Iterable, Mapping

import torch

from recsys.config import Config, DataType
from recsys.config.features import evaluated_rows
from recsys.memory.facts import DataFacts, DenseFacts, RankMemory
from recsys.memory.libraries import library_bytes
from recsys.memory.lookups import Lookups
from recsys.memory.ranking import items_bytes, ranking_peak
from recsys.memory.tensors import Bytes
from recsys.runtime.environment import HEAP_BLOCK_BYTES
from recsys.runtime.machine import Topology
from recsys.runtime.threads import batches_ahead, decode_in_processes, decoding_threads
from recsys.step.dense_shards import shards_dense
from recsys.tables.bytes import CHUNK_BYTES, TableBytes, cache_bytes, published_bytes, rank_tables, shard_bytes
from recsys.tables.lookup import is_local
from recsys.tables.spec import CHUNK_ELEMENTS, Shard

# What a process takes before it holds any of our tensors. On CPU a run measures its own, and subtracts it from peaks.
CUDA_CONTEXT_BYTES = 700 << 20  # of a GPU: the context, kernels of torch and FBGEMM
NCCL_BYTES = 1 << 30  # of a GPU: the channels' buffers of one communicator among many ranks
ALLOCATOR_SHARE = 0.05  # of the other device memory: what CUDA's caching allocator holds beyond what lives
HOST_PROCESS_BYTES = {"cuda": 3 << 30, "cpu": 450 << 20}  # interpreter and libraries
_TABLE_MODULE_BYTES = 1 << 19  # of a table on a rank: its modules, and what autograd and FBGEMM keep for it
_MODULES_BYTES = 8 << 20  # of all tables, at most: 200 tables took 11 MiB, and next to none in steps
# If processes decode: bytes of the one that forks them, by whether torch is built for CUDA, and of each fork.
_FORKING_BYTES, _FORKED_BYTES = {False: 176 << 20, True: 301 << 20}, 46 << 20
# If blocks of many sizes come and go, there is one hole for every two live blocks (the fifty-percent rule; Knuth, The
# Art of Computer Programming, 2.5), or somewhat more in random runs. Steps leave them in the training thread's heap.
_HOLES = 0.8
_GLOO_THREADS = 2  # of a group
_FILL_BYTES, _FILLED_BYTES = 4 << 20, 25  # temporaries of initial weights: on CPU, and on GPUs for each element
_SYNCHRONISED_BYTES = 250 << 20  # at once, by DistributedDataParallel when it is made
# One is trained, the ids of one are exchanged, one is copied. Without exchanges there are two, on CPUs one.
_BATCHES_IN_PIPELINE, _BATCHES_ALONE = 3, 2
_QUEUED_BATCHES = 2  # besides data.prefetch_batches: one that the loader's thread makes, one that is trained
_WIRE_ID_BYTES = 8  # FBGEMM looks up 64-bit ids
_SORT_BYTES = {"cuda": 36, "cpu": 16}  # for each id looked up: FBGEMM's backward sorts ids with their rows
_CACHED_ROW_LIST_BYTES = 16  # of host memory for each row of a cached table: Python lists, while FBGEMM sets it up
_RESULT_BYTES = 8  # of an evaluated row, for each binary label; and for one label again, while all are joined or sent


def predict(
    config: Config, data: DataFacts, dense: DenseFacts, topology: Topology, shards: Iterable[Shard]
) -> list[RankMemory]:
    """Return the memory of every rank."""
    by_rank: dict[int, list[Shard]] = {rank: [] for rank in range(topology.world_size)}
    for shard in shards:
        by_rank[shard.rank].append(shard)
    return [_Rank(config, data, dense, topology, own, rank).memory() for rank, own in by_rank.items()]


class _Rank:
    """One rank's memory under construction; see `predict`."""

    def __init__(
        self, config: Config, data: DataFacts, dense: DenseFacts, topology: Topology, shards: list[Shard], rank: int
    ) -> None:
        data = data.of_large_batches()
        self._config, self._data, self._dense, self._topology = config, data, dense, topology
        self._shards, self._rank, self._decoding = shards, rank, data.decoding[rank]
        self._process = topology.start_bytes or HOST_PROCESS_BYTES[topology.device.type]
        sharding_types = {shard.table: shard.sharding_type for shard in shards}
        self._looks_up_alone = topology.on_gpu and is_local(config, sharding_types, topology.world_size, on_gpu=True)
        self._batches_in_pipeline = _BATCHES_ALONE if self._looks_up_alone else _BATCHES_IN_PIPELINE
        if config.debug or not topology.on_gpu:
            self._batches_in_pipeline = 1
        self._unread_batches = 0 if config.train.check_every_step else 1  # trained, and kept until its sums are read
        # A ranker of so few weights, as a logistic regression is, multiplies no matrices.
        multiplies = config.model.needs().item_id is not None or dense.parameter_bytes >= 1 << 12 or topology.on_gpu
        self._blas_bytes = topology.blas_bytes if multiplies else 0
        self._decoding_threads = decoding_threads(config.data.num_threads, topology.device, topology.local_world_size)
        self._decoding_processes = 0
        if decode_in_processes(config.data.processes, self._decoding_threads, topology.device):
            self._decoding_processes = self._decoding_threads
        self._tables = rank_tables(config, shards, rank)
        self._table_kinds = sum(self._tables.values(), TableBytes()) + cache_bytes(config, shards)
        # On a single rank, outputs of several sharding types are copied into one tensor; a single type needs no copy.
        self._copies_lookups = topology.world_size == 1 and len({shard.sharding_type for shard in shards}) > 1
        rows, self._lookups = dense.rows, Lookups(config, shards, topology.world_size, topology.on_gpu)
        self._eval_rows = evaluated_rows(config, topology.world_size, rows)
        self.pooled = self._lookups.pooled(rows, data.mean_ids)
        self.pooled_gradient = 4 * self.pooled // self._lookups.number_bytes  # FP32, until it is handed on
        self.ids = rows * sum(data.mean_ids.values())
        self.batch_bytes = data.batch_bytes(config, rows, data.mean_ids)
        self.looked_up, self.reduced, self.exchanged_ids = self._lookups.of_ranks(rows, data.mean_ids)
        self.looked_up_gradient = 4 * self.looked_up // self._lookups.given_bytes  # FP32, or sent and received

    def memory(self) -> RankMemory:
        moments = {"init": self._init(), "step": self._step(), "save": self._save()}
        if self._data.eval_rows:
            moments["evaluation"] = self._evaluation()
        for phase, (_, host) in moments.items():
            when = "init" if phase == "init" else "later"
            host["libraries"] = self._libraries(when) + min(_MODULES_BYTES, _TABLE_MODULE_BYTES * len(self._tables))
            if when == "later":
                host["id_statistics"], host["heap"] = self._data.statistics_bytes, self._heaps(phase == "evaluation")
            host["vocabularies"] = self._data.vocabulary_bytes
        phases = {phase: self._placed(*kinds) for phase, kinds in moments.items()}
        return RankMemory(self._rank, self._tables, {**self._counting(), **phases})

    def _counting(self) -> dict[str, dict[str, Bytes]]:
        """Return the phase in which vocabularies are counted, if there is one; it comes before the tables."""
        counting = self._data.counting_bytes(self._rank, self._topology.world_size)
        if not counting:
            return {}
        host = counting | {
            "libraries": self._libraries("init"),
            "process": self._process,
        }
        return {"vocabularies": {"device": {}, "host": _present(host)}}

    def _libraries(self, when: str) -> int:
        # Evaluations always decode in threads of this process.
        num_threads = 0 if self._decoding_processes and not self._data.eval_rows else self._decoding_threads
        return library_bytes(self._config, when, self._rank, num_threads, self._topology.on_gpu)

    def _heaps(self, in_evaluation: bool) -> int:
        """Return the bytes of heap on CPU besides live blocks: holes in the training thread's heap, and in gloo's."""
        if self._topology.on_gpu:
            return 0
        copies, holes = self._gloo_copies(), 0
        ranks_items = self._config.model.needs().item_id is not None
        # An evaluation frees each layer's neighbouring blocks together. But ranking items allocates and frees many
        # small blocks, so the holes of steps stay.
        if not in_evaluation or ranks_items:
            looked_up = self.pooled if self.pooled < HEAP_BLOCK_BYTES else 0
            holes = int(_HOLES * (self._dense.heap_bytes + looked_up))
        return holes + (_GLOO_THREADS * copies if copies < HEAP_BLOCK_BYTES else 0)

    def _placed(self, device: Bytes, host: Bytes) -> dict[str, Bytes]:
        """Return a moment's bytes by kind in device and host memory, with the kinds that are always there added."""
        tables, on_gpu = self._table_kinds, self._topology.on_gpu
        device = {
            "table_weight": tables.device_weight,
            "table_optimizer": tables.device_optimizer,
            "table_cache": tables.device_cache,
            "table_cache_metadata": tables.device_metadata,
            "dense_parameter": self._dense.parameter_bytes,
            "dense_buffer": self._dense.buffer_bytes,
            **device,
        }
        host = {"table_weight": tables.host_weight, "table_optimizer": tables.host_optimizer, **host}
        if on_gpu:
            device["allocator_reserve"] = int(ALLOCATOR_SHARE * sum(device.values()))
            device["context"] = CUDA_CONTEXT_BYTES + (NCCL_BYTES if self._topology.world_size > 1 else 0)
        else:
            host = {kind: device.get(kind, 0) + host.get(kind, 0) for kind in {**device, **host}}
            device = {}
        host["process"] = self._process
        return {"device": _present(device), "host": _present(host)}

    def _trained(self) -> Bytes:
        """Return the bytes that are there from the first step on, besides tables and parameters."""
        return {
            "dense_gradient": self._dense.gradient_bytes,  # on a single rank, until the next step begins
            "dense_optimizer": self._dense.optimizer_bytes[self._rank],
            "blas_workspaces": self._blas_bytes,
            "touched_rows": sum(shard.size[0] for shard in self._shards) if self._config.train.publish.dir else 0,
        }

    def _buckets(self) -> int:
        """Return the bytes of gradients that are always there: with several ranks they are views of send buffers."""
        return self._dense.gradient_bytes if self._topology.world_size > 1 else 0

    def _loader(self, in_evaluation: bool = False) -> Bytes:
        data, topology = self._config.data, self._topology
        ahead = batches_ahead(data.prefetch_batches, topology.device)
        queued = ahead + _QUEUED_BATCHES if self._decoding_threads and ahead else 1
        queued += self._batches_in_pipeline - 1 + (0 if topology.on_gpu else self._unread_batches)
        # Memory of training batches is kept during an evaluation.
        batches = [(queued, self.batch_bytes), *([self._evaluated_batches(queued)] if in_evaluation else [])]
        if topology.on_gpu:
            batches = [(number, 1 << max(12, (size - 1).bit_length())) for number, size in batches]  # as CUDA locks it
        train = self._config.train
        follows_one = train.eval_every_steps is not None or train.eval_every_epochs is not None
        of_evaluation = self._decoding.eval_later if in_evaluation else self._decoding.eval_kept * follows_one
        eval_windows = self._data.eval_window_bytes if in_evaluation else 0  # freed after it
        processes, decoding = self._decoding_processes, self._decoding
        with_cuda = topology.on_gpu or torch.version.cuda is not None
        in_processes = _FORKING_BYTES[with_cuda] + processes * _FORKED_BYTES + max(decoding.first, decoding.later)
        return {
            "loader_windows": self._data.window_bytes + eval_windows,
            "loader_decoding": of_evaluation + (0 if processes else decoding.later),
            "loader_processes": in_processes + self._data.vocabulary_bytes if processes else 0,
            "loader_batches": sum(number * size for number, size in batches),
        }

    def _evaluated_batches(self, queued: int) -> tuple[int, int]:
        """Return how many evaluation batches exist at once, `queued` or fewer, and the bytes of one."""
        rows = self._eval_rows
        sizes = (self._data.batch_bytes(self._config, rows, means) for means in self._data.evaluated_ids(rows))
        return min(queued, -(-max(self._data.eval_rows.values()) // rows)), max(sizes)

    def _init(self) -> tuple[Bytes, Bytes]:
        elements = max((shard.size[0] * shard.size[1] for shard in self._shards), default=0)
        on_gpu = _FILLED_BYTES * min(elements, CHUNK_ELEMENTS["cuda"])
        fill = {"fill_temporaries": on_gpu if self._topology.on_gpu else _FILL_BYTES}
        cached = sum(shard.size[0] for shard in self._shards if shard.is_cached)
        tables = self._config.tables
        in_fp8 = [shard for shard in self._shards if tables[shard.table].data_type is DataType.FP8]
        widest = max((4 * shard.size[0] * shard.size[1] for shard in in_fp8), default=0)
        # Parameters are moved into one buffer after they are made.
        moved = self._dense.parameter_bytes if shards_dense(self._config, self._topology.world_size) else 0
        kept = {"fp8_temporaries": widest, "dense_gradient": self._buckets(), "dense_copies": moved}
        device = {**fill, **kept, "collective_copies": self._replica_copies()}
        return device, {"cache_lists": cached * _CACHED_ROW_LIST_BYTES}

    def _replica_copies(self) -> int:
        """Return the bytes that DistributedDataParallel copies to synchronise replicated tables, less those of their
        optimizer state, which is counted already but made later."""
        if self._topology.world_size == 1:
            return 0
        replicas = [shard for shard in self._shards if shard.is_replicated]
        sizes = [shard_bytes(self._config, s.table, *s.size, s.compute_kernel) for s in replicas]
        weights = sum(size.weight for size in sizes)
        return max(0, min(weights, _SYNCHRONISED_BYTES) - sum(size.optimizer for size in sizes))

    def _step(self) -> tuple[Bytes, Bytes]:
        train = self._config.train
        goes_on = train.checkpoint_every_steps or train.early_stop.metric  # after a save
        copies = self._background_copies() if goes_on else 0
        in_steps, loader = self._in_steps(), self._loader()
        later = loader["loader_windows"] + loader["loader_decoding"] + sum(in_steps.values())
        later += self._libraries("later") - self._libraries("init")  # loaded by the first step
        later += self._heaps(in_evaluation=False) + self._data.statistics_bytes
        later += 0 if self._topology.on_gpu else self._blas_bytes
        if not self._decoding_processes:  # otherwise it is in these
            loader["loader_decoding"] += max(0, self._decoding.first - later)
        host = {"offloaded_activations": self._dense.host_bytes, "save_copies": copies}
        return {**self._trained(), **in_steps}, {**loader, **host}

    def _in_steps(self) -> Bytes:
        """Return the bytes of a step's temporaries at its highest moment."""
        dense, ranks = self._dense, self._topology.world_size
        copies, buckets = self._gloo_copies(), self._buckets()
        sort = self.exchanged_ids * _SORT_BYTES[self._topology.device.type]
        # Ids of up to two batches, as sent to the ranks that look them up, and as received; or one rank's, reordered.
        sent_ids = min(2, self._batches_in_pipeline) * (self.ids + self.exchanged_ids)
        in_flight = {
            "collective_ids": int((self.ids if self._looks_up_alone else sent_ids) * self._data.id_bytes),
            "lookup_ids": self.exchanged_ids * _WIRE_ID_BYTES,
        }
        if self._topology.on_gpu:
            in_flight["batches"] = (self._batches_in_pipeline + self._unread_batches) * self.batch_bytes
        received = self.pooled if ranks > 1 else 0
        stays = self._copies_lookups and self._config.train.in_micro_batches  # until the last one is done
        # A single GPU without micro-batches uses one FP32 tensor for looked-up vectors and for the model's input.
        in_fp32 = self.pooled_gradient == self.pooled
        joined = not (self._topology.on_gpu and in_fp32) or ranks > 1 or self._config.train.in_micro_batches
        given = {"looked_up": self.looked_up if stays else 0}
        moments = [
            {"pooled": received, "looked_up": self.looked_up, "collective_copies": copies, "dense_gradient": buckets},
            {"pooled": self.pooled, "activations": dense.step_bytes, "dense_gradient": dense.gradient_bytes, **given},
            {
                **given,
                "pooled": self.pooled,
                "pooled_gradient": self.pooled_gradient + (self.pooled if joined else 0),
                "looked_up_gradient": self.looked_up_gradient if ranks > 1 else 0,
                "collective_copies": copies,
                "kernel_temporaries": sort,
                "dense_gradient": dense.gradient_bytes,
            },
            {
                **given,
                "pooled": self.pooled,
                "pooled_gradient": self.pooled_gradient + self.pooled,
                "replicated_gradient": self._lookups.replicated_gradient(dense.rows, self._data.mean_ids),
                "dense_gradient": dense.gradient_bytes,
            },
            *self._updates(sort),
        ]
        highest = max(moments, key=lambda kinds: sum(kinds.values()))
        return {**in_flight, **highest}

    def _updates(self, sort: int) -> list[Bytes]:
        """Return the temporaries of updates: of tables by FBGEMM (`sort` bytes) or by torch, and of the dense part."""
        # Gradients of vectors are held as received, in FP32 if they came in FP16, and times the weights of the step's
        # rows. Without weights the factor is 1, and FP32 needs no second copy.
        received, alone = self._lookups.number_bytes / 4, self._topology.world_size == 1
        held = int((received + 2 - (received == 1)) * (self.pooled_gradient if alone else self.looked_up_gradient))
        dense = {"dense_gradient": self._dense.gradient_bytes}
        tables = {"pooled_gradient" if alone else "looked_up_gradient": held, **dense}
        return [
            {**tables, "kernel_temporaries": sort},
            {**tables, "update_temporaries": self._lookups.update_temporaries(self._dense.rows, self._data.mean_ids)},
            {**dense, "update_temporaries": self._dense.update_bytes},
        ]

    def _gloo_copies(self) -> int:
        """Return the bytes of gloo's buffers for reducing and gathering: a copy of everything that is reduced."""
        return 0 if self._topology.on_gpu or self._topology.world_size == 1 else self.reduced

    def _evaluation(self) -> tuple[Bytes, Bytes]:
        rows = max(self._data.eval_rows.values(), default=0)
        kinds = zip(self._data.evaluated_ids(self._eval_rows), self._dense.eval_bytes, strict=True)
        moments = [self._in_evaluation(*kind) for kind in kinds]
        if self._config.model.needs().item_id is not None:
            ranking = ranking_peak(self._config, self._data, self._eval_rows, self._topology)
            moments.append({"batches": moments[0]["batches"], "activations": ranking})
        in_steps = max(moments, key=lambda sizes: sum(sizes.values()))
        loader = self._loader(in_evaluation=True)
        later = self._decoding.eval_later + self._data.eval_window_bytes + sum(in_steps.values())
        loader["loader_decoding"] += max(0, self._decoding.eval_first - later)
        binary = sum(label.loss.is_binary for label in self._config.labels().values())
        results = rows * _RESULT_BYTES * (binary + 1 if binary else 0)
        # The last checkpoint may still be written during the last evaluation.
        return {**self._trained(), **in_steps}, {**loader, "results": results, "save_copies": self._background_copies()}

    def _in_evaluation(self, means: Mapping[str, float], eval_bytes: int) -> Bytes:
        """Return the temporaries of an evaluation batch, whose rows have `means` ids of each feature."""
        rows, in_flight = self._eval_rows, self._batches_in_pipeline if self._topology.on_gpu else 0
        looked_up, _, exchanged_ids = self._lookups.of_ranks(rows, means)
        apart = self._copies_lookups or self._topology.world_size > 1
        return {
            "batches": in_flight * self._data.batch_bytes(self._config, rows, means),
            "lookup_ids": exchanged_ids * (_WIRE_ID_BYTES + 2 * self._data.id_bytes),
            "looked_up": looked_up if apart else 0,  # otherwise it is the same tensor as `pooled`
            "pooled": self._lookups.pooled(rows, means),
            "activations": eval_bytes + items_bytes(self._config, self._data, self._topology),
        }

    def _save(self) -> tuple[Bytes, Bytes]:
        copies = self._background_copies() or self._written_copies()
        published = published_bytes(self._config, self._rank, self._topology.world_size) - copies  # at another moment
        return self._trained(), {**self._loader(), "save_copies": copies, "published_rows": max(0, published)}

    def _background_copies(self) -> int:
        """Return the bytes of tables, dense parameters and their state that are copied for a save in the background."""
        if not self._config.train.async_checkpoints:
            return 0
        dense = self._dense.parameter_bytes + self._dense.buffer_bytes + self._dense.optimizer_bytes[self._rank]
        return dense + sum(table.weight + table.optimizer for table in self._tables.values())

    def _written_copies(self) -> int:
        """Return the bytes that are copied from a GPU to be written: two chunks of rows at once."""
        if not self._topology.on_gpu:
            return 0
        sizes = (shard_bytes(self._config, s.table, *s.size, s.compute_kernel) for s in self._shards)
        return min(2 * CHUNK_BYTES, sum(size.weight + size.optimizer for size in sizes))


def _present(kinds: Bytes) -> Bytes:
    return {kind: size for kind, size in kinds.items() if size}
