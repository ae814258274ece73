"""Purges, checked: each record names the one before, and every table is what they left, with tombstones as they say."""

from milepost.storage import files, purges
from milepost.storage.purges import Purge
from milepost.storage.runs import RunFolder
from milepost.storage.tables import read_bytes
from milepost.storage.tombstones import entombed
from milepost.storage.verify_tables import RESTORE, Fault


def check_purges(folder: RunFolder) -> tuple[list[Fault], list[str]]:
    """What is wrong with the purges of a run, and a note for each of them."""
    found = purges.purges(folder.uri)
    faults, previous = [], ""
    for purge in found:
        uri = purges.record_uri(folder.uri, purge.number)
        if purge.previous != previous:
            problem = f"names {purge.previous[:12]!r} as the purge before, which is {previous[:12]!r}"
            faults.append(Fault(uri, problem, RESTORE))
        previous = files.digest_of(files.read(uri))
    killed = {purge.number for purge in purges.unfinished(folder.uri)}
    for file in dict.fromkeys(table.file for purge in found for table in purge.tables):
        faults += _check_table(folder, file, [purge for purge in found if purge.number not in killed])
    return faults, [_note(folder, purge, purge.number in killed) for purge in found]


def _check_table(folder: RunFolder, file: str, done: list[Purge]) -> list[Fault]:
    """The rows of purged prompts are tombstones, and the table is one that a purge left."""
    uri = files.join(folder.uri, file)
    try:
        data = files.read(uri)
    except FileNotFoundError:
        return [Fault(uri, "is missing, and a purge names it", RESTORE)]
    left = [(purge, table.after) for purge in done for table in purge.tables if table.file == file]
    if not left:
        return []
    digest, last = files.digest_of(data), left[-1][1]
    if digest != last and not purges.explains(uri, last, digest):
        return [Fault(uri, f"has digest {digest[:12]}, its last purge left {last[:12]}", RESTORE)]
    table = read_bytes(data)
    prompts = {prompt for purge, _ in left for prompt in purge.prompts}
    if not entombed(table, prompts).equals(table):
        return [Fault(uri, "still tells what a purged prompt said", f"milepost purge {folder.run_id} again")]
    return []


def _note(folder: RunFolder, purge: Purge, is_killed: bool) -> str:
    if is_killed:
        ids = " ".join(f"--prompt {prompt}" for prompt in purge.prompts)
        return f"a purge of {purge.date} did not end: `milepost purge {folder.run_id} {ids}` finishes it"
    because, ids = f" ({purge.reason})" if purge.reason else "", ", ".join(purge.prompts)
    return f"{len(purge.tables)} tables purged on {purge.date}{because} of what prompts said: {ids}"
