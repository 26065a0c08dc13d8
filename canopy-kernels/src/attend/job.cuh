// What ring_sm90a.cu works on: the ring's layout and turns, a CTA's share of the tiles, and the orders to the copy engine.
#pragma once
#include "args.cuh"
#include "canopy/bulk.cuh"
#include "canopy/mma.cuh"

namespace canopy {

template <int D>
struct Ring {
    static constexpr int kKeys = kTileKeys<D>, kRows = 128, kWorkers = 2 * kRows;
    static constexpr int kThreads = kWorkers + 128;  // registers move between whole warpgroups
    static constexpr int kTile = kKeys * 2 * D, kQ = kRows * 2 * D;
    static constexpr int kStages = D == 256 ? 5 : 4;
    // where there is room, the sums of a fold: D / 8 pairs for each of a thread's two rows
    static constexpr bool kHolds = D == 128;
    static constexpr int kFoldBytes = kHolds ? 4 * D * kRows : 0;
    static constexpr int kFoldAt = kQ + kStages * kTile, kTable = kFoldAt + kFoldBytes, kBarriers = kTable + 16 * kRows;
    static constexpr int kBytes = kBarriers + 16 * kStages + 32;
    static_assert(kBytes <= 232448, "launch.rs");
    static_assert(kWorkers / 2 * (D + 8) * 4 <= kStages * kTile, "rows laid out in the ring");
};

// Where 16-byte chunk `chunk` of a row lies in a tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ uint32_t spot(int row, int chunk) {
    return chunk / 8 * (ROWS * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

// A place in the ring, and the parity of its turn.
template <int STAGES>
struct Turn {
    uint32_t slot = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++slot < STAGES) return;
        slot = 0;
        parity ^= 1;
    }
};

// What a CTA works on: up to `height` (row, query head of the group) pairs from `row0` on, and consecutive splits.
struct Job {
    Walk w;
    int total, height;
    int row0, kv_head;
    int first, last;  // splits [first, last); none: no work
    int from, to;     // their tiles
};

// The work of CTA `cell` of `cells` of stream b: row tiles side by side under each KV head, these for each run of parts.
template <int D>
__device__ __forceinline__ Job job_of(const AttendArgs& a, int b, int cell, int cells, const int* lens, const int* slots, const int* cu_nodes) {
    Job job;
    job.w = walk_of<D>(a, b, lens, slots, cu_nodes);
    const Walk& w = job.w;
    job.total = w.rows * times_in(a.q_heads, a.kv_heads);
    job.height = w.tall ? 128 : 64;
    const int row_tiles = max(w.tall ? (job.total + 127) / 128 : (job.total + 63) / 64, 1), across = row_tiles * (int)a.kv_heads;
    const int parts = w.parts(), runs = min(max(times_in(cells, across), 1), parts), run = times_in(cell, across);
    const int column = cell - run * across;
    job.kv_head = times_in(column, row_tiles);
    job.row0 = (column - job.kv_head * row_tiles) * job.height;
    job.first = times_in(run * parts, runs) * w.chunk;
    job.last = min(times_in((run + 1) * parts, runs) * w.chunk, w.splits);
    if (w.slot < 0 || !w.fits || job.total == 0 || run >= runs) job.last = job.first;
    job.from = w.edge(job.first);
    job.to = w.edge(job.last);
    return job;
}

// One tile of a split: its keys in position order, or the rows' own ones.
struct Part {
    bool paths;
    int key, row;  // the first key (node), its row in the slot
};

__device__ __forceinline__ Part part_at(const Walk& w, int keys, int tile) {
    if (tile < w.tiles) return {false, (w.tile + tile) * keys, (w.tile + tile) * keys};
    const int node = (tile - w.tiles) * keys;
    return {true, node, w.context + node};
}

// The copy engine's orders for all tiles.
template <int D>
__device__ __forceinline__ void feed(const Job& job, const CUtensorMap& keys, const CUtensorMap& values, uint32_t ring, uint32_t full,
                                     uint32_t empty) {
    using S = Ring<D>;
    Turn<S::kStages> turn;
    const auto load = [&](const CUtensorMap& map, int tile) {
        wait_phase(empty + 8 * turn.slot, turn.parity ^ 1);
        const uint32_t told = full + 8 * turn.slot, to = ring + turn.slot * S::kTile;
        arrive_expecting(told, S::kTile);
        const int row = part_at(job.w, S::kKeys, tile + (CANOPY_FAULT(early_fetch) && tile + 1 < job.to)).row;
#pragma unroll
        for (int block = 0; block < D / 64; ++block) {
            const int4 at = make_int4(64 * block, job.kv_head, row, job.w.slot);
            const uint32_t there = to + block * (S::kKeys * 128);
            copy_box(there, &map, at, told);
        }
        turn.next();
    };
#pragma unroll 1
    for (int tile = job.from; tile <= job.to; ++tile) {
        if (tile < job.to) load(keys, tile);
        if (tile > job.from) load(values, tile - 1);
    }
}

}  // namespace canopy
