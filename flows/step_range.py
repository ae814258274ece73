"""Which finished steps of a run a command is about."""


def step_range(text: str, finished: int) -> range:
    """`a:b`, `a:`, `:b` or one number as steps of a run with `finished` ones; ValueError for what is not among them."""
    begin, colon, end = text.partition(":")
    try:
        first = int(begin or 0)
        last = int(end or finished) if colon or not text else first + 1
    except ValueError:
        raise ValueError(f"--steps {text!r} is no range: give a:b, such as 0:5, or one step") from None
    if not finished:
        raise ValueError("the run has finished no step yet")
    if not 0 <= first < last <= finished:
        raise ValueError(f"--steps {text!r} names no finished steps: the run has steps 0 to {finished - 1}")
    return range(first, last)
