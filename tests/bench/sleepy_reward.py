"""A reward that takes its time and nothing else."""

import time
from typing import Any


def sleepy(sample: Any, seconds: float) -> float:
    time.sleep(seconds)
    return float(len(sample.response) % 2)
