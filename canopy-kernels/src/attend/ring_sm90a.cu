// attend.cu for Hopper: the same rows and keys, fed by the copy engine.
//
// One warp asks the copy engine for tiles of keys and values, in the order K0 K1 V0 K2 V1 ..., into a ring of buffers; warpgroups of 64 rows
// multiply what has arrived. Scores of a tile and a row's outputs lie in registers, weights go from registers into the second product;
// the products of the next tile's scores and of this tile's outputs run while the next weights are made. A CTA's splits follow one another
// in one walk over its tiles: where a split ends, its sums leave while the products of the next one's first scores run. Nothing but the ring
// couples the warpgroups. Where the keys are few, a CTA has 64 rows and its second warpgroup ends at once: a tile's rows are not in its bits.
// At the end of a walk the sums are laid out in the ring, which is free then, and leave it row by row in a short loop: a CTA runs its code once,
// and to fetch unrolled code takes longer than what it does.
// Where one part has all of a row's keys, its outputs are given here; else merge.cu adds the parts.
#include <type_traits>

#include "ring.cuh"

namespace canopy {

// `count` rows of `stride` elements from `src` on; the rest of the tile becomes zeros.
template <int D>
__device__ __forceinline__ void fetch(uint32_t dst, const __nv_bfloat16* src, int stride, int count, int workers) {
    using S = Ring<D>;
#pragma unroll 1
    for (int at = anew(threadIdx.x); at < S::kKeys * (D / 8); at += workers) {
        const int row = at / (D / 8), chunk = at % (D / 8);
        const bool valid = row < count;
        copy16(dst + spot<S::kKeys>(row, chunk), src + (valid ? (size_t)row * stride + chunk * 8 : 0), valid);
    }
}

// Replaces values that are not finite by zeros; bit r % 32 of bad[r / 32] says that row r had one. `bad` is zero before.
template <int D>
__device__ __forceinline__ void sanitize(char* tile, uint32_t* bad, int workers) {
    using S = Ring<D>;
#pragma unroll 1
    for (int idx = anew(threadIdx.x); idx < S::kKeys * D / 2; idx += workers) {
        const int row = idx / (D / 2), word = idx % (D / 2);
        uint32_t* p = reinterpret_cast<uint32_t*>(tile + spot<S::kKeys>(row, word / 4)) + word % 4;
        const uint32_t x = *p;
        const bool low = (x & 0x7f80u) == 0x7f80u, high = (x & 0x7f800000u) == 0x7f800000u;
        if (!low && !high) continue;
        *p = (low ? 0u : x & 0xffffu) | (high ? 0u : x & 0xffff0000u);
        atomicOr(bad + row / 32, 1u << (row % 32));
    }
}

template <int D>
__device__ __forceinline__ void attend_ring(const AttendArgs& a, const CUtensorMap& key_map, const CUtensorMap& value_map,
                                            const __nv_bfloat16* q, const __nv_bfloat16* keys, const __nv_bfloat16* values, const int* lens,
                                            const int* slots, const int* cu_nodes, const uint32_t* mask, float* part_o, float2* part_ml,
                                            void* out) {
    using S = Ring<D>;
    constexpr bool kTurns = D == 256;  // the warpgroups ask for products in turns
    extern __shared__ __align__(1024) char shared[];
    char* const ring = shared + S::kQ;
    Row* const table = reinterpret_cast<Row*>(shared + S::kTable);
    uint32_t* const bad = reinterpret_cast<uint32_t*>(shared + S::kBarriers + 16 * S::kStages);
    uint32_t* const flag = bad + 4;
    const uint32_t q_at = shared_address(shared), ring_at = q_at + S::kQ, full = q_at + S::kBarriers, empty = full + 8 * S::kStages;
    const int tid = threadIdx.x, lane = tid % 32, warp = __shfl_sync(kFull, tid / 32, 0);
    if (tid == S::kWorkers) {
        expect_map(&key_map);
        expect_map(&value_map);
    }
    wait_for_kernels_ahead();
    next_may_begin();

    const Job job = job_of<D>(a, blockIdx.z, blockIdx.x, gridDim.x, lens, slots, cu_nodes);
    const Walk& w = job.w;
    if (job.first == job.last) return;
    const int workers = 2 * job.height;
    if (tid == 0) {
        for (int stage = 0; stage < S::kStages; ++stage) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, workers / 32);
        }
        barriers_ready();
    }
    if (tid < 5) bad[tid] = 0;
    __syncthreads();
    if (warp >= S::kWorkers / 32) {
        keep_registers<40>();
        if (warp == S::kWorkers / 32 && lane == 0) feed<D>(job, key_map, value_map, ring_at, full, empty);
        return;
    }
    if (tid >= workers) return;
    if (tid < job.height) {
        const int group = times_in(a.q_heads, a.kv_heads), m = job.row0 + tid, row = times_in(min(m, job.total - 1), group);
        const int2 range = sight(a, w.context, w.end, row);
        const int place = (w.first + row) * (int)a.q_heads + job.kv_head * group + m - row * group;
        table[tid] = {range.x, range.y, w.first + row, m < job.total ? place : -1};
        if (w.tree && job.to > w.tiles) ask_for(mask + (size_t)(w.first + row) * kMaskWords);
    }
    crew_meets(workers);
    {  // the rows' queries
        constexpr int kChunks = D / 8;
        const int chunk = tid % kChunks;
#pragma unroll 8
        for (int r = tid / kChunks; r < job.height; r += workers / kChunks) {
            const int place = table[r].place;
            copy16(q_at + spot<S::kRows>(r, chunk), q + (place >= 0 ? (size_t)place * D + chunk * 8 : 0), place >= 0);
        }
        copies_issued();
    }
    take_registers<232>();
    // keys in [common_from, common_to) are seen by every row of the stream
    const int common_from = sight(a, w.context, w.end, w.rows - 1).x, common_to = sight(a, w.context, w.end, 0).y;
    copies_arrived<0>();
    writes_visible();
    crew_meets(workers);

    const int crew = warp / 4;
    const uint32_t q_crew = q_at + crew * 8192;
    const Row* const own = table + 16 * warp + lane / 4;
    const bool in_turns = kTurns && w.tall;
    Turn<S::kStages> turn;
    Rows<D> rows;
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
    const auto leave = [&](auto ends, int split, uint32_t marks) {  // `ends`: nobody reads the ring any more
        const int part = w.chunk > 1 ? split / kFold : split, nth = w.chunk > 1 ? split % kFold : 0;
        const bool last = w.chunk == 1 || nth == kFold - 1 || split + 1 == w.splits;
        const Leaving to = {a, (size_t)part * a.rows * a.q_heads, w.direct(), last, part_o, part_ml, out};
        bool laid_out;
        if constexpr (S::kHolds)
            laid_out = rows.template hold<ends.value>(to, own, nth, marks, so_far, reinterpret_cast<float2*>(shared + S::kFoldAt) + anew(tid));
        else
            laid_out = rows.template leave<ends.value>(to, own, nth, marks, so_far);
        if constexpr (ends.value) {
            if (!laid_out) return;
            float* const place = reinterpret_cast<float*>(ring) + warp * 16 * Rows<D>::kRowFloats;
            rows.lay_out(place, so_far);
            Rows<D>::deliver(to, table + 16 * warp, place);
        }
    };
    bool broken = false;
    int split = job.first, end = w.edge(split + 1);
    if (in_turns && crew == 1) turn_is<S::kWorkers>(0);
    rows.clear();
    wait_phase(full + 8 * turn.slot, turn.parity);
    settle(rows.s);
    products_begin();
    rows.score(q_crew, ring_at + turn.slot * S::kTile);
    products_done<0>();
    settle(rows.s);
    release(turn.slot);
    turn.next();
    weigh(job.from);
    rows.pack();
