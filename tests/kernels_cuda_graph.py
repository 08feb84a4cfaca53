"""The operators in a CUDA graph: captured once, right for every later batch and table; see test_kernels_triton.py."""

from __future__ import annotations

import torch

from kernel_cases import FIRST_SITE, Case, check_expanded, check_rotate, make_case

IN_FEATURES, WIDTHS, MAX_RANK, ROWS = 176, (48, 23), 20, 18
ops = torch.ops.scute

# Of each step: the methods of the slots, then slots and rows of the requests.
BATCHES = [
    (("lora", "vera", "ia3", "oft"), [(0, 4)]),
    (("lora", "vera", "ia3", "oft"), [(0, 2), (1, 3)]),
    (("lora", "vera", "ia3", "oft"), [(3, 1), (2, 5), (1, 1), (0, 2), (-1, 2), (1, 7)]),
    (("lora", "vera", "ia3", "oft"), [(-1, 16)]),
    (("lora", "vera", "ia3", "oft"), [(0, 4)]),
    (("oft", "lora", "everything", "dora"), [(0, 4), (1, 3), (2, 9), (3, 2)]),  # every slot has changed its method
    (("nothing", "vera", "vera", "vera"), [(0, 1), (1, 1), (2, 1), (3, 1)]),
    (("lora", "vera", "ia3", "oft"), [(3, 1), (2, 5), (1, 1), (0, 2), (-1, 2), (1, 7)]),
]


def make(seed: int) -> Case:
    methods, requests = BATCHES[seed]
    live = sum(rows for _, rows in requests)
    spare = ROWS - live
    return make_case(
        *(seed, torch.float16, IN_FEATURES, WIDTHS, methods, requests, spare, MAX_RANK, 2),
        wide=True,
        beside=True,
        n_further=ROWS - 2,
    ).to("cuda")


def test_one_capture_serves_every_batch() -> None:
    batches = [make(seed) for seed in range(len(BATCHES))]
    first = batches[0]
    static = make(0)  # the tensors that the graph knows
    static.x = static.x.contiguous()
    static.h = static.h.contiguous()
    addend = static.addend()
    static.arena = torch.empty(max(case.arena.numel() for case in batches), dtype=first.arena.dtype, device="cuda")
    rotated = torch.empty(static.with_further, IN_FEATURES, dtype=first.x.dtype, device="cuda")
    v, u = static.scratch(), static.shared_scratch()

    def step() -> None:
        ops.route(static.own.tiles, static.own.routes, static.table)
        grouped = static.grouped
        ops.shared_route(grouped.tiles, grouped.leading, grouped.routes, static.table, static.bases, static.origins)
        ops.rotate(static.x, *static.rotate_plan, FIRST_SITE, static.n_slices, rotated)
        ops.shrink(static.x, *static.own_plan, FIRST_SITE, v)
        ops.shared_shrink(static.x, *static.grouped_plan, FIRST_SITE, u)
        ops.shared_expand(addend, u, *static.grouped_plan, FIRST_SITE, static.slice_offsets, False)
        ops.expand(static.h, v, addend, *static.own_plan, FIRST_SITE, static.slice_offsets)

    def load(case: Case) -> None:
        static.arena.fill_(float("nan"))[: case.arena.numel()] = case.arena
        for name in ("x", "h", "table", "bases", "origins"):
            getattr(static, name).copy_(getattr(case, name))
        for plan in ("own", "grouped"):
            for name in ("row_slot", "further", "tiles", "leading"):
                getattr(getattr(static, plan), name).copy_(getattr(getattr(case, plan), name))

    load(first)
    step()  # compiles
    load(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    for case in batches:
        load(case)
        for scratch in (v, u, addend):
            scratch.fill_(float("nan"))
        graph.replay()
        replayed, before = static.h.clone(), case.h.cpu().clone()

        def compare(*arguments: torch.Tensor) -> None:
            arguments[-1].copy_(rotated)

        check_rotate(compare, case)
        case.h.copy_(replayed)
        check_expanded(case, before)


def test_operators_run_the_kernels_on_a_gpu() -> None:
    """Dispatch: the operator gives what the kernel function gives, bit for bit."""
    from scute_kernels.rotate import kernel

    case = make(2)
    out = torch.empty(2, case.with_further, IN_FEATURES, dtype=case.x.dtype, device="cuda")
    ops.rotate(case.x, *case.rotate_plan, FIRST_SITE, case.n_slices, out[0])
    kernel.rotate(case.x, *case.rotate_plan, FIRST_SITE, case.n_slices, out[1])
    assert torch.equal(out[0], out[1])
