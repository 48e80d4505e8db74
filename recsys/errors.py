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

LAUNCHER_FILE = "TORCHELASTIC_ERROR_FILE"  # the variable in which torchrun names a file of each rank
_TOLD = "error: "  # begins an error that is one sentence, not a traceback
_ECHO_WAIT_S = 20
_FULL = {errno.ENOSPC, errno.EDQUOT}
_GONE = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR}
_DENIED = {errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENAMETOOLONG, errno.EMFILE}
_NOT_STARTED = ("can't start new thread", "Resource temporarily unavailable")  # messages of Python and of C++
# Messages of torch, FBGEMM, NumPy, Arrow and the system if memory has run out, or no memory can be that large.
_OUT_OF_MEMORY = re.compile(
    "out of memory|a(n't|nnot) allocate memory|not enough memory|Unable to allocate|ALLOC_FAILED|bad_alloc|MemoryError|"
    "size calculation overflowed|array is too big|into an index-sized integer|int too large to convert to C ssize_t"
)


class UserError(Exception):
    """A mistake that the user can mend. The message is one sentence: what was found, what is allowed, what to do.

    Args:
        args: the sentence, then lines to show below it. When shown, long values are cut, and control characters are
            escaped, so that they cannot move a terminal's cursor.
    """

    def __str__(self) -> str:
        return "\n  ".join(_plain(str(line)) for line in self.args)

    def within(self, what: str) -> "UserError":
        """Return the error with its sentence prefixed by what has failed, and the same lines below."""
        first, *below = self.args
        return UserError(f"{what}: {first}", *below)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, for messages: 1 file, 2,000 files."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextlib.contextmanager
def in_words(words: Mapping[str, str]) -> Iterator[None]:
    """Replace words in the UserErrors of a block: each key of `words` becomes its value."""
    try:
        yield
    except UserError as error:
        for word, other in words.items():
            error.args = tuple(str(line).replace(word, other) for line in error.args)
        raise


class UsageError(UserError):
    """A command line that a command does not understand: it ends with status 2, as is the custom."""


class TerminatedError(KeyboardInterrupt):
    """SIGTERM, which commands handle like Ctrl-C."""


class EchoError(UserError):
    """A mistake that another rank has found too and reports, so that this rank need not."""


class NoPlanError(UserError):
    """The tables do not fit into the memory there is."""


class LostPeerError(Exception):
    """Another rank has ended or does not answer; its own error is the cause."""


class StuckError(Exception):
    """This rank has made no progress for longer than the config allows."""


def disk_problem(error: Exception) -> Exception:
    """Return an error of files, such as a full disk, as a UserError, and any other error as it is."""
    if not isinstance(error, OSError) or error.errno not in _FULL | _GONE | _DENIED:
        return error
    name = error.filename2 or error.filename  # if there are two, as in copying, the second is written
    what = f"'{name}'" if name else "a file"
    if error.errno in _FULL:
        return UserError(f"{what} cannot be written ({why(error)}); make room there, and start again")
    if error.errno in _GONE and "temporary directory" in str(error.strerror):  # raised by Python's `tempfile`
        told = f"no folder for temporary files can be written ({error.strerror})"
        return UserError(f"{told}; make room in one of these, or name another by the environment variable TMPDIR")
    if error.errno in _GONE:
        return UserError(f"{what} is gone ({why(error)}): it or its folder was removed during the run; start again")
    return UserError(f"{what} cannot be written or read ({why(error)}); fix that, and start again")


def system_problem(error: Exception) -> Exception:
    """Return an error of files, or of a limit on threads and processes, as a UserError, others as they are."""
    return disk_problem(_limit_problem(error))


def _limit_problem(error: Exception) -> Exception:
    """Return an error of starting a thread or process as a UserError, and any other error as it is."""
    if not isinstance(error, BlockingIOError) and str(error) not in _NOT_STARTED:
        return error
    return UserError(
        f"the system starts no further thread or process ({error}): a limit of their number (`ulimit -u`, a "
        f"container's) or of memory (`ulimit -v`) is reached; raise it, or lower run.num_threads and data.num_threads"
    )


def why(error: OSError) -> str:
    """Return the system's text of an error, in one line; for a link to nowhere, where it leads."""
    if isinstance(error, FileExistsError) and error.filename and os.path.islink(error.filename):
        return f"'{error.filename}' is a link to '{os.readlink(error.filename)}', which is not there"
    return os.strerror(error.errno) if error.errno else " ".join(str(error).split())[:200]


