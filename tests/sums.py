"""A prompt set that tests can be told of in a range: each row a sum, with its answer as label."""

import json
from pathlib import Path


def write_sums(path: Path, numbers: range) -> str:
    """Write the sums of `numbers` and 1; where they are."""
    path.write_text("".join(json.dumps({"prompt": f"{at}+1=", "label": str(at + 1)}) + "\n" for at in numbers))
    return str(path)
