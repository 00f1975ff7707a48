"""The devices of an engine, and how its arrays are cut among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_AXIS = "tp"


class Devices:
    """A mesh with one axis, along which layers are cut (tensor parallelism): XLA adds the collectives."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self._mesh = Mesh(np.array(devices), (_AXIS,))
        self.size = len(devices)

    def cut(self, axis: int | None) -> NamedSharding:
        """Of arrays that are cut along an axis, or held whole by each device."""
        axes = () if axis is None else (*[None] * axis, _AXIS)
        return NamedSharding(self._mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]  # JAX leaves it so

    def put(self, array: Any, axis: int | None = None) -> jax.Array:
        """A host's array on the devices."""
        placed: jax.Array = jax.device_put(array, self.cut(axis))
        return placed

    def keep(self, array: jax.Array, axis: int | None = None) -> jax.Array:
        """Within a compiled function: an array that is cut so."""
        kept: jax.Array = jax.lax.with_sharding_constraint(array, self.cut(axis))  # type: ignore[no-untyped-call]
        return kept

    def apart(
        self, function: Callable[..., jax.Array], arrays: Sequence[tuple[jax.Array | None, int | None]], out: int
    ) -> jax.Array:
        """Within a compiled function: of each device's parts of arrays, each with the axis that it is cut along, which
        XLA does not see into. out: the result's axis."""
        if self.size == 1:
            return function(*(array for array, _ in arrays))
        specs = tuple(self.cut(axis).spec for _, axis in arrays)
        parts = jax.shard_map(
            function, mesh=self._mesh, in_specs=specs, out_specs=self.cut(out).spec, check_vma=False
        )
        return parts(*(array for array, _ in arrays))
