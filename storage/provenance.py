"""What code made a run: the commit, the hash of uncommitted changes, and the installed packages."""

import subprocess
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from milepost.storage import files


@dataclass(frozen=True)
class Provenance:
    """`commit` is empty outside a git checkout; `diff_digest` is empty when nothing was changed."""

    commit: str
    diff_digest: str
    packages: list[str]
    packages_digest: str


def _git(*arguments: str) -> bytes:
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout


def installed_packages() -> list[str]:
    """`name==version` of every installed distribution, sorted: enough to build the environment again."""
    found = {f"{item.metadata['Name'].lower()}=={item.version}" for item in distributions() if item.metadata["Name"]}
    return sorted(found)


def provenance() -> Provenance:
    packages = installed_packages()
    diff = _git("diff", "HEAD")
    return Provenance(
        commit=_git("rev-parse", "HEAD").decode().strip(),
        diff_digest=files.digest_of(diff) if diff else "",
        packages=packages,
        packages_digest=files.digest_of("\n".join(packages).encode()),
    )
