"""How a command ends where it cannot go on: a code, and one line at most."""

import os
import signal
import subprocess
import sys
import time
from errno import ENOSPC

import pytest

from flax_attn.cli import compile_cache, main
from flax_attn.cli.guard import UsageError, guarded
from flax_attn.convert.replacing import replacing, unfinished

COMMAND = [sys.executable, "-m", "flax_attn"]
AT_WORK = """
import subprocess, sys, time
from pathlib import Path
from flax_attn.cli import main, show
from flax_attn.convert.replacing import replacing

def work(options):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    with replacing("report.json") as whole:
        whole.write_text("half of it")
        print(child.pid, flush=True)
        {work}

show._show = work
sys.argv = ["flax-attn", "show"]
sys.exit(main())
"""
# KeyboardInterrupt would be swallowed in the second, and be late in the third.
WORK = {
    "waiting": "time.sleep(100)",
    "in a destructor": "T = type('T', (), {'__del__': lambda self: time.sleep(100)}); T()",
    "in C": "import hashlib; hashlib.pbkdf2_hmac('sha256', b'a', b'b', 10**9)",
}


def alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize(
    ("work", "number", "code"),
    [*((work, signal.SIGINT, 130) for work in WORK), ("waiting", signal.SIGTERM, 143)],
)
def test_a_signal_ends_the_command_in_one_line_and_leaves_nothing(work, number, code, tmp_path):
    (tmp_path / "report.json").write_text("the old one")
    code_text = AT_WORK.format(work=WORK[work])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code_text], cwd=tmp_path, **pipes)
    child = int(process.stdout.readline())
    time.sleep(0.2)
    process.send_signal(number)
    _, error = process.communicate(timeout=20)
    assert process.returncode == code
    assert error == f"flax-attn: {'interrupted' if code == 130 else 'terminated'}\n"
    assert not alive(child)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("report.json", "the old one")
    ]


def test_a_signal_while_everything_is_imported_is_one_line_too():
    for delay in (0.3, 0.6, 1.0):
        process = subprocess.Popen(
            [*COMMAND, "backends", "--models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        if process.returncode == 130:
            assert error == b"flax-attn: interrupted\n"


def test_an_interrupt_that_is_ignored_stays_so(tmp_path):
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + AT_WORK.format(
        work="import os, signal; os.kill(os.getpid(), signal.SIGINT); child.kill(); return 0"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_main_leaves_signals_alone_where_a_program_calls_it(capsys):
    before = signal.getsignal(signal.SIGINT)
    assert main(["show"]) == 64
    assert signal.getsignal(signal.SIGINT) is before


def test_nobody_reads_on():
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [*COMMAND, "backends", "--models"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
def test_a_full_disk_behind_stdout_is_one_line():
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [*COMMAND, "backends"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (run.returncode, run.stderr) == (
        3,
        "flax-attn: cannot go on: [Errno 28] No space left on device\n",
    )


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(closed):
    run = subprocess.run(
        ["sh", "-c", f'"$0" -m flax_attn backends {closed}', sys.executable], check=False
    )
    assert run.returncode == 0


def test_what_a_terminal_cannot_show_is_escaped(capsys):
    code = "from flax_attn.cli.guard import guarded; guarded(lambda: print('caf\\u00e9 \\udcff'))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert run.stdout.split() == [rb"caf\xe9", rb"\udcff"]


def failing(error):
    def run():
        raise error

    return guarded(run)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UsageError("say what to show"), "say what to show"),
        (
            ModuleNotFoundError(name="tokenizers"),
            "this needs tokenizers, which is not installed: pip install tokenizers",
        ),
        (
            OSError(ENOSPC, "No space left on device"),
            "cannot go on: [Errno 28] No space left on device",
        ),
        (
            PermissionError(13, "Permission denied", "/x"),
            "cannot go on: [Errno 13] Permission denied: '/x'",
        ),
    ],
)
def test_what_stops_a_command_is_one_line_and_an_exit_code(error, line, capfd):
    assert failing(error) == (64 if isinstance(error, UsageError) else 3)
    shown = capfd.readouterr().err
    assert shown.startswith(f"flax-attn: {line}")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError(name="ours"), OSError("no errno"), KeyError("ours")]
)
def test_faults_of_this_package_keep_their_traceback_and_say_nothing_of_modules(error, capfd):
    assert failing(error) == 3
    shown = capfd.readouterr().err
    assert shown.startswith("Traceback")
    assert type(error).__name__ in shown.splitlines()[-1]


def _write_half(path, error):
    path.write_text("ne")
    raise error


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path):
    path, link = tmp_path / "x.txt", tmp_path / "link.txt"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    error = OSError(ENOSPC, "No space left on device")
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*/x.txt'"),
        replacing(path) as whole,
    ):
        _write_half(whole, error)
    with pytest.raises(KeyboardInterrupt), replacing(path) as whole:
        _write_half(whole, KeyboardInterrupt())
    assert path.read_text() == "old"
    with replacing(link) as whole:
        whole.write_text("new")
        assert path.read_text() == "old"
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)
    assert sorted(tmp_path.iterdir()) == [link, path]
    assert link.is_symlink()


def test_a_device_is_written_to_directly():
    with replacing(os.devnull) as whole:
        assert str(whole) == os.devnull


def test_an_unfinished_folder_is_removed(tmp_path):
    with unfinished(tmp_path / "folder") as folder:
        folder.mkdir()
        (folder / "file").write_text("half")
    assert not folder.exists()


@pytest.mark.parametrize("home", [None, "/dev/null/home"], ids=["none", "not writable"])
def test_without_a_home_nothing_is_kept_and_it_is_said(home, monkeypatch, capsys):
    import jax

    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compile_cache.Path, "home", none)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if home:
        monkeypatch.setenv("XDG_CACHE_HOME", home)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        compile_cache.switch_on()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    error = capsys.readouterr().err
    assert error.startswith("flax-attn: compiled programs are not kept: ")
    assert error.endswith(". Set XDG_CACHE_HOME\n")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr("flax_attn.cli.common.find_spec", lambda name: None)
    assert main(["bench", "--plot", "growth.png"]) == 64
    assert capsys.readouterr().err == "flax-attn: --plot needs matplotlib: pip install matplotlib\n"
