"""The checkpoint that a run starts from: its own, to go on, or another run's, for its weights."""

from dataclasses import dataclass
from pathlib import Path

from recsys.checkpoint.files import file_problem
from recsys.checkpoint.save import Checkpoints
from recsys.checkpoint.state import Marker, find_checkpoint, verify_checkpoint
from recsys.config import Config
from recsys.config.initial import InitConfig
from recsys.errors import UserError
from recsys.runtime.world import World

FACTS, FOOTERS = "vocabulary", "footers"  # folders of a run directory


@dataclass(frozen=True)
class Source:
    """A valid checkpoint that a run starts from.

    Attributes:
        init: how the config may differ from the checkpoint's; None: the checkpoint is of this run, which goes on.
    """

    path: Path
    marker: Marker
    init: InitConfig | None

    @property
    def goes_on(self) -> bool:
        """Whether the checkpoint is of the same run."""
        return self.init is None

    @property
    def grows(self) -> bool:
        """Whether vocabularies may have more ids than the checkpoint's."""
        return self.init is not None and self.init.grow_vocabularies


def find_source(config: Config, run_dir: Path, world: World) -> Source | None:
    """Return the checkpoint that the run starts from, or None; collective.

    Raises:
        UserError: a checkpoint is corrupt, or the one that is asked for does not exist.
    """
    if config.run.resume and (newest := Checkpoints(run_dir / "checkpoints", world, keep=1).newest_valid()):
        return Source(*newest, None)
    if config.train.init_from is None:
        return None
    path = world.from_rank_zero(lambda: find_checkpoint(config.train.init_from or ""))
    return Source(path, verify_checkpoint(path, world), config.train.init)


def facts_of(checkpoint: Path) -> Path:
    """Return the folder of the facts (vocabularies, figures) of a checkpoint's run."""
    return checkpoint.parent.parent / FACTS


def footers_of(checkpoint: Path) -> Path:
    """Return the folder of the cached footers of a checkpoint's run, a file for each role."""
    return checkpoint.parent.parent / FOOTERS


def check_facts(checkpoint: Path, marker: Marker, names: list[str]) -> None:
    """Refuse vocabularies and figures other than those that a checkpoint was trained with.

    Args:
        names: files in `facts_of` that are to be read.

    Raises:
        UserError: names the file.
    """
    folder = facts_of(checkpoint)
    for name in names:
        entry = marker.facts.get(name)
        problem = "it was trained without" if entry is None else file_problem(folder / name, *entry)
        if problem:
            raise UserError(
                f"'{folder / name}' is not what checkpoint '{checkpoint}' was trained with ({problem}), and its rows "
                f"would belong to other ids; put that file back"
            )
