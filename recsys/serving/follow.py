"""Follow a folder that training publishes to (`train.publish`), and answer from the newest valid publication.

    from follow import Follower
    follower = Follower("published", every_s=5)
    scores = follower.scorer.score(table)

It needs what score.py, in the same folder, needs. A publication is read in full before it is used, and a
`follower.scorer` that was taken earlier does not change.
"""

import json
import os
import re
import sys
import threading
from numbers import Real
from pathlib import Path
from typing import Any

from score import MANIFEST, ExportError, Scorer, read_manifest


class Follower:
    """Keeps a scorer up to date with the newest publication.

    Args:
        folder: `train.publish.dir`. every_s: seconds between looks for publications, in a thread; None: only by
            `refresh`.

    Attributes:
        scorer: of the newest publication; take it once for each request.
        number: of that publication. step: of training.
        problem: what is wrong with the next one, if anything.

    Raises:
        ExportError: there is no valid base in it, or every_s is no number of seconds.
    """

    def __init__(self, folder: str | Path, every_s: float | None = None) -> None:
        if every_s is not None and not (isinstance(every_s, Real) and 0 < every_s <= threading.TIMEOUT_MAX):
            raise ExportError(f"every_s is {every_s!r}, but must be seconds above 0, or None")
        if not isinstance(folder, str | os.PathLike):
            raise ExportError(
                f"the folder is of type {type(folder).__name__}, but must be the path of train.publish.dir"
            )
        self._folder = Path(folder)
        self.number, self.step, self._last = 0, 0, ""
        self._base = 0, ""  # its number, and the checksum of its manifest
        self.problem: str | None = None
        self.scorer: Scorer
        self._begin()
        self.refresh_or_tell()
        if every_s is not None:
            threading.Thread(target=self._follow, args=[float(every_s)], daemon=True).start()

    def refresh(self) -> int:
        """Apply the publications since; return the number of the newest.

        Raises:
            ExportError: the next one is incomplete, out of order or altered; it is named, and not applied.
        """
        deltas = self._numbers("delta")  # before bases, as a base that appears meanwhile may be between deltas
        if bases := self._numbers("base"):
            is_cut_back = max(bases + deltas) < self.number  # so is one that is removed and published to again
            if is_cut_back or not self._is_followed(bases[-1]):
                self._open_base(bases[-1])
        while (folder := self._folder / f"delta-{self.number + 1:09d}").is_dir():
            self._apply(folder)
        if ahead := [number for number in deltas if number > self.number]:
            raise ExportError(f"'{self._folder}' has delta-{ahead[0]:09d}, and lacks '{folder.name}' before it")
        return self.number

    def refresh_or_tell(self) -> None:
        """Apply the publications since, and print problems to standard error, each once."""
        try:
            self.refresh()
            self.problem = None
        except Exception as error:  # of any library: a file may vanish while it is read, and the thread must continue
            problem = str(error) if isinstance(error, ExportError) else f"{type(error).__name__}: {error}"
            if problem != self.problem:
                print(f"error: {problem}; answers stay those of number {self.number}", file=sys.stderr, flush=True)
            self.problem = problem

    def _follow(self, every_s: float) -> None:
        while True:
            threading.Event().wait(every_s)
            self.refresh_or_tell()

    def _numbers(self, kind: str) -> list[int]:
        names = [path.name for path in self._folder.glob(f"{kind}-*")]
        return sorted(int(name.partition("-")[2]) for name in names if re.fullmatch(rf"{kind}-\d+", name))

    def _begin(self) -> None:
        """Open the newest valid base."""
        problem = f"'{self._folder}' holds no base-*; give the folder of train.publish.dir, once it has published"
        for number in reversed(self._numbers("base")):
            try:
                return self._open_base(number)
            except ExportError as error:
                problem = str(error)
        raise ExportError(problem)

    def _is_followed(self, base: int) -> bool:
        """Return whether the scorer is of a base, or of deltas after it; False if its manifest cannot be read."""
        try:
            manifest = json.loads((self._folder / f"base-{base:09d}" / MANIFEST).read_text(encoding="utf-8"))
            return (base, manifest["sha256"]) == self._base
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _open_base(self, number: int) -> None:
        scorer = Scorer(self._folder / f"base-{number:09d}")
        made: dict[str, Any] = scorer.manifest["made"]
        self.scorer, self.number, self.step = scorer, number, made["step"]
        self._last = scorer.manifest["sha256"]
        self._base = number, self._last

    def _apply(self, folder: Path) -> None:
        manifest = read_manifest(folder, verify=True)
        if manifest.get("number") != self.number + 1 or manifest.get("follows") != self._last:
            raise ExportError(
                f"'{folder}' is number {manifest.get('number')} and does not follow number {self.number}; it is a copy "
                f"of another, or of another run"
            )
        self.scorer = self.scorer.changed(folder)
        self.number, self.step, self._last = manifest["number"], manifest["step"], manifest["sha256"]
