"""Rewards without meaning, to try a loop or to measure what a reward is worth."""

import hashlib
import json
import secrets

from milepost.tasks.verdict import Sample, Verdict


def random(sample: Sample) -> Verdict:
    """0.0 or 1.0 by chance, each time anew: a run that is graded again or replayed has other rewards."""
    return Verdict(float(secrets.randbelow(2)))


def deterministic_random(sample: Sample, *, seed: str = "") -> Verdict:
    """0.0 or 1.0, as the first byte of the SHA-256 of seed, prompt (as JSON) and response is even or odd.

    Nothing else counts, so grading again and replaying give the same, and equal responses to a prompt are paid alike.
    """
    text = f"{seed}{json.dumps(sample.prompt)}{sample.response}"
    return Verdict(float(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[0] % 2))
