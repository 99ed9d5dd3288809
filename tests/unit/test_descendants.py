"""What a program leaves running is ended, whatever else runs on the machine."""

from __future__ import annotations

import os
import subprocess
import threading

import pytest

from nsan.io import descendants
from nsan.io.descendants import end_descendants, marked_environment


@pytest.fixture
def left():
    """A program that was started with a mark, and the environment."""
    environment = marked_environment()
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        yield process, environment
        process.kill()


def ended(environment):
    thread = threading.Thread(target=end_descendants, args=(environment, 5.0), daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_what_has_the_mark_is_ended_and_nothing_else(left):
    process, environment = left
    with subprocess.Popen(["sleep", "600"], env=marked_environment()) as other:
        threading.Thread(target=process.wait, daemon=True).start()
        assert ended(environment)
        assert process.wait(timeout=60) < 0
        assert other.poll() is None
        other.kill()


def test_an_environment_that_never_comes_holds_up_nobody(left, tmp_path, monkeypatch):
    """A pipe that nobody writes stands for a program that is stuck in the driver."""
    process, environment = left
    (tmp_path / str(process.pid)).symlink_to(f"/proc/{process.pid}")
    for stuck in (1, 999_999_999):
        (tmp_path / str(stuck)).mkdir()
        os.mkfifo(tmp_path / str(stuck) / "environ")
    monkeypatch.setattr(descendants, "_PROCESSES", tmp_path)
    monkeypatch.setattr(descendants, "_READ_SECONDS", 0.3)
    threading.Thread(target=process.wait, daemon=True).start()
    try:
        assert ended(environment)
        assert process.wait(timeout=60) < 0
    finally:
        for stuck in (1, 999_999_999):  # lets go who waits for it
            os.close(os.open(tmp_path / str(stuck) / "environ", os.O_RDWR | os.O_NONBLOCK))
