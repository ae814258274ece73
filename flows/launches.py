"""What starts each service: its command, its environment, and how one sees that it is ready."""

import contextlib
import json
import os
import secrets
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from milepost.flows import service_state
from milepost.storage import files
from milepost.storage.lineage import artifact_location, sqlite_uri

HOST = "127.0.0.1"
PREFECT_PORT = 4200
MLFLOW_PORT = 5000

# Three events a task run are two thirds of what a step adds to the database, and say what its states say: they are kept
# for the triggers and pages that look at them at once, and all others for Prefect's own seven days.
TASK_EVENT_SECONDS = 300
TASK_EVENTS = tuple(f"prefect.task-run.{state}" for state in ("Pending", "Running", "Completed"))

_SMALL_MACHINE_BYTES = 64 * 1024**3
_SMALL_OBJECT_STORE = 256 * 1024**2
_OBJECT_STORE = 4 * 1024**3


@dataclass(frozen=True)
class Launch:
    """A service to start. It is ready when `probe` answers and, unless empty, `ready_file` exists."""

    name: str
    command: list[str]
    environment: dict[str, str]
    url: str
    probe: str
    root: str = ""
    scratch: str = ""
    ready_file: str = ""


def prefect_launch(former: str = "") -> Launch:
    """The Prefect server of `up`, with its pages; where the `former` one was, if it has died."""
    return _prefect("prefect", _port(PREFECT_PORT, former), [])


def own_prefect_launch() -> Launch:
    """The Prefect server of one run: no pages, and nothing scheduled, because it will not be there when it is due."""
    return _prefect("prefect-own", service_state.free_ports(1)[0], ["--no-ui", "--no-scheduler", "--no-late-runs"])


def _prefect(name: str, port: int, options: list[str]) -> Launch:
    """Its history lasts, as making the database takes longer than starting; browsers may read it from its own page."""
    base = f"http://{HOST}:{port}"
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    environment.setdefault("PREFECT_HOME", str(service_state.state_folder() / "prefect"))
    environment |= {
        "PREFECT_UI_API_URL": f"{base}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # In memory, as by default, the slots of a run that is killed while the server starts again are lost for good.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"{base},http://localhost:{port}",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS": str(TASK_EVENT_SECONDS),
        "PREFECT_SERVER_SERVICES_DB_VACUUM_EVENT_RETENTION_OVERRIDES": json.dumps(
            dict.fromkeys(TASK_EVENTS, TASK_EVENT_SECONDS)
        ),
        "DO_NOT_TRACK": "1",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port), *options]
    return Launch(name, command, environment, f"{base}/api", f"{base}/api/health")


def mlflow_launch(root: str, former: str = "") -> Launch:
    """An MLflow server over the database in `root`, in two processes where the default starts ten."""
    folder = local_folder(root)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ValueError(f"root {root!r} cannot hold MLflow's database ({error}): choose another folder") from error
    store = sqlite_uri(folder)
    port = _port(MLFLOW_PORT, former)
    url = f"http://{HOST}:{port}"
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store, "--no-serve-artifacts"]
    command += ["--default-artifact-root", str(artifact_location(store))]
    return Launch("mlflow", command, environment, url, f"{url}/health", root=folder)


def ray_launch() -> Launch:
    """A Ray head on ports of its own, locked by a token because it listens on every address.

    Its folder is its own: in the default one every `ray.init()` on the machine would join it. The path is short because
    sockets are in it.
    """
    ensure_ray_token()
    gcs, client, agent = (str(port) for port in service_state.free_ports(3))
    scratch = tempfile.mkdtemp(prefix="milepost-ray-", dir="/tmp")
    small = psutil.virtual_memory().total < _SMALL_MACHINE_BYTES
    store = str(_SMALL_OBJECT_STORE if small else _OBJECT_STORE)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--port", gcs, "--ray-client-server-port", client, "--dashboard-agent-listen-port", agent]
    command += ["--include-dashboard", "false", "--temp-dir", scratch]
    command += ["--num-cpus", str(os.cpu_count() or 1), "--object-store-memory", store]
    address = f"{HOST}:{gcs}"
    ready = os.path.join(scratch, "ray_current_cluster")  # written once the node is up, after its port is open
    environment = os.environ | {"RAY_AUTH_MODE": "token"}
    return Launch("ray", command, environment, address, address, scratch=scratch, ready_file=ready)


def ray_token_file() -> Path:
    """Where Ray looks for its token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def ensure_ray_token() -> None:
    """Make a token for its owner only, unless there is one: a head asks for it and does not make it."""
    path = ray_token_file()
    if os.environ.get("RAY_AUTH_TOKEN") or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))


def local_folder(root: str) -> str:
    """The folder for a local database: the root itself, or the state folder when the root is not on this machine."""
    return os.path.abspath(files.filesystem(root)[1]) if files.is_local(root) else str(service_state.state_folder())


def _port(preferred: int, former: str) -> int:
    """The port of the former address, where others still look for it, else the preferred one, else any free one."""
    wanted = [port for port in (urlsplit(former).port, preferred) if port and service_state.port_is_free(port)]
    return wanted[0] if wanted else service_state.free_ports(1)[0]
