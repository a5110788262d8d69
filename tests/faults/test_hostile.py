"""Files, servers and processes that mean no good, or ended badly."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers.model_server import download
from onnx import helper, numpy_helper
from PIL import Image

import zoo
from pipelines.core import files, progress
from pipelines.core.errors import RequestError, ZooError, plain
from pipelines.models import transfer
from pipelines.models.folder import open_folder
from zoo import __main__
from zoo.cli import app as cli
from zoo.cli import output
from zoo.recommenders.data import line_reader, sources

DEEP = "[" * 200_000 + "]" * 200_000


def said(capsys, *arguments):
    """The one line of a command that is refused."""
    with pytest.raises(SystemExit) as end:
        cli.call(list(map(str, arguments)))
    out, err = capsys.readouterr()
    assert (end.value.code, out, len(err.splitlines())) == (2, "", 1), err
    return err


# ------------------------------------------------------------------------------------------------------------- servers


class Endless(BaseHTTPRequestHandler):
    """Sends for ever, in chunks, so that no Content-Length says how much there is."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        block = bytes(1 << 16)
        try:
            while True:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(block), block))
                self.server.sent += len(block)
        except OSError:
            self.close_connection = True


@pytest.fixture
def endless():
    with HTTPServer(("127.0.0.1", 0), Endless) as server:
        server.sent = 0
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_a_server_that_never_ends_fills_no_disk(endless, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    target = tmp_path / "x"
    with pytest.raises(ZooError, match="size over 100000, expected 100000"):
        download(f"http://127.0.0.1:{endless.server_port}/x", target, size=100_000, sha256="0" * 64)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_a_short_digest_says_that_it_is_one(tmp_path, caplog):
    (tmp_path / "x").write_bytes(b"weights")
    digest = files.sha256(tmp_path / "x")
    for digits, count in ((64, 0), (8, 1)):
        target = tmp_path / f"{digits}"
        transfer.ensure(target, 7, digest[:digits], lambda path: path.write_bytes(b"weights"))
        assert len(caplog.records) == count
    assert "is only checked by the first 8 digits of its SHA-256" in caplog.text


# --------------------------------------------------------------------------------------------------------------- names


@pytest.fixture
def named(tmp_path):
    """A model whose operators and outputs have names that mean something to a terminal or to rich."""
    weight = numpy_helper.from_array(np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), "w")
    ends = [helper.make_tensor_value_info(name, 1, ["n", size]) for name, size in (("x", 8), ("block[a]/fc[/b]", 4))]
    node = helper.make_node("MatMul", ["x", "w"], ["block[a]/fc[/b]"], name="\x1b[31mred[bold]")
    graph = helper.make_graph([node], "one", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(1).normal(size=(40, 8)).astype(np.float32))
    return tmp_path


def test_names_of_a_model_are_shown_as_they_are(named, capsys):
    command = ["quantize", named / "m.onnx", "--calibration-data", named / "x.npz", "-o", named / "int8.onnx", "--all"]
    cli.call(list(map(str, command)))
    out, _ = capsys.readouterr()
    assert "\x1b" not in out
    assert "block[a]/fc[/b]" in out or "[31mred[bold]" in out


def test_progress_and_errors_speak_to_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    with progress.progress("\x1b]0;title\x07 x[/b]", 2) as advance:
        advance(1)
    with pytest.raises(SystemExit):
        output.fail("no \x1b[2Jmodel", 2)
    err = capsys.readouterr().err
    assert "\x1b" not in err and "\x07" not in err
    assert "x[/b]: 1 of 2" in err and r"no \x1b[2Jmodel" in err
    assert plain("ä 中 \t") == "ä 中 \\t"


def test_weights_outside_their_folder_are_refused(tmp_path):
    card = {"name": "m", "entry": "resnet50", "description": "d", "files": {}, "weights": {"file": "../secret.pth"}}
    (tmp_path / "card.json").write_text(json.dumps(card))
    with pytest.raises(RequestError, match="weights' file '../secret.pth', expected letters"):
        _ = open_folder(tmp_path, zoo.entry).weights


# --------------------------------------------------------------------------------------------------------------- files


