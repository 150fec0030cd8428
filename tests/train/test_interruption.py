"""Ctrl-C and SIGTERM: the step is finished, the run saved, the handlers put back."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from pippin.train.interruption import Interruption

from ._run import Cursor, trainer


@pytest.fixture(autouse=True)
def ctrl_c():
    """Python's own handler, also where the tests were started in the background, which ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupting(Cursor):
    """Sends this process a signal while it makes batch number ``at``."""

    __qualname__ = "Cursor"

    def __init__(self, at, *numbers):
        super().__init__()
        self.at, self.numbers = at, numbers

    def __iter__(self):
        for batch in super().__iter__():
            if self.drawn == self.at:
                for number in self.numbers:
                    os.kill(os.getpid(), number)
            yield batch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_returns(tmp_path, number):
    before = signal.getsignal(number)
    run = trainer(tmp_path, data=Interrupting(25, number), every=1000)
    training = run.fit()
    assert training.stopped == "interrupted"
    assert run.step == 13  # two batches a step
    assert list(run.checkpoints.all()) == [7, 13]  # the best one, and where it stopped
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert signal.getsignal(number) is before
    resumed = trainer(tmp_path)
    assert resumed.fit().losses == trainer(None).fit().losses
    assert resumed.result.stopped is None


def test_a_second_signal_ends_at_once(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    run = trainer(tmp_path, data=Interrupting(25, signal.SIGINT, signal.SIGINT), every=1000)
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    assert run.step == 12
    assert signal.getsignal(signal.SIGINT) is before
    assert torch.is_grad_enabled()


def test_a_second_sigterm_ends_the_process():
    code = (
        "import os, signal\n"
        "from pippin.train.interruption import Interruption\n"
        "with Interruption():\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print('first', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print('second', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == "first\n"


def test_another_thread_trains_without_handlers(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with Interruption():
            seen.append(signal.getsignal(signal.SIGINT))
        seen.append(trainer(None, steps=3).fit().stopped)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, None]


def test_advance_leaves_signals_alone():
    run = trainer(None, data=Interrupting(3, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run.advance(5)