#pragma unroll 1
    for (int tile = job.from + 1; tile < job.to; ++tile) {
        const uint32_t k_slot = turn.slot;
        wait_phase(full + 8 * k_slot, turn.parity);
        turn.next();
        if (in_turns) await_turn<S::kWorkers>(crew);
        rows.settle_all();
        products_begin();
        rows.score(q_crew, ring_at + k_slot * S::kTile);
        const uint32_t v_slot = turn.slot;
        wait_phase(full + 8 * v_slot, turn.parity);
        turn.next();
        rows.mix(ring_at + v_slot * S::kTile);
        if (in_turns) turn_is<S::kWorkers>(1 - crew);
        products_done<1>();
        settle(rows.s);
        release(k_slot);
        if (tile == end) {  // of the next split: the last one's sums leave
            products_done<0>();
            rows.settle_all();
            broken |= rows.broken();
            leave(std::false_type{}, split, 0);
            rows.clear();
            end = w.edge(++split + 1);
        }
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
    broken |= rows.broken();
    if (broken) *flag = 1;
    crew_meets(workers);  // nobody reads the ring any more
    if (!*flag || CANOPY_FAULT(leak)) {
        leave(std::true_type{}, split, 0);
        return;
    }
    // once more, values that are not finite left out and remembered; the job is read anew so that it need not be kept for this
    const Job again = job_of<D>(a, blockIdx.z, anew(blockIdx.x), gridDim.x, lens, slots, cu_nodes);
#pragma unroll 1
    for (split = again.first; split < again.last; ++split) {
        const Walk& w = again.w;
        const int stride = a.kv_heads * D;
        const size_t origin = (size_t)w.slot * a.capacity * stride + (size_t)again.kv_head * D;
        uint32_t marks = 0;  // bit h: row own[8 h] sees a value that is not finite
        rows.clear();
#pragma unroll 1
        for (int tile = w.edge(split); tile < w.edge(split + 1); ++tile) {
            const Part part = part_at(w, S::kKeys, tile);
            const size_t from = origin + (size_t)part.row * stride;
            const int count = (part.paths ? w.context + w.rows : w.end) - part.row;
            fetch<D>(ring_at, keys + from, stride, count, workers);
            fetch<D>(ring_at + S::kTile, values + from, stride, count, workers);
            copies_issued();
            copies_arrived<0>();
            if (tid < 4) bad[tid] = 0;
            crew_meets(workers);
            sanitize<D>(ring + S::kTile, bad, workers);
            writes_visible();
            crew_meets(workers);
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
            crew_meets(workers);
        }
        leave(std::true_type{}, split, marks);
        crew_meets(workers);
    }
}

}  // namespace canopy

#define CANOPY_RING(D)                                                                                                             \
    extern "C" __global__ void __launch_bounds__(canopy::Ring<D>::kThreads, 1) attend_ring_d##D(                                   \
        const __grid_constant__ AttendArgs a, const __grid_constant__ CUtensorMap key_map,                                         \
        const __grid_constant__ CUtensorMap value_map, const __nv_bfloat16* q, const __nv_bfloat16* keys,                          \
        const __nv_bfloat16* values, const int* lens, const int* slots, const int* cu_nodes, const uint32_t* mask, float* part_o,  \
        float2* part_ml, void* out) {                                                                                              \
        canopy::attend_ring<D>(canopy::planted(a), key_map, value_map, q, keys, values, lens, slots, cu_nodes, mask, part_o, part_ml, out); \
    }

CANOPY_RING(256)
#ifndef CANOPY_CONTROLS
CANOPY_RING(128)
#endif
