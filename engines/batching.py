"""Which samples go together, under the names that others import."""

from milepost.storage.packing import balance as balance
from milepost.storage.packing import pack as pack
from milepost.storage.packing import pack_padded as pack_padded
