"""Settings that make a run fit into its memory: the cheapest first, and none that changes results unless allowed."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from recsys.config import Config
from recsys.config.choices import Saver
from recsys.config.features import rank_rows
from recsys.data.inputs import Inputs
from recsys.memory import DataFacts, DenseFacts, RankMemory, predict
from recsys.memory.data_facts import data_facts
from recsys.memory.levers import LEVERS, Change, roomier_caches, with_changes
from recsys.memory.trace import demands, rehearse
from recsys.runtime.machine import Topology
from recsys.step.build import build_tables
from recsys.tables.shard import plan_tables, shards_of
from recsys.tables.spec import Shard

MARGIN = 0.05  # of the memory, left free in a fitted run: predictions are not exact
_PASSES = 2
_OF_PROCESS = {"device": ("context",), "host": ("process", "libraries")}  # kinds that no setting makes smaller
_LEAST_BYTES, _LEAST_SHARE = 1 << 20, 0.02  # advice saves more than so many bytes, or such a share of what is missing


@dataclass(frozen=True)
class Fit:
    """A config that fits.

    Attributes:
        changes: made to the given config; before, after: what the fullest rank needs, in bytes.
        missing: bytes that are still missing, over all ranks.
    """

    config: Config
    changes: list[Change]
    before: int
    after: int
    missing: int


@dataclass(frozen=True)
class Offer:
    """The effect of a change of settings: bytes saved on the fullest rank, and bytes still missing over all ranks."""

    change: Change
    saved: int
    missing: int

    def as_json(self) -> dict[str, Any]:
        """Return the offer for programs."""
        return {"settings": str(self.change), "cost": self.change.cost, "saved_bytes": self.saved}


def planned_shards(config: Config, topology: Topology) -> list[Shard]:
    """Return the shards of the plan that a run would use; if no plan fits, of the one that needs least."""
    plan = plan_tables(build_tables(config), config, topology, must_fit=False)
    return list(shards_of(plan, config, topology.world_size))


class Fitter:
    """Tries changes of a config on the predicted memory of all ranks.

    Args:
        data: facts of the data for this config.
        topology: its memory is the budget, if there is one.
        seen_bytes: measured bytes of a CPU rank; if they exceed the prediction, all predictions are raised by as much.
        inputs: the data, from which facts for other windows are found; None if they cannot be read here.

    Attributes:
        config: the one before any change.
    """

    def __init__(
        self, config: Config, data: DataFacts, topology: Topology, seen_bytes: int = 0, inputs: Inputs | None = None
    ) -> None:
        self.config, self._topology, self._inputs = config, topology, inputs
        self._data = {config.data.window_mib: data}
        self._beyond = 0
        # Planning and tracing are slow, and most changes need only one of them again.
        self._shards: dict[str, list[Shard]] = {}
        self._dense: dict[str, DenseFacts] = {}
        if seen_bytes:
            self._beyond = max(0, seen_bytes - self.fullest(config))

    def fit(self, allowed: Sequence[Saver]) -> Fit:
        """Return the config with the cheapest changes that make it fit, or with those that bring it nearest."""
        chosen: list[Change] = []
        missing = self.missing(self.config)
        # Several passes, since the peak is in one phase: a lever may help only after another has lowered that phase.
        for lever in LEVERS * _PASSES:
            if not missing:
                break
            best, least = None, missing
            for change in lever(with_changes(self.config, chosen), self._topology):
                if change.saver is not None and change.saver not in allowed:
                    continue
                remaining = self.missing(with_changes(self.config, [*chosen, change]))
                if remaining < least:
                    best, least = change, remaining
                if not remaining:
                    break
            if best is not None:
                chosen = [earlier for earlier in chosen if not best.settings.keys() >= earlier.settings.keys()] + [best]
                missing = least
        # Changes that the others make needless are dropped, the dearest first.
        for change in reversed(chosen if not missing else []):
            others = [earlier for earlier in chosen if earlier is not change]
            if not self.missing(with_changes(self.config, others)):
                chosen = others
        if not missing:
            chosen = [self._roomiest(change, chosen) for change in chosen]
        config = with_changes(self.config, chosen)
        return Fit(config, chosen, self.fullest(self.config), self.fullest(config, self.config), missing)

    def _roomiest(self, change: Change, chosen: Sequence[Change]) -> Change:
        """Return one of the chosen changes with the largest caches that still fit."""
        others = [other for other in chosen if other is not change]
        for roomier in roomier_caches(self.config, change):
            if not self.missing(with_changes(self.config, [*others, roomier])):
                return roomier
        return change

    def offers(self, changes: Sequence[Change]) -> list[Offer]:
        """Return what each change saves in addition to the others, and the bytes still missing with all of them."""
        config = with_changes(self.config, changes)
        missing, offers = self.missing(config), []
        for change in changes:
            others = with_changes(self.config, [other for other in changes if other is not change])
            offers.append(Offer(change, max(0, self.fullest(others) - self.fullest(config, others)), missing))
        return offers

    def allowing(self, allowed: Sequence[Saver]) -> list[Saver]:
        """Return what memory.allow has to list for the run to fit; empty if nothing is enough."""
        fitted = self.fit(tuple(Saver))
        used = [change.saver for change in fitted.changes if change.saver is not None]
        return [] if fitted.missing else list(dict.fromkeys([*allowed, *used]))

    def advice(self, num: int = 3) -> list[Offer]:
        """Return the changes that help most: those that are enough, whether of one setting or of several at once.

        If none is enough, all changes together come first, then those that save most on their own.
        """
        fitted = self.fit(())
        if fitted.missing:
            fitted = self.fit(tuple(Saver))
        offers = [self._offer(_joined(fitted.changes))] if fitted.changes else []
        enough = bool(offers) and not fitted.missing
        single = []
        for lever in LEVERS:
            candidates = [self._offer(change) for change in lever(self.config, self._topology)]
            most = max((offer.saved for offer in candidates), default=0)
            # The weakest change that saves nearly as much as the strongest.
            single += [offer for offer in candidates if offer.saved > _LEAST_BYTES and offer.saved >= 0.95 * most][:1]
        single.sort(key=lambda offer: -offer.saved)
        offers += [offer for offer in single if not (enough and offer.missing)]
        worth = [offer for offer in offers if not offer.missing or offer.saved > _LEAST_SHARE * offer.missing]
        return list({str(offer.change): offer for offer in worth}.values())[:num]

    def _offer(self, change: Change) -> Offer:
        config = with_changes(self.config, [change])
        saved = self.fullest(self.config) - self.fullest(config, self.config)
        return Offer(change, saved, self.missing(config))

    def fullest(self, config: Config, before: Config | None = None) -> int:
        """Return the most bytes that a rank takes of the memory that is shorter: its GPU's or the host's.

        Args:
            before: decides which memory is shorter, since changes may move the shortage; default: `config`.
        """
        where = self._where(self._ranks(before or config))
        return max(rank.peak(where)[0] for rank in self._ranks(config))

    def shortage(self, config: Config) -> str:
        """Return in words how much the fullest rank takes of the memory that is shorter, and how much it has."""
        where = self._where(self._ranks(config))
        size, available = (
            f"{num_bytes / 2**20:,.0f} MiB" for num_bytes in (self.fullest(config), self._available(where))
        )
        return f"{size} of {available} {'on its GPU' if where == 'device' else 'of host memory'}"

    def holders(self) -> list[tuple[str, int]]:
        """Return the five largest holders at the peak of the fullest rank: tables by name, all else by kind."""
        ranks = self._ranks(self.config)
        where = self._where(ranks)
        rank = max(ranks, key=lambda memory: memory.peak(where)[0])
        kinds = rank.phases[rank.peak(where)[1]][where]
        tables = {
            f"table {name}": table_bytes.device if where == "device" else table_bytes.device + table_bytes.host
            for name, table_bytes in rank.tables.items()
        }
        others = {kind: size for kind, size in kinds.items() if kind not in ("table_weight", "table_optimizer")}
        sizes = tables | {kind.replace("_", " "): size for kind, size in others.items()}
        return sorted(sizes.items(), key=lambda pair: -pair[1])[:5]

    def process(self) -> tuple[int, int]:
        """Return the bytes that a process takes before it holds tables or batches, and the bytes that it may take."""
        ranks = self._ranks(self.config)
        where = self._where(ranks)
        kinds = max(ranks, key=lambda rank: rank.peak(where)[0]).phases["step"][where]
        return sum(kinds.get(kind, 0) for kind in _OF_PROCESS[where]), int(self._available(where) * (1 - MARGIN))

    def _available(self, where: str) -> int:
        return self._topology.device_bytes if where == "device" else self._topology.host_share_bytes

    def _where(self, ranks: Sequence[RankMemory]) -> str:
        if not self._topology.on_gpu:
            return "host"
        device, host = (max(rank.peak(x)[0] for rank in ranks) / self._available(x) for x in ("device", "host"))
        return "device" if device >= host else "host"

    def _ranks(self, config: Config) -> list[RankMemory]:
        data, rows = self.data_of(config), rank_rows(config, self._topology.world_size)
        kernels = repr((config.tables, config.optimizer.tables))
        if kernels not in self._shards:
            self._shards[kernels] = planned_shards(config, self._topology)
        dims = [table.embedding_dim for table in config.tables.values()]
        layers = repr((config.model, config.train, config.precision, dims, data.most_ids))  # windows change the last
        if layers not in self._dense:
            self._dense[layers] = rehearse(config, data, rows, self._topology.device)
        return predict(config, data, self._dense[layers], self._topology, self._shards[kernels])

    def data_of(self, config: Config) -> DataFacts:
        """Return the facts of the data for the windows of a config."""
        size = config.data.window_mib
        if size not in self._data:
            # What is held depends on the order: a row group stays whole, and a batch has rows of many small windows.
            asked = replace(self.config, data=replace(self.config.data, window_mib=size))
            inputs = copy(self._inputs)
            if inputs is not None:
                inputs.config = asked
            found = data_facts(asked, inputs, self._topology.world_size)
            self._data[size] = replace(found, source=self._data[self.config.data.window_mib].source)
        return self._data[size]

    def missing(self, config: Config) -> int:
        """Return by how many bytes ranks and machines exceed their memory less the margin, in all."""
        places = demands(self._ranks(config), self._topology)
        needs = ((place.size + self._beyond * place.num_ranks, place.there) for place in places)
        return sum(max(0, size - int(there * (1 - MARGIN))) for size, there in needs)


def _joined(changes: Sequence[Change]) -> Change:
    """Return several changes as one."""
    settings = {key: value for change in changes for key, value in change.settings.items()}
    saver = next((change.saver for change in changes if change.saver), None)
    return Change(settings, "; ".join(change.cost for change in changes), saver)