def _plain(text: str) -> str:
    text = re.sub(r"(\S{100})\S{500,}", r"\1…", text)
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, means that memory has run out; messages of all libraries are known."""
    if error is None:
        return False
    told = not isinstance(error, UserError) and _OUT_OF_MEMORY.search(str(error)) is not None
    return told or isinstance(error, MemoryError | NoPlanError) or is_out_of_memory(error.__cause__)


def nearest(name: str, allowed: Iterable[str], prefix: str = "") -> str:
    """Return `"; did you mean 'PREFIXx'?"` for the allowed name x that is closest to `name`, or an empty string."""
    by_lower = {word.lower(): word for word in allowed}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.65)
    return f"; did you mean '{prefix}{by_lower[matches[0]]}'?" if matches else ""


def write_launcher_error(message: str, delay_seconds: int) -> None:
    """Write `message` to torchrun's file for the error of this rank, so that torchrun's summary shows it.

    TORCHELASTIC_ERROR_FILE names the file; without torchrun nothing is written. The format is that of
    torch.distributed.elastic.multiprocessing.errors.

    Args:
        message: what the summary shows.
        delay_seconds: added to the time of the error. torchrun regards the earliest error, in whole seconds, as the
            root cause, so an error that only follows from that of another rank gets a later time.
    """
    path = os.environ.get(LAUNCHER_FILE)
    if path:
        extra = {"timestamp": str(int(time.time()) + delay_seconds)}
        # Written aside, then renamed: torchrun may end this rank at any moment, and itself fails on half a file.
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
        os.replace(f"{path}.tmp", path)


def read_launcher_error(path: Path) -> UserError | None:
    """Return the UserError that a process wrote to the file of LAUNCHER_FILE; None if there is no such file, or it has
    another error."""
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["message"]["message"]
    except FileNotFoundError:
        return None
    return UserError(*text.removeprefix(_TOLD).split("\n  ")) if text.startswith(_TOLD) else None


def told_error(output: str, status: int) -> UserError:
    """Return the error that a process has printed: the sentence of `end_run` and the lines below it, or its last line.

    Args:
        output: what it wrote to its standard error. status: its exit status, which is the message if it wrote nothing;
            if a signal ended it, minus the number of the signal, whose name then comes first.
    """
    if status < 0:
        reason = ", as the system ends what takes more memory than there is" if -status == signal.SIGKILL else ""
        last = [f"it told last: {line}" for line in output.strip().splitlines()[-1:]]
        return UserError(f"it was ended by {_signal_name(-status)}{reason}", *last)
    lines = output.strip().splitlines() or [f"it ended with status {status}"]
    starts = [i for i, line in enumerate(lines) if line.startswith(_TOLD)] or [len(lines) - 1]
    first, *rest = lines[starts[-1] :]
    below = [line[2:] for line in takewhile(lambda line: line.startswith("  "), rest)]
    return UserError(first.removeprefix(_TOLD), *below)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals between the first and the last
        return f"signal {number}"


def output_is_cut() -> bool:
    """Return whether nobody reads standard output any more, as after `| head -1`; then redirect it to nowhere.

    The system is asked, because a broken pipe to a decoding process raises the same error. SIGPIPE, which ends other
    programs in this case, would end a run for such a pipe too.
    """
    try:
        number, poll = sys.stdout.fileno(), select.poll()
        poll.register(number, 0)
        is_cut = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # standard output is not a file of the system, or is closed
        return False
    if is_cut:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), number)
    return is_cut


def flush_output() -> None:
    """Flush standard output before Python does so at its end, where it would report a pipe that nobody reads."""
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        output_is_cut()
    except OSError:
        pass  # such as a full disk, which Python reports at its end


def _wait_for_torchrun() -> None:
    """Let torchrun, if there is one, end this process with status 0, so that its summary has only one failure."""
    if LAUNCHER_FILE in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(_ECHO_WAIT_S)


def end_run(error: Exception) -> NoReturn:
    """Print why the run failed, report it to the launcher, and end this process with status 1 (2 for a `UsageError`).

    A mistake of the user, a stuck rank, or the end of another rank is one sentence; anything else has its traceback. If
    another rank reports the mistake, this rank gives torchrun time to end it, and then only writes it to log and
    launcher. If nobody reads the output any more, nothing is written, and the status is that of an end by SIGPIPE.
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
        with contextlib.suppress(OSError):  # printed in one piece, since all ranks write to the same place
            print(text + "\n", end="", file=sys.stderr)
    log = logging.getLogger("recsys")
    if log.level:  # only if the run's log is open; else the handler of a library would print the text a second time
        # The file gets the traceback too if a collective broke.
        log.error(text, exc_info=error if isinstance(error, LostPeerError) else None)
    with contextlib.suppress(OSError):  # the disk may be full
        write_launcher_error(text, delay_seconds=2 if isinstance(error, LostPeerError) else 0)
    _end_process(2 if isinstance(error, UsageError) else 1)


def end_interrupted(error: KeyboardInterrupt, advice: str, is_teller: bool) -> NoReturn:
    """Print in one line that a signal has ended the command, and end this process with the status of shells for that.

    Args:
        advice: what the user may do now, or empty. is_teller: whether this rank prints the line.
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
    # End at once: with broken collectives, an orderly end of the process group can hang, or abort with another status.
    os._exit(status)
