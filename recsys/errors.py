"""Errors that end a run: one sentence, an exit status, and the cause for the launcher."""

import contextlib
import difflib
import errno
import json
import logging
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

LAUNCHER_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's name for a file of each rank
_TOLD = "error: "  # before what is one sentence, and no traceback
_ECHO_WAIT_S = 20
_FULL = {errno.ENOSPC, errno.EDQUOT}
_GONE = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR}
_DENIED = {errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENAMETOOLONG, errno.EMFILE}
_NOT_STARTED = ("can't start new thread", "Resource temporarily unavailable")  # of Python and of C++
# What torch, FBGEMM, NumPy, Arrow and the system say where there is no memory, or could be none of that size.
_OUT_OF_MEMORY = re.compile(
    "out of memory|a(n't|nnot) allocate memory|not enough memory|Unable to allocate|ALLOC_FAILED|bad_alloc|MemoryError|"
    "size calculation overflowed|array is too big|into an index-sized integer|int too large to convert to C ssize_t"
)


class UserError(Exception):
    """A mistake that the user can mend. The message is one sentence: what was found, what is allowed, what to do.

    Args:
        args: the sentence, then lines that go below it. Long values in them are cut when they are shown, and nothing
            in them moves a terminal's cursor.
    """

    def __str__(self) -> str:
        return "\n  ".join(_plain(str(line)) for line in self.args)

    def within(self, what: str) -> "UserError":
        """Return the mistake as that of a part: its sentence behind what has failed by it, and the lines below."""
        first, *below = self.args
        return UserError(f"{what}: {first}", *below)


@contextlib.contextmanager
def in_words(words: Mapping[str, str]) -> Iterator[None]:
    """Tell mistakes inside the block in other words: each key of `words` that they hold becomes its value."""
    try:
        yield
    except UserError as error:
        for word, other in words.items():
            error.args = tuple(str(line).replace(word, other) for line in error.args)
        raise


class UsageError(UserError):
    """Words that are no command line of a command: it ends with status 2, as programs do by custom."""


class TerminatedError(KeyboardInterrupt):
    """SIGTERM, which a command takes as it takes Ctrl-C."""


class EchoError(UserError):
    """A mistake that another rank has found too, and reports."""


class NoPlanError(UserError):
    """The tables do not fit into the memory there is."""


class LostPeerError(Exception):
    """Another rank ended or does not answer; its own error is the cause."""


class StuckError(Exception):
    """This rank has made no progress for longer than the config allows."""


def disk_problem(error: Exception) -> Exception:
    """Return an error of files, such as a full disk, as a UserError, and any other as it is."""
    if not isinstance(error, OSError) or error.errno not in _FULL | _GONE | _DENIED:
        return error
    name = error.filename2 or error.filename  # of two the one that is written, as of a copy
    what = f"'{name}'" if name else "a file"
    if error.errno in _FULL:
        return UserError(f"{what} cannot be written ({why(error)}); make room there, and start again")
    if error.errno in _GONE and "temporary directory" in str(error.strerror):  # of Python's `tempfile`
        told = f"no folder for temporary files can be written ({error.strerror})"
        return UserError(f"{told}; make room in one of these, or name another by the environment variable TMPDIR")
    if error.errno in _GONE:
        return UserError(f"{what} is gone ({why(error)}): it or its folder was removed during the run; start again")
    return UserError(f"{what} cannot be written or read ({why(error)}); fix that, and start again")


def system_problem(error: Exception) -> Exception:
    """Return an error of files, or of a limit of threads and processes, as a UserError, and any other as it is."""
    return disk_problem(_limit_problem(error))


def _limit_problem(error: Exception) -> Exception:
    """Return an error of a thread or process that the system does not start as a UserError, and any other as it is."""
    if not isinstance(error, BlockingIOError) and str(error) not in _NOT_STARTED:
        return error
    return UserError(
        f"the system starts no further thread or process ({error}): a limit of their number (`ulimit -u`, a "
        f"container's) or of memory (`ulimit -v`) is reached; raise it, or lower run.num_threads and data.num_threads"
    )


def why(error: OSError) -> str:
    """Return the system's text of an error, in one line; of a link to nowhere, where it leads."""
    if isinstance(error, FileExistsError) and error.filename and os.path.islink(error.filename):
        return f"'{error.filename}' is a link to '{os.readlink(error.filename)}', which is not there"
    return os.strerror(error.errno) if error.errno else " ".join(str(error).split())[:200]


def _plain(text: str) -> str:
    text = re.sub(r"(\S{100})\S{500,}", r"\1…", text)
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, means that memory has run out, in any library's words."""
    if error is None:
        return False
    told = not isinstance(error, UserError) and _OUT_OF_MEMORY.search(str(error)) is not None
    return told or isinstance(error, MemoryError | NoPlanError) or is_out_of_memory(error.__cause__)


def nearest(name: str, allowed: Iterable[str], prefix: str = "") -> str:
    """Return `"; did you mean 'PREFIXx'?"` for the allowed name x most like `name`, or an empty string."""
    by_lower = {word.lower(): word for word in allowed}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.65)
    return f"; did you mean '{prefix}{by_lower[matches[0]]}'?" if matches else ""


