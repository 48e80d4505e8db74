"""Training state and marker of a checkpoint: all of it except the tensors."""

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from recsys.checkpoint.files import file_problem
from recsys.checkpoint.tensor_files import Entry, check_entries
from recsys.data.order import Position
from recsys.errors import UserError
from recsys.runtime.checkpoint_folders import MARKER, checkpoints_of
from recsys.runtime.files import replace_file
from recsys.runtime.world import World

# Version 0.1.0 wrote 4, by torch.distributed.checkpoint.
FORMAT = 5
_ASIDE = ".tmp"
_REFUSED = ".refused"


@dataclass
class TrainState:
    """Progress of training: position in the data, counts, early stopping.

    Attributes:
        position: position in the data after `step` steps.
        bad_steps: how many of these steps were not finite, and changed nothing.
        overflows: how many of these steps had a gradient that overflowed FP16, and changed nothing.
        updates_before: by table, the updates that its optimizer's state had seen in earlier runs that it comes from.
        loss_scale, loss_scale_good_steps: see `LossScale`; None and 0 in a run that does not compute in FP16.
        epoch_rows: for each epoch begun, the rows trained, those left out as bad, and those of bad steps, as counted
            in the batches.
        fingerprints: by role, those of the files of data.train, of the datasets that early stopping evaluates, and of
            the items that negatives are drawn from.
        rate_factor: factor of the learning rates that a plateau schedule has reached; other schedules do not read it.
        evaluated_step: step of data.valid's last evaluation; best_metric, best_step, bad_evaluations: early stopping.
        window: sum and number of losses since the last line of metrics.jsonl, by "" and, with several tasks, by task.
        metrics: by dataset, those of its last evaluation.
    """

    position: Position
    step: int = 0
    bad_steps: int = 0
    overflows: int = 0
    updates_before: dict[str, int] = field(default_factory=dict)
    loss_scale: float | None = None
    loss_scale_good_steps: int = 0
    epoch_rows: list[list[int]] = field(default_factory=list)
    fingerprints: dict[str, str] = field(default_factory=dict)
    rate_factor: float = 1.0
    evaluated_step: int | None = None
    best_metric: float | None = None
    best_step: int | None = None
    bad_evaluations: int = 0
    window: dict[str, list[float]] = field(default_factory=dict)
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def rows_read(self) -> int:
        """Rows in the steps so far, without those that could not be read."""
        return sum(trained + skipped for trained, _, skipped in self.epoch_rows)

    def updates_of(self, table: str) -> int:
        """Return how many updates of a table its optimizer's state has seen; some correct their moments by this."""
        return self.updates_before.get(table, 0) + self.step - self.bad_steps - self.overflows


@dataclass(frozen=True)
class Marker:
    """The file that completes a checkpoint: written last, and replaced in one step.

    Attributes:
        files: (bytes, checksum) of every other file by name.
        scalars: state of the dense optimizer that is not a tensor, by name.
        optimizer: class of the dense optimizer.
        approximate: tensors that are not exact copies of the trained ones, each with the reason.
        versions: of Python and the libraries; world_size: ranks that wrote it.
        meaning: settings that give rows and numbers their meaning: see `recsys.config.meaning`.
        facts: (bytes, checksum) of the files of RUN/vocabulary by name.
        tensors: shape, type and places of every tensor by name.
    """

    state: TrainState
    files: dict[str, tuple[int, str]]
    scalars: dict[str, Any]
    optimizer: str
    approximate: dict[str, str]
    versions: dict[str, str]
    world_size: int
    meaning: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, tuple[int, str]] = field(default_factory=dict)
    tensors: dict[str, Entry] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the marker, synced, and replace an earlier one."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        # The first line is the checksum of the second.
        text = json.dumps(content)
        replace_file(folder / MARKER, f"{_checksum(text)}\n{text}\n")

    @classmethod
    def read(cls, folder: Path) -> "Marker":
        """Read and check the marker.

        Raises:
            UserError: it is missing or damaged, describes tensors other than those that fill the files, or the
                checkpoint is of another format.
        """
        try:
            checksum, _, text = (folder / MARKER).read_text().removesuffix("\n").partition("\n")
            if checksum != _checksum(text):
                raise ValueError("it has changed since it was written")
            content = json.loads(text)
            if (number := content.pop("format")) != FORMAT:
                raise OtherFormatError(
                    f"checkpoint '{folder}' has format {number}, and this version reads format {FORMAT} alone; go on "
                    f"with the version that wrote it, or start a new run"
                )
            files = {name: (size, digest) for name, (size, digest) in content.pop("files").items()}
            facts = {name: (size, digest) for name, (size, digest) in content.pop("facts").items()}
            if outside := [
                name for name in (*files, *facts) if Path(name).name != name or name in ("", "..") or "\0" in name
            ]:
                raise ValueError(f"{outside[0]!r} is not a file of this folder")
            state = content.pop("state")
            state = TrainState(**{**state, "position": Position(**state["position"])})
            tensors = {name: Entry.from_json(entry) for name, entry in content.pop("tensors").items()}
            check_entries(tensors, {name: size for name, (size, _) in files.items()})
            marker = cls(state=state, files=files, facts=facts, tensors=tensors, **content)
            _check_types(state.position, state, marker)
            return marker
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
            raise UserError(f"checkpoint '{folder}' is corrupt: {MARKER}: {reason}; use another one") from error


def _check_types(*records: Any) -> None:
    """Raise a TypeError if a value is of another type than its field, or a whole number is below 0."""
    for record in records:
        for name, hint in typing.get_type_hints(type(record)).items():
            value = getattr(record, name)
            choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            plain = tuple(typing.get_origin(choice) or choice for choice in choices)
            whole = (int,) if float in plain else ()
            if isinstance(value, bool) or not isinstance(value, tuple(k for k in plain if k is not Any) + whole):
                raise TypeError(f"{name} is {value!r}")
            if isinstance(value, int) and value < 0:
                raise TypeError(f"{name} is {value}")


class OtherFormatError(UserError):
    """A checkpoint of another format."""


def _checksum(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def verify_checkpoint(folder: Path, world: World) -> Marker:
    """Verify the checksum of every file of a checkpoint, each rank its share; return the marker; collective.

    Raises:
        UserError: on every rank, if the checkpoint differs from what was written.
    """
    marker = world.from_rank_zero(lambda: Marker.read(folder))
    names = sorted(marker.files)[world.rank :: world.world_size]
    problems = [text for name in names if (text := file_problem(folder / name, *marker.files[name]))]
    everywhere = [text for texts in world.gather(problems) for text in texts]
    if everywhere:
        raise UserError(f"checkpoint '{folder}' is corrupt: {'; '.join(everywhere[:3])}; use another one")
    return marker


def name_of(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:09d}"


def aside_of(folder: Path) -> Path:
    """Return the temporary folder of a checkpoint while it is written or removed."""
    return folder.with_name(folder.name + _ASIDE)


def refused_of(folder: Path) -> Path:
    """Return the folder that an invalid checkpoint is renamed to."""
    return folder.with_name(folder.name + _REFUSED)


def find_checkpoint(path: str | Path, key: str = "config key 'train.init_from'") -> Path:
    """Return the checkpoint that a path names: itself, or the best of a run directory, otherwise its newest.

    Args:
        key: what names the path, for messages.

    Raises:
        UserError: there is none.
    """
    checkpoints = checkpoints_of(path, key)
    newest = checkpoints[-1]
    if newest == Path(path):
        return newest
    best_step = Marker.read(newest).state.best_step
    best = newest if best_step is None else newest.with_name(name_of(best_step))
    return best if best in checkpoints else newest
