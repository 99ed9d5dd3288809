"""Signals that come at a bad moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from nsan.io.tidy import postponed


def test_ctrl_c_is_felt_at_the_end_of_what_must_be_whole():
    done = []

    def work():
        with postponed():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_that_is_started_meanwhile_can_be_stopped_by_signals():
    code = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with postponed():
        said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "SIGINT" not in said
    assert "SIGTERM" not in said


def test_other_threads_get_no_signals_and_are_left_alone():
    kept = []

    def work():
        with postponed():
            kept.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert kept == [signal.default_int_handler]