def test_a_gzip_file_whose_data_are_damaged(tmp_path, capsys):
    packed = bytearray(gzip.compress(b"Two children play in the snow.\n" * 5000, mtime=0))
    packed[len(packed) // 2 :] = os.urandom(len(packed) - len(packed) // 2)
    (tmp_path / "t.txt.gz").write_bytes(packed)
    assert "cannot read" in said(capsys, "run", "multi30k-en-de", tmp_path / "t.txt.gz", "-o", tmp_path / "o.txt")
    assert not (tmp_path / "o.txt").exists()


@pytest.mark.parametrize("option", ["--table", "--preprocess"])
def test_json_nested_deeper_than_any_of_ours(option, named, capsys):
    (named / "deep.json").write_text(DEEP)
    (named / "photos").mkdir()
    Image.new("RGB", (4, 4)).save(named / "photos" / "1.png")
    data = [] if option == "--table" else ["--calibration-data", named / "photos"]
    command = ["quantize", named / "m.onnx", *data, option, named / "deep.json"]
    assert "deep.json is not valid JSON" in said(capsys, *command, "-o", named / "int8.onnx")


def test_a_card_nested_deeper_than_any_of_ours(tmp_path, capsys):
    (tmp_path / "card.json").write_text(DEEP)
    assert "card.json is not valid JSON" in said(capsys, "info", tmp_path)


def test_a_full_disk_as_numpy_says_it(tmp_path):
    with pytest.raises(files.DiskFull, match="No space left on device; free space"), files.replacing(tmp_path / "x"):
        raise OSError("26624000 requested and 20971520 written")


# ----------------------------------------------------------------------------------------------------------- processes


WRITER = """
import sys, time
from pipelines.core import files
with files.replacing(sys.argv[1]) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writer(tmp_path):
    """A process in the middle of writing out.json."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "out.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        yield process
        process.kill()


def test_what_a_killed_writer_left_is_swept_by_the_next(writer, tmp_path):
    writer.send_signal(signal.SIGKILL)
    writer.wait(30)
    other = tmp_path / ".out-else.json"  # no name of ours
    other.write_text("")
    assert len(list(tmp_path.iterdir())) == 2
    files.write_json(tmp_path / "out.json", 1)
    assert sorted(tmp_path.iterdir()) == [other, tmp_path / "out.json"]


def test_what_a_living_writer_holds_is_left_alone(writer, tmp_path):
    (held,) = tmp_path.iterdir()
    files.write_json(tmp_path / "out.json", 1)
    assert held.read_text() == "half"


def handles(pid, number):
    """Whether a process has a handler of its own for SIGTERM, as for every signal once `zoo` begins."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & caught >> (number - 1) & 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("delay", [0, 0.2, 0.4, 0.8])
def test_signals_at_any_moment_end_in_order(number, code, delay, tmp_path):
    command = [sys.executable, "-m", "zoo", "run", "multi30k-en-de", "-", "-o", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not handles(process.pid, number):  # Python itself starts, which takes long where others are at work
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err and out == ""


SWALLOWED = """
import os, sys, time, types, weakref
import zoo, zoo.__main__

class Module: ...

def run():
    module = Module()
    reference = weakref.ref(module, lambda _: os.kill(os.getpid(), int(sys.argv[1])))
    del module
    time.sleep(30)
    print("went on")

def run_text():
    exec("os.kill(os.getpid(), int(sys.argv[1])); time.sleep(30)", globals())

import zoo.cli.app; zoo.cli.app = sys.modules["zoo.cli.app"] = types.SimpleNamespace(main=globals()[sys.argv[2]])
zoo.__main__.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("where", ["run", "run_text"])
def test_a_signal_in_a_callback_or_in_a_text_that_exec_runs_ends_in_order(where, number, code, tmp_path):
    (tmp_path / "swallowed.py").write_text(SWALLOWED)
    command = [sys.executable, "-m", "swallowed", str(int(number)), where]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code and done.stdout == ""
    assert done.stderr == ("zoo: interrupted\n" if code == 130 else "")


def test_a_log_without_rows_is_given_up_soon(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(line_reader, "MAX_SKIPPED", 100_000)
    monkeypatch.setattr(sources, "BLOCK", 1 << 16)
    (tmp_path / "rows.tsv.gz").write_bytes(gzip.compress(b"\n" * 1_000_000))
    line = said(capsys, "run", "wide-deep-criteo", tmp_path / "rows.tsv.gz", "-o", "-", "--on-error", "skip")
    assert "unusable among the first" in line and "found 1 column" in line
    assert int(line.split("first ")[1].split(" ")[0].replace(",", "")) < 1_000_000


@pytest.mark.parametrize(("end", "code"), [(SystemExit(143), 143), (KeyboardInterrupt(), 130)])
def test_a_signal_that_an_import_makes_something_else_of(end, code, monkeypatch, capsys):
    def interrupted():
        raise ImportError("initialization failed") from end

    monkeypatch.setattr(cli, "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == code and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_whose_exception_is_lost_ends_the_command_all_the_same(number, code):
    script = f"""
import contextlib, signal
from zoo import __main__
from zoo.cli import app as cli
def library():
    with contextlib.suppress(BaseException):
        signal.raise_signal({int(number)})
        sum(range(1000))
cli.main = library
__main__.main()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == code and "Traceback" not in ended.stderr


CRASHING = """
import atexit, os, signal, sys, time
from pipelines.core import files
from zoo import __main__
from zoo.cli import app

atexit.register(os.abort)  # as engines whose threads still run when Python ends

def call(arguments):
    with files.replacing("out.csv") as temporary:
        temporary.write_text("half")
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        finally:
            if sys.argv[1] == "unwinding":
                os.abort()

app.call = call
__main__.main()
"""


@pytest.mark.parametrize(("where", "code"), [("unwinding", -signal.SIGABRT), ("exit", 143)])
def test_a_crash_after_a_signal_leaves_no_hidden_file(where, code, tmp_path):
    ended = subprocess.run([sys.executable, "-c", CRASHING, where], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert not list(tmp_path.iterdir())


FAILING = """
import atexit, os
from zoo import __main__

atexit.register(os.abort)  # as threads of Arrow and of engines that free Python objects when Python ends
__main__.main()
"""


def test_a_command_that_fails_ends_without_the_shutdown_of_python_and_leaves_no_copy_of_stdin(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", FAILING, "train", "deepfm", "--data", "-", "--output", "out"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        input="click,x\n1,2\n0,2,3\n",
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2 and "Expected 2 columns, got 3" in ended.stderr
    assert not list(tmp_path.glob("zoo-stdin-*"))


def test_other_exceptions_stay_what_they_are(monkeypatch):
    monkeypatch.setattr(cli, "main", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        __main__.main()
