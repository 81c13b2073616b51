"""Keys and values with room to grow: a compiled step writes in place, a forward reads them as its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

FIRST_ROOM = 512  # positions; doubled when they are full


class RoomLayer(DynamicLayer):
    """A layer of a growing cache whose tensors are the front part of larger ones, so that a token is written
    and not concatenated.

    rooms: (keys, values), each (B, G, P, D) with P >= length, or None before the first token. keys, values:
    what transformers reads, (B, G, length, D). changes: a count that all layers of a cache raise when
    rooms or length become others; a list, and not the cache's method, so that a dropped cache is freed at
    once. Not for use under autograd.
    """

    def __init__(self, changes: list[int]) -> None:
        self._changes = changes  # first: what follows assigns keys and values
        super().__init__()
        self.rooms: tuple[Tensor, Tensor] | None = None
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @property
    def keys(self) -> Tensor | None:
        return None if self.rooms is None else self.rooms[0][:, :, : self.length]

    @keys.setter
    def keys(self, tensor: Tensor | None) -> None:
        self._take(tensor, 0)

    @property
    def values(self) -> Tensor | None:
        return None if self.rooms is None else self.rooms[1][:, :, : self.length]

    @values.setter
    def values(self, tensor: Tensor | None) -> None:
        self._take(tensor, 1)

    def _take(self, tensor: Tensor | None, part: int) -> None:
        """What transformers' own methods assign (crop, a selection of rows): the front of the same room, or
        tensors of their own, which are then the room."""
        self._changes[0] += 1
        if tensor is None or self.rooms is None:
            self.rooms, self.length = None, 0
            return
        room = self.rooms[part]
        same = tensor.data_ptr() == room.data_ptr() and tensor.stride() == room.stride()
        if not (same and tensor.shape[0] == room.shape[0]):
            rooms = [*self.rooms]
            rooms[part] = tensor
            self.rooms = (rooms[0], rooms[1])
        if part == 1:  # keys come first, always both
            self.length = tensor.shape[-2]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """key_states (B, G, T, D), value_states (B, G, T, E) behind what is there; returns all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, end = self.length, self.length + key_states.shape[-2]
        self.reserve(end, key_states, value_states)
        assert self.rooms is not None
        for room, new in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, first:end] = new
        self.length = end
        self._changes[0] += 1
        return self.rooms[0][:, :, :end], self.rooms[1][:, :, :end]

    def reserve(self, length: int, key_states: Tensor, value_states: Tensor) -> None:
        """Room for `length` positions of tensors like these (B, G, T, D)."""
        if self.rooms is not None and min(room.shape[2] for room in self.rooms) >= length:
            return
        size = FIRST_ROOM
        while size < length:
            size *= 2
        made = []
        for part, like in enumerate((key_states, value_states)):
            room = like.new_empty((*like.shape[:2], size, like.shape[3]))
            if self.rooms is not None and self.length:
                room[:, :, : self.length] = self.rooms[part][:, :, : self.length]
            made.append(room)
        self.rooms = (made[0], made[1])
        self._changes[0] += 1

    def get_seq_length(self) -> int:
        return self.length


class RoomCache(Cache):
    """A cache of `RoomLayer`s, one per layer of the base."""

    def __init__(self, layers: int) -> None:
        self._changes = [0]
        own = [RoomLayer(self._changes) for _ in range(layers)]
        super().__init__(layers=[*own])
        self._own = own
        # what `rooms` gave, their room, and the count of changes then
        self._ready: tuple[list[Tensor], list[Tensor], int, int] | None = None

    @property
    def length(self) -> int:
        """Positions that it holds."""
        return self.layers[0].get_seq_length()  # type: ignore[union-attr]

    def rooms(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """Keys and values of every layer, with room for one more token; None where a layer has not been
        filled, or more than one text is in it."""
        length = self._own[0].length
        ready = self._ready
        if ready is None or length >= ready[2] or ready[3] != self._changes[0]:
            keys, values = [], []
            for layer in self._own:
                if layer.rooms is None or layer.length != length or layer.rooms[0].shape[0] != 1:
                    return None
                layer.reserve(length + 1, *layer.rooms)
                keys.append(layer.rooms[0])
                values.append(layer.rooms[1])
            room = min(tensor.shape[2] for tensor in keys + values)
            ready = self._ready = keys, values, room, self._changes[0]
        return ready[0], ready[1]

    def advance(self) -> None:
        """One more token has been written into every layer."""
        for layer in self._own:
            layer.length += 1

    def take_back(self) -> None:
        """Forget that token, to write it again."""
        for layer in self._own:
            layer.length -= 1


def new_cache(config: Any) -> RoomCache | None:
    """An empty cache for a base; None where it does not keep all keys and values of every layer (sliding
    windows, recurrent states, layers that share)."""
    text = config.get_text_config(decoder=True)
    layers = DynamicCache(config=text).layers
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        return None
    return RoomCache(len(layers))
