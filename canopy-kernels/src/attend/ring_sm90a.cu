// attend.cu for Hopper: the same rows and keys, fed by the copy engine.
//
// One warp asks the copy engine for tiles of keys and values, in the order K0 K1 V0 K2 V1 ..., into a ring of buffers; warpgroups of 64 rows
// multiply what has arrived. Scores of a tile and a row's outputs lie in registers, weights go from registers into the second product;
// the products of the next tile's scores and of this tile's outputs run while the next weights are made. Nothing but the ring couples the
// warpgroups, so that one's sums go to memory while the other multiplies.
#include "ring.cuh"

namespace canopy {

// `count` rows of `stride` elements from `src` on; the rest of the tile becomes zeros.
template <int D, int GROUPS>
__device__ __forceinline__ void fetch(uint32_t dst, const __nv_bfloat16* src, int stride, int count) {
    using S = Ring<D, GROUPS>;
#pragma unroll 1
    for (int at = anew(threadIdx.x); at < S::kKeys * (D / 8); at += S::kWorkers) {
        const int row = at / (D / 8), chunk = at % (D / 8);
        const bool valid = row < count;
        copy16(dst + spot<S::kKeys>(row, chunk), src + (valid ? (size_t)row * stride + chunk * 8 : 0), valid);
    }
}

// Replaces values that are not finite by zeros; bit r % 32 of bad[r / 32] says that row r had one. `bad` is zero before.
template <int D, int GROUPS>
__device__ __forceinline__ void sanitize(char* tile, uint32_t* bad) {
    using S = Ring<D, GROUPS>;
#pragma unroll 1
    for (int idx = anew(threadIdx.x); idx < S::kKeys * D / 2; idx += S::kWorkers) {
        const int row = idx / (D / 2), word = idx % (D / 2);
        uint32_t* p = reinterpret_cast<uint32_t*>(tile + spot<S::kKeys>(row, word / 4)) + word % 4;
        const uint32_t x = *p;
        const bool low = (x & 0x7f80u) == 0x7f80u, high = (x & 0x7f800000u) == 0x7f800000u;
        if (!low && !high) continue;
        *p = (low ? 0u : x & 0xffffu) | (high ? 0u : x & 0xffff0000u);
        atomicOr(bad + row / 32, 1u << (row % 32));
    }
}

template <int D, int GROUPS, bool TURNS>
__device__ __forceinline__ void attend_ring(const AttendArgs& a, const CUtensorMap& key_map, const CUtensorMap& value_map,
                                            const __nv_bfloat16* q, const __nv_bfloat16* keys, const __nv_bfloat16* values, const int* lens,
                                            const int* slots, const int* cu_nodes, const uint32_t* mask, float* part_o, float2* part_ml) {
    using S = Ring<D, GROUPS>;
    extern __shared__ __align__(1024) char shared[];
    char* const ring = shared + S::kQ;
    Row* const table = reinterpret_cast<Row*>(shared + S::kTable);
    uint32_t* const bad = reinterpret_cast<uint32_t*>(shared + S::kBarriers + 16 * S::kStages);
    uint32_t* const flag = bad + 4;
    const uint32_t q_at = shared_address(shared), ring_at = q_at + S::kQ, full = q_at + S::kBarriers, empty = full + 8 * S::kStages;
    const int tid = threadIdx.x, lane = tid % 32, warp = __shfl_sync(kFull, tid / 32, 0);
    if (tid == 0) {
        for (int stage = 0; stage < S::kStages; ++stage) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, 4 * GROUPS);
        }
        barriers_ready();
    }
    if (tid < 5) bad[tid] = 0;
    __syncthreads();
    wait_for_kernels_ahead();
    next_may_begin();

    const int group = a.q_heads / a.kv_heads, row_tiles = gridDim.x / a.kv_heads;
    Job job;
    job.w = walk_of<D>(a, blockIdx.z, lens, slots, cu_nodes);
    const Walk& w = job.w;
    job.total = w.rows * group;
    job.all = w.tiles + (w.tree ? (w.rows + S::kKeys - 1) / S::kKeys : 0);
    job.row0 = blockIdx.x % row_tiles * S::kRows;
    job.kv_head = blockIdx.x / row_tiles;
    if (w.slot < 0 || !w.fits || job.row0 >= job.total || (int)blockIdx.y >= w.parts()) return;

    if (warp >= S::kWorkers / 32) {
        if (GROUPS > 1) keep_registers<40>();
        if (warp > S::kWorkers / 32 || lane > 0) return;
        Turn<S::kStages> turn;
#pragma unroll 1
        for (int part = blockIdx.y; part < w.parts(); part += gridDim.y)
#pragma unroll 1
            for (int split = part * w.chunk; split < min((part + 1) * w.chunk, w.splits); ++split)
                feed<D, GROUPS>(job, key_map, value_map, ring_at, full, empty, split * w.per, min(w.per, job.all - split * w.per), turn);
        return;
    }
    if (tid < S::kRows) {
        const int m = job.row0 + tid, row = min(m, job.total - 1) / group;
        const int2 range = sight(a, w.context, w.end, row);
        const int place = (w.first + row) * (int)a.q_heads + job.kv_head * group + m - row * group;
        table[tid] = {range.x, range.y, w.first + row, m < job.total ? place : -1};
    }
    crew_meets<S::kWorkers>();
    {  // the rows' queries
        constexpr int kChunks = D / 8;
        const int chunk = tid % kChunks;
#pragma unroll
        for (int n = 0; n < S::kRows * kChunks / S::kWorkers; ++n) {
            const int r = tid / kChunks + n * (S::kWorkers / kChunks), place = table[r].place;
            copy16(q_at + spot<S::kRows>(r, chunk), q + (place >= 0 ? (size_t)place * D + chunk * 8 : 0), place >= 0);
        }
        copies_issued();
    }
    if (GROUPS > 1) take_registers<232>();
    // keys in [common_from, common_to) are seen by every row of the stream
    const int common_from = sight(a, w.context, w.end, w.rows - 1).x, common_to = sight(a, w.context, w.end, 0).y;
    copies_arrived<0>();
    writes_visible();
    crew_meets<S::kWorkers>();

    const int crew = warp / 4;
    const uint32_t q_crew = q_at + crew * 8192;
    const Row* const own = table + 16 * warp + lane / 4;
    Turn<S::kStages> turn;
    Rows<D, GROUPS> rows;
    Level so_far[2];
    float down[2];
    const auto release = [&](uint32_t slot) {
        if (lane == 0) arrive(empty + 8 * slot);
    };
    const auto weigh = [&](int tile) {
        const Part part = part_at(w, S::kKeys, tile);
        if (part.paths || part.key < common_from || part.key + S::kKeys > common_to) rows.hide(own, mask, part);
        rows.weigh(a.scale, down);
    };
    const auto leave = [&](int split, uint32_t marks) {
        const int part = split / w.chunk;
        rows.leave(own, a.scale, (size_t)part * a.rows * a.q_heads, split - part * w.chunk, marks, so_far, part_o, part_ml);
    };
    bool broken = false;
    // in turns: a warpgroup asks for its products when the other's are under way
    if (TURNS && crew == 1) turn_is<S::kWorkers>(0);
