"""shared_shrink: ``(x a_shared^T) * d`` for every slice, the specification."""

from __future__ import annotations

import torch

from scute_kernels.plan import live_tiles
from scute_kernels.table import BASIS, SHARED_A, SHARED_A_STRIDE, SHARED_BASIS, SHARED_RANK, D, basis_part, part


def shared_shrink(
    x: torch.Tensor,
    tiles: torch.Tensor,
    routes: torch.Tensor,
    leading: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    first_site: int,
    u: torch.Tensor,
) -> None:
    for tile, members, slots in live_tiles(tiles[:, : int(leading)]):
        products: dict[int, torch.Tensor] = {}  # by basis: the slices read the same x
        for i in range(u.shape[2]):
            site = first_site + i
            route = routes[tile, site].tolist()
            basis, rank = route[SHARED_BASIS], route[SHARED_RANK]
            if basis < 0:
                continue
            if basis not in products:
                a = basis_part(arena, route[SHARED_A], route[SHARED_A_STRIDE], rank, x.shape[1])
                products[basis] = x[members].float() @ a.float().T
            for slot in slots.unique().tolist():
                fields = table[slot, site].tolist()
                if fields[BASIS] < 0:
                    continue
                of_slot = slots == slot
                product = products[basis][of_slot]
                if fields[D] >= 0:
                    product = product * part(arena, fields[D], rank).float()
                written = rank if u.dtype == torch.float32 else -(-rank // 16) * 16
                u[:, members[of_slot], i, :written] = 0
                u[0, members[of_slot], i, :rank] = product.to(u.dtype)
