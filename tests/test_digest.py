"""Digests of tensors: their values are for ever, and only a few tensors are alive while they are worked out."""

import hashlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from milepost.engines.digest import WAITING, combined_digest, tensor_digest, tensor_digests, weights_digest

Named = tuple[str, torch.Tensor]


def test_a_digest_is_of_type_shape_and_bytes() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    content = b"torch.bfloat16(2, 2)" + bytes.fromhex("803f 0040 4040 8040")
    assert tensor_digest(tensor) == hashlib.blake2b(content, digest_size=16).hexdigest()
    assert tensor_digest(tensor.t()) == tensor_digest(tensor.t().contiguous()) != tensor_digest(tensor)


def test_the_digest_of_weights_is_that_of_their_digests_in_any_order_and_number_of_threads() -> None:
    tensors = {str(size): torch.arange(float(size)) for size in (100_000, 3, 0, 5_000)}
    wanted = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    for threads in (1, 3):
        assert tensor_digests(tensors.items(), threads=threads) == wanted
    assert weights_digest(reversed(tensors.items())) == combined_digest(wanted)


def test_few_tensors_are_alive_while_they_are_digested() -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    peak = 0

    def made() -> Iterator[Named]:
        nonlocal peak
        for number in range(40):
            tensor = torch.full((1000,), float(number))
            alive.add(tensor)
            peak = max(peak, len(alive))
            yield str(number), tensor
            del tensor

    assert len(tensor_digests(made(), threads=2)) == 40
    assert peak <= 2 + WAITING + 1


class Large(torch.Tensor):
    """One that takes until `hashed` is set to read."""

    hashed = threading.Event()

    def to(self, *place: Any, **options: Any) -> torch.Tensor:
        assert Large.hashed.wait(20), "those after it were never asked for"
        return torch.zeros(1)


def test_a_large_tensor_does_not_hold_up_those_after_it() -> None:
    def made() -> Iterator[Named]:
        yield "large", torch.zeros(1).as_subclass(Large)
        yield from ((str(number), torch.zeros(1)) for number in range(20))
        Large.hashed.set()

    assert len(tensor_digests(made(), threads=2)) == 21