#pragma unroll 1
    for (int part = blockIdx.y; part < w.parts(); part += gridDim.y)
#pragma unroll 1
        for (int split = part * w.chunk; split < min((part + 1) * w.chunk, w.splits); ++split) {
            const int first = split * w.per, tiles = min(w.per, job.all - first);
            rows.clear();
            wait_phase(full + 8 * turn.slot, turn.parity);
            settle(rows.s);
            products_begin();
            rows.score(q_crew, ring_at + turn.slot * S::kTile);
            products_done<0>();
            settle(rows.s);
            release(turn.slot);
            turn.next();
            weigh(first);
            rows.pack();
#pragma unroll 1
            for (int tile = first + 1; tile < first + tiles; ++tile) {
                const uint32_t k_slot = turn.slot;
                wait_phase(full + 8 * k_slot, turn.parity);
                turn.next();
                if (TURNS) await_turn<S::kWorkers>(crew);
                rows.settle_all();
                products_begin();
                rows.score(q_crew, ring_at + k_slot * S::kTile);
                const uint32_t v_slot = turn.slot;
                wait_phase(full + 8 * v_slot, turn.parity);
                turn.next();
                rows.mix(ring_at + v_slot * S::kTile);
                if (TURNS) turn_is<S::kWorkers>(1 - crew);
                products_done<1>();
                settle(rows.s);
                release(k_slot);
                weigh(tile);
                rows.finish(down);
                release(v_slot);
                rows.pack();
            }
            wait_phase(full + 8 * turn.slot, turn.parity);
            rows.settle_all();
            products_begin();
            rows.mix(ring_at + turn.slot * S::kTile);
            products_done<0>();
            rows.settle_all();
            release(turn.slot);
            turn.next();
            broken |= rows.broken();
            leave(split, 0);
        }

    if (broken) *flag = 1;
    crew_meets<S::kWorkers>();  // nobody reads the ring any more
    if (!*flag || CANOPY_FAULT(leak)) return;
    // once more, values that are not finite left out and remembered