def write_launcher_error(message: str, delay_seconds: int) -> None:
    """Write `message` to the file of torchrun for this rank's error, so that its summary shows it.

    The file's name is given by torchrun in TORCHELASTIC_ERROR_FILE; without torchrun nothing is written. The
    format is that of torch.distributed.elastic.multiprocessing.errors.

    Args:
        message: what the summary shows.
        delay_seconds: added to the time of the error. torchrun takes the earliest error, in whole seconds, for
            the root cause, so an error that only follows from another rank's is dated later.
    """
    path = os.environ.get(LAUNCHER_FILE)
    if path:
        extra = {"timestamp": str(int(time.time()) + delay_seconds)}
        # Aside, then renamed: torchrun may end this rank at any moment, and fails itself on half a file.
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
        os.replace(f"{path}.tmp", path)


def read_launcher_error(path: Path) -> UserError | None:
    """Return the mistake of the user that a process wrote to the file of LAUNCHER_FILE; None: there is no such file, or
    another error in it."""
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["message"]["message"]
    except FileNotFoundError:
        return None
    return UserError(*text.removeprefix(_TOLD).split("\n  ")) if text.startswith(_TOLD) else None


def told_error(output: str, status: int) -> UserError:
    """Return what a process told last: the sentence of `end_run` with the lines below it, else the last line.

    Args:
        output: what it wrote to its standard error. status: its exit status, which is told where it wrote nothing, or
            minus the number of the signal that ended it, whose name then comes first.
    """
    if status < 0:
        reason = ", as the system ends what takes more memory than there is" if -status == signal.SIGKILL else ""
        last = [f"it told last: {line}" for line in output.strip().splitlines()[-1:]]
        return UserError(f"it was ended by {signal.Signals(-status).name}{reason}", *last)
    lines = output.strip().splitlines() or [f"it ended with status {status}"]
    starts = [i for i, line in enumerate(lines) if line.startswith(_TOLD)] or [len(lines) - 1]
    first, *rest = lines[starts[-1] :]
    below = [line[2:] for line in takewhile(lambda line: line.startswith("  "), rest)]
    return UserError(first.removeprefix(_TOLD), *below)


def output_is_cut() -> bool:
    """Return whether nobody reads standard output any more, as after `| head -1`; it then goes nowhere from here on.

    By the system's word, since a pipe to a process that decodes breaks with the same error. SIGPIPE, which ends other
    programs there, would end a run for such a pipe too.
    """
    try:
        number, poll = sys.stdout.fileno(), select.poll()
        poll.register(number, 0)
        is_cut = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # no stream of the system's, or none
        return False
    if is_cut:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), number)
    return is_cut


def flush_output() -> None:
    """Write out what was printed, before Python does so at its end: there a pipe that nobody reads is told of."""
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        output_is_cut()
    except OSError:
        pass  # of a full disk, say, which Python tells at its end


def _wait_for_torchrun() -> None:
    """Let torchrun, if there is one, end this process with status 0: its summary then has one failure alone."""
    if LAUNCHER_FILE in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(_ECHO_WAIT_S)


def end_run(error: Exception) -> NoReturn:
    """Print why the run failed, tell the launcher, and end this process with status 1, or 2 of a `UsageError`.

    A mistake of the user, a stuck rank, or the end of another one, is one sentence; anything else comes with its
    traceback. A mistake that another rank tells is told here only if torchrun does not end this one soon after. Of
    output that nobody reads any more nothing is said; the status is what shells give to programs that it ends.
    """
    if isinstance(error, BrokenPipeError) and output_is_cut():
        _end_process(128 + signal.SIGPIPE)
    if isinstance(error, EchoError):
        _wait_for_torchrun()
    elif is_out_of_memory(error) and not isinstance(error, UserError):
        said = ": ".join(filter(None, [type(error).__name__, str(error)]))
        error = UserError(f"memory has run out: {said}; free some, or make the run smaller")
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "recsys":
        error = UserError(
            f"the Python package '{error.name}' is not installed; `bash scripts/setup.sh` installs all (without a "
            f"clone: the wheel's extra cpu or cuda)"
        )
    error = system_problem(error)
    known = isinstance(error, UserError | LostPeerError | StuckError)
    text = f"{_TOLD}{error}" if known else "".join(traceback.format_exception(error)).rstrip()
    if not isinstance(error, EchoError):
        with contextlib.suppress(OSError):  # in one piece, since all ranks write to the same place
            print(text + "\n", end="", file=sys.stderr)
    log = logging.getLogger("recsys")
    if log.level:  # the run's log is open; before, a library's handler would print the text a second time
        # In the file the whole story, also of a collective that broke.
        log.error(text, exc_info=error if isinstance(error, LostPeerError) else None)
    with contextlib.suppress(OSError):  # any of these may go to a disk that is full
        write_launcher_error(text, delay_seconds=2 if isinstance(error, LostPeerError) else 0)
    _end_process(2 if isinstance(error, UsageError) else 1)


def end_interrupted(error: KeyboardInterrupt, advice: str, is_teller: bool) -> NoReturn:
    """Print in one line that a signal has ended the command, and end this process with the status that shells give it.

    Args:
        advice: what may be done now, or empty. is_teller: of several ranks the one that prints.
    """
    number, text = (
        (signal.SIGTERM, "ended by SIGTERM") if isinstance(error, TerminatedError) else (signal.SIGINT, "interrupted")
    )
    text += f"; {advice}" if advice else ""
    if is_teller:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr)
    log = logging.getLogger("recsys")
    if log.level:
        log.error(text)
    _end_process(128 + number)


def _end_process(status: int) -> NoReturn:
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # At once: with collectives broken, an orderly end of the process group can hang, or abort with another status.
    os._exit(status)
