"""The process of an SGLang server, with small servers in its place that fail as it does."""

import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from milepost.engines.sglang_client import SglangRefused, ask
from milepost.engines.sglang_server import SglangFailed, SglangServer, last_words

SERVING = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, '{"pid": %d}' % child.pid)
    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.rfile.read(length)
        if self.path == "/refuse":
            return self.answer(400, '{"error": {"message": "I will not."}}')
        self.answer(200, '{"meta_info": {}}')
    def answer(self, code, text):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *args):
        pass
http.server.HTTPServer((sys.argv[2], int(sys.argv[4])), Handler).serve_forever()
"""


def start(code: str, folder: Path, *, seconds: float = 30, died: threading.Event | None = None) -> SglangServer:
    return SglangServer(
        [sys.executable, "-c", code],
        host="127.0.0.1",
        environment={},
        log=folder / "server.log",
        timeout_seconds=seconds,
        on_death=(died or threading.Event()).set,
    )


def children(title: str) -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if title in " ".join(one.cmdline())]


def test_a_server_that_ends_at_its_start_says_its_last_error_and_where_its_log_is(tmp_path: Path) -> None:
    code = "print('ValueError: no such backend'); print('Received sigquit from a child'); raise SystemExit(3)"
    with pytest.raises(SglangFailed, match=r"ended with code 3: ValueError: no such backend \| .*sigquit.*server.log"):
        start(code, tmp_path)


def test_what_a_server_said_last_is_told_once_and_without_a_tracebacks_pointers(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("starting\n  raise ValueError(x)\n    ^^^^^~~~~\nValueError: no such backend\nended\n")
    assert last_words(log) == "ValueError: no such backend | starting | raise ValueError(x) | ended"


def test_a_command_line_that_is_refused_is_told_before_the_usage_around_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("usage: serve [-h]\n  [--port PORT]\nsglang serve: error: argument --x: invalid value: 'y'\n")
    assert last_words(log).startswith("sglang serve: error: argument --x: invalid value: 'y' | usage")


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    with pytest.raises(SglangFailed, match="was not ready within 1 s: still at it"):
        start("import time; print('still at it', flush=True); time.sleep(611)", tmp_path, seconds=1)
    assert not children("sleep(611)")


def test_a_port_that_somebody_took_meanwhile_is_replaced(tmp_path: Path) -> None:
    taken = f"""
from pathlib import Path
mark = Path({str(tmp_path / "mark")!r})
if not mark.exists():
    mark.touch()
    raise OSError("[Errno 98] error while attempting to bind: address already in use")
"""
    server = start(taken + SERVING, tmp_path)
    assert ask(server.url, "/health", timeout_seconds=5)
    assert "already in use" in (tmp_path / "server.log.1").read_text()
    server.stop()


def test_stopping_ends_a_server_with_all_its_children_and_is_no_death(tmp_path: Path) -> None:
    died = threading.Event()
    server = start(SERVING, tmp_path, died=died)
    child = psutil.Process(ask(server.url, "/health", timeout_seconds=5)["pid"])
    server.stop()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() and not died.is_set()


def test_a_server_that_dies_is_noticed_and_its_children_end(tmp_path: Path) -> None:
    died = threading.Event()
    server = start(SERVING, tmp_path, died=died)
    child = psutil.Process(ask(server.url, "/health", timeout_seconds=5)["pid"])
    psutil.Process(server.pid).kill()
    assert died.wait(10)
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()


def test_a_server_and_its_children_end_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from milepost.engines.sglang_server import SglangServer
server = SglangServer([sys.executable, "-c", {SERVING!r}], host="127.0.0.1", environment={{}},
                      log=Path({str(tmp_path / "server.log")!r}), timeout_seconds=30, on_death=print)
print(server.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    family = [server, *server.children()]
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs(family, timeout=10)[1]


def test_a_refusal_is_the_servers_sentence_and_silence_is_a_lost_connection(tmp_path: Path) -> None:
    server = start(SERVING, tmp_path)
    with pytest.raises(SglangRefused, match=r"refused /refuse \(400\): I will not"):
        ask(server.url, "/refuse", {}, timeout_seconds=5)
    server.stop()
    with pytest.raises(ConnectionError, match="did not answer /health"):
        ask(server.url, "/health", timeout_seconds=5)
