"""shared_route: the Triton kernel. A program resolves the basis of one tile at some sites."""

# What @triton.jit compiles is Python by syntax only.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from scute_kernels.device import (
    BASIS,
    BASIS_A,
    BASIS_A_STRIDE,
    BASIS_B,
    BASIS_B_STRIDE,
    BASIS_FIELDS,
    BASIS_RANK,
    FIELDS,
    NO_MEMBER,
    SHARED_A,
    SHARED_A_STRIDE,
    SHARED_B,
    SHARED_B_STRIDE,
    SHARED_BASIS,
    SHARED_FIELDS,
    SHARED_RANK,
    D,
    E,
    slots_of_tile,
)

BLOCK = 32


@triton.jit(do_not_specialize=["sites"])
def _shared_route(
    tiles_ptr,
    leading_ptr,
    routes_ptr,
    table_ptr,
    bases_ptr,
    origins_ptr,
    sites,
    tiles_stride,
    ROUTE_FIELDS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(1)
    if tile >= tl.load(leading_ptr):
        return
    site = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = site < sites
    slots = slots_of_tile(tiles_ptr, tile, tile + 1, tiles_stride, WIDTH, WIDTH)
    entries = table_ptr + (slots[:, None] * sites + site[None, :]) * FIELDS + BASIS
    of_rows = tl.load(entries, mask=(slots >= 0)[:, None] & known[None, :], other=-1)
    basis = tl.max(of_rows, axis=0)
    shared = basis >= 0
    entry = bases_ptr + tl.where(shared, basis, 0) * BASIS_FIELDS
    route = routes_ptr + (tile.to(tl.int64) * sites + site) * ROUTE_FIELDS
    origin_in = tl.load(origins_ptr + 2 * site, mask=shared, other=0)
    origin_out = tl.load(origins_ptr + 2 * site + 1, mask=shared, other=0)
    tl.store(route + SHARED_BASIS, basis, mask=known)
    tl.store(route + SHARED_RANK, tl.load(entry + BASIS_RANK, mask=shared, other=0), mask=shared)
    tl.store(route + SHARED_A, tl.load(entry + BASIS_A, mask=shared, other=0) + origin_in, mask=shared)
    tl.store(route + SHARED_A_STRIDE, tl.load(entry + BASIS_A_STRIDE, mask=shared, other=0), mask=shared)
    tl.store(route + SHARED_B, tl.load(entry + BASIS_B, mask=shared, other=0) + origin_out, mask=shared)
    tl.store(route + SHARED_B_STRIDE, tl.load(entry + BASIS_B_STRIDE, mask=shared, other=0), mask=shared)
    if ROUTE_FIELDS > SHARED_FIELDS:
        has = of_rows >= 0
        places = route[None, :] + SHARED_FIELDS + tl.arange(0, WIDTH)[:, None]
        d = tl.load(entries - BASIS + D, mask=has, other=NO_MEMBER)
        e = tl.load(entries - BASIS + E, mask=has, other=NO_MEMBER)
        tl.store(places, d, mask=known[None, :])
        tl.store(places + WIDTH, e, mask=known[None, :])


def shared_route(
    tiles: torch.Tensor,
    leading: torch.Tensor,
    routes: torch.Tensor,
    table: torch.Tensor,
    bases: torch.Tensor,
    origins: torch.Tensor,
) -> None:
    sites = table.shape[1]
    _, n_tiles, width = tiles.shape
    _shared_route[(-(-sites // BLOCK), n_tiles)](
        tiles,
        leading,
        routes,
        table,
        bases,
        origins,
        sites,
        tiles.stride(0),
        ROUTE_FIELDS=routes.shape[2],
        WIDTH=width,
        BLOCK=BLOCK,
        num_warps=4,
    )