#pragma unroll 1
    for (int part = blockIdx.y; part < w.parts(); part += gridDim.y)
#pragma unroll 1
        for (int split = part * w.chunk; split < min((part + 1) * w.chunk, w.splits); ++split) {
            const int first = split * w.per, tiles = min(w.per, job.all - first);
            const int stride = a.kv_heads * D;
            const size_t origin = (size_t)w.slot * a.capacity * stride + (size_t)job.kv_head * D;
            uint32_t marks = 0;  // bit h: row own[8 h] sees a value that is not finite
            rows.clear();
#pragma unroll 1
            for (int tile = first; tile < first + tiles; ++tile) {
                const Part part = part_at(w, S::kKeys, tile);
                const size_t from = origin + (size_t)part.row * stride;
                const int count = (part.paths ? w.context + w.rows : w.end) - part.row;
                fetch<D, GROUPS>(ring_at, keys + from, stride, count);
                fetch<D, GROUPS>(ring_at + S::kTile, values + from, stride, count);
                copies_issued();
                copies_arrived<0>();
                if (tid < 4) bad[tid] = 0;
                crew_meets<S::kWorkers>();
                sanitize<D, GROUPS>(ring + S::kTile, bad);
                writes_visible();
                crew_meets<S::kWorkers>();
#pragma unroll 1
                for (int h = 0; h < 2; ++h)
#pragma unroll 1
                    for (int word = 0; word < S::kKeys / 32; ++word)
                        if (bad[word] & seen_keys(own[8 * h], mask, part.paths, part.key + 32 * word)) marks |= 1u << h;
                rows.settle_all();
                products_begin();
                rows.score(q_crew, ring_at);
                products_done<0>();
                rows.settle_all();
                weigh(tile);
                rows.shrink(down);
                rows.pack();
                rows.settle_all();
                products_begin();
                rows.mix(ring_at + S::kTile);
                products_done<0>();
                rows.settle_all();
                crew_meets<S::kWorkers>();
            }
            leave(split, marks);
        }
}

}  // namespace canopy

#define CANOPY_RING(D, ROWS, GROUPS, TURNS, NAME)                                                                                  \
    extern "C" __global__ void __launch_bounds__(canopy::Ring<D, GROUPS>::kThreads, 1) attend_ring_d##D##_##NAME(                  \
        const __grid_constant__ AttendArgs a, const __grid_constant__ CUtensorMap key_map,                                   \
        const __grid_constant__ CUtensorMap value_map, const __nv_bfloat16* q, const __nv_bfloat16* keys,                    \
        const __nv_bfloat16* values, const int* lens, const int* slots, const int* cu_nodes, const uint32_t* mask, float* part_o,  \
        float2* part_ml) {                                                                                                         \
        canopy::attend_ring<D, GROUPS, TURNS>(canopy::planted(a), key_map, value_map, q, keys, values, lens, slots, cu_nodes, mask,   \
                                              part_o, part_ml);                                                                    \
    }

CANOPY_RING(256, 64, 1, false, r64)
#ifndef CANOPY_CONTROLS
CANOPY_RING(256, 128, 2, false, r128)
CANOPY_RING(256, 128, 2, true, r128_turns)
CANOPY_RING(128, 128, 2, false, r128)
CANOPY_RING(128, 128, 2, true, r128_turns)
CANOPY_RING(128, 64, 1, false, r64)
#endif
