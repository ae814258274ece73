"""What graders may reach: no network unless asked for, bounded memory, and nothing that they start outlives them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from milepost.engines.grader_process import Call, GraderProcess
from milepost.engines.isolation import probe

pytestmark = pytest.mark.slow

CONNECT = Call("socket:create_connection", (["127.0.0.1", 9], 1))
# As in a container that allows no namespace: no user namespace may be made in this one, and no capability is left.
FORBIDDEN = [
    *("unshare", "-Ur", "sh", "-c"),
    'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --inh-caps=-all --bounding-set=-all "$@"',
    *("sh", sys.executable),
]


@pytest.fixture
def alone() -> Iterator[GraderProcess]:
    process = GraderProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def forbidding() -> list[str]:
    if not probe().sandbox:
        pytest.skip("the kernel forbids namespaces here already")
    return FORBIDDEN


def in_forbidding(command: list[str], program: str, *args: str) -> str:
    done = subprocess.run([*command, "-c", program, *args], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_a_grader_has_no_network_unless_it_is_asked_for(alone: GraderProcess) -> None:
    if probe().network:
        assert "Network is unreachable" in str(alone.ask(CONNECT, timeout_seconds=10).reason)
    with_network = GraderProcess(network=True)
    assert "Connection refused" in str(with_network.ask(CONNECT, timeout_seconds=10).reason)
    with_network.close()


def test_where_namespaces_are_forbidden_python_is_refused_sockets(forbidding: list[str]) -> None:
    program = (
        "from milepost.engines.grader_process import Call, GraderProcess\n"
        "process = GraderProcess()\n"
        "for name, args in (('create_connection', (['127.0.0.1', 9], 1)), ('gethostbyname', ('a.b',))):\n"
        "    print(process.ask(Call(f'socket:{name}', args), timeout_seconds=10).reason)\n"
        "print(process.ask(Call('operator:add', (1, 2)), timeout_seconds=10).value)\n"
        "process.close()"
    )
    first, second, third = in_forbidding(forbidding, program).splitlines()
    assert "set reward.network" in first and "set reward.network" in second and third == "3"


def test_where_namespaces_are_forbidden_code_is_kept_in_by_hooks(forbidding: list[str], tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    program = (
        "import json, sys\n"
        "from milepost.engines.sandbox import Case, Limits, run\n"
        "for code in json.loads(sys.argv[1]):\n"
        "    (found,) = run(code, [Case(call='f')], Limits(case_seconds=1.0))\n"
        "    print(json.dumps([found.value, found.reason]))"
    )
    bodies = [
        "return 3",
        "import os; os.remove(path)",
        "open(path, 'w')",
        "return open('/proc/self/environ').read()",
        "import os; os.fork()",
        "import socket; socket.socket()",
        "import subprocess; subprocess.run(['true'])",
        "import shutil; shutil.rmtree(path)",
        "open('mine', 'w').write('x'); return open('mine').read()",
        "[0 for _ in iter(int, 1)]",
    ]
    codes = [f"path = {str(tmp_path / 'kept')!r}\ndef f(): {body}" for body in bodies]
    found = [json.loads(line) for line in in_forbidding(forbidding, program, json.dumps(codes)).splitlines()]
    assert found[0] == [3, ""] and found[8] == ["x", ""] and found[9] == [None, "timeout"]
    assert all(reason.startswith("PermissionError: not in this sandbox") for _, reason in found[1:8]), found
    assert (tmp_path / "kept").read_text() == "x"


def test_nothing_that_a_grader_starts_outlives_it(alone: GraderProcess, tmp_path: Path) -> None:
    script = tmp_path / "daemon.sh"
    script.write_text(f"#!/bin/sh\nsetsid sh -c 'echo $$ >> {tmp_path}/ids; sleep 60' & sleep 60\n")
    script.chmod(0o755)
    for end in (Call("subprocess:call", ([str(script)],)), Call("tests.test_isolation:leave_behind", (str(script),))):
        assert alone.ask(end, timeout_seconds=1.5).reason in ("timeout", "crash")
    alone.close()
    started = [int(line) for line in (tmp_path / "ids").read_text().split()]
    assert len(started) >= 2
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, started))


def leave_behind(script: str) -> None:
    """Start a daemon in a session of its own, and end the grader."""
    subprocess.Popen([script], start_new_session=True)
    time.sleep(0.5)
    os._exit(3)
