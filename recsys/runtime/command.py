"""Commands run in a separate process, so that their memory is freed when they end."""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from recsys.errors import UserError, told_error
from recsys.runtime.launch import environment_of_child


def run_command(*words: str, module: str = "recsys", shown: bool = True) -> UserError | None:
    """Run `recsys WORDS` as a single process, without this process's launcher; return its error, or None.

    If this process ends first, that one is ended too.

    Args:
        module: run this module instead of `recsys`.
        shown: whether its standard output is shown; its standard error never is.
    """
    command = [sys.executable, "-m", module, *words]
    stdout = None if shown else subprocess.DEVNULL
    environment = environment_of_child()
    done = subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)
    return told_error(done.stderr, done.returncode) if done.returncode else None


def run_attended(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command and return its status; Ctrl-C is passed on to it, and raised here once the command has ended.

    `subprocess.run` would kill it after a quarter of a second, before a checkpoint is written. The command has its own
    session: otherwise a terminal's Ctrl-C would reach it twice, and the second makes torchrun end at once.
    """
    interrupt: KeyboardInterrupt | None = None
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt as error:
                interrupt = error
                process.send_signal(signal.SIGINT)
            except BaseException:  # raised by the handler of another signal
                process.terminate()
                raise
    if interrupt is not None:
        raise interrupt
    return process.returncode
