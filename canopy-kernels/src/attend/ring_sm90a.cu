// attend.cu for Hopper: the same rows and keys, fed by the copy engine.
//
// One warp asks the copy engine for tiles of keys and values, in the order K0 K1 V0 K2 V1 ..., into a ring of buffers; warpgroups of 64 rows
// multiply what has arrived. Scores of a tile and a row's outputs lie in registers, weights go from registers into the second product;
// the products of the next tile's scores and of this tile's outputs run while the next weights are made. Nothing but the ring couples the
// warpgroups, so that one's sums go to memory while the other multiplies.
#include "args.cuh"
#include "canopy/bulk.cuh"
#include "canopy/wgmma.cuh"
#include "lanes.cuh"

namespace canopy {

constexpr float kSlack = 8.f;  // powers of two by which weights may exceed 1 before a row's level follows its largest score

template <int D, int GROUPS>
struct Ring {
    static constexpr int kKeys = kTileKeys<D>, kRows = 64 * GROUPS, kWorkers = 128 * GROUPS;
    static constexpr int kThreads = kWorkers + (GROUPS > 1 ? 128 : 32);  // registers move between whole warpgroups
    static constexpr int kTile = kKeys * 2 * D, kQ = kRows * 2 * D;
    static constexpr int kStages = kQ > 32768 ? 5 : 6;
    static constexpr int kTable = kQ + kStages * kTile, kBarriers = kTable + 16 * kRows;
    static constexpr int kBytes = kBarriers + 16 * kStages + 32;
    static_assert(kBytes <= 232448, "launch.rs");
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

// What a CTA works on.
struct Job {
    Walk w;
    int total, all;     // (row, query head of the group) pairs, tiles
    int row0, kv_head;  // the CTA's first pair, its head
};

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

// The copy engine's orders for one split.
template <int D, int GROUPS>
__device__ __forceinline__ void feed(const Job& job, const CUtensorMap& keys, const CUtensorMap& values, uint32_t ring, uint32_t full,
                                     uint32_t empty, int first, int count, Turn<Ring<D, GROUPS>::kStages>& turn) {
    using S = Ring<D, GROUPS>;
    const auto load = [&](const CUtensorMap& map, int tile) {
        wait_phase(empty + 8 * turn.slot, turn.parity ^ 1);
        const uint32_t into = CANOPY_FAULT(early_fetch) && tile > 0 ? (turn.slot + S::kStages - 1) % S::kStages : turn.slot;
        const uint32_t told = full + 8 * turn.slot, to = ring + into * S::kTile;
        arrive_expecting(told, S::kTile);
        const int row = part_at(job.w, S::kKeys, first + tile).row;
#pragma unroll
        for (int block = 0; block < D / 64; ++block) {
            const int4 at = make_int4(64 * block, job.kv_head, row, job.w.slot);
            const uint32_t there = to + block * (S::kKeys * 128);
            copy_box(there, &map, at, told);
        }
        turn.next();
    };
#pragma unroll 1
    for (int tile = -1; tile < count; ++tile) {
        if (tile + 1 < count) load(keys, tile + 1);
        if (tile >= 0) load(values, tile);
    }
}

template <int D, int GROUPS>
struct Rows {
    using S = Ring<D, GROUPS>;
    static constexpr int kKeys = S::kKeys, kSteps = kKeys / 16;
    float o[D / 2], s[kKeys / 2], top[2], sum[2];
    uint32_t weights[kSteps][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int e = 0; e < D / 2; ++e) o[e] = 0.f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            top[h] = -INFINITY;
            sum[h] = 0.f;
        }
    }

    __device__ __forceinline__ void score(uint32_t q_at, uint32_t k_at) {
        k_at = anew(k_at);
        q_at = anew(q_at);
#pragma unroll
        for (int step = 0; step < D / 16; ++step)
            products(s, descriptor(q_at + step / 4 * (S::kRows * 128) + step % 4 * 32, 0),
                     descriptor(k_at + step / 4 * (kKeys * 128) + step % 4 * 32, 0), step > 0);
        products_issued();
    }

    __device__ __forceinline__ void mix(uint32_t v_at) {
        v_at = anew(v_at);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) weighted(o, weights[step], descriptor(v_at + step * 2048, kKeys * 128));
        products_issued();
    }

    __device__ __forceinline__ void settle_all() {
        settle(o);
        settle(s);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) settle(weights[step]);
    }

    // Once no product reads the last tile's weights any more.
    __device__ __forceinline__ void pack() {
#pragma unroll
        for (int t = 0; t < kKeys / 8; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) weights[t / 2][t % 2 * 2 + h] = pack_bf16(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]);
    }

    // Scores become weights, in f32; `down` is what older sums are multiplied by.
    __device__ __forceinline__ void weigh(float scale, float (&down)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most = -INFINITY;
#pragma unroll
            for (int t = 0; t < kKeys / 8; ++t) most = fmaxf(most, fmaxf(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]));
            most = quad_max(most);
            const bool follows = (most - top[h]) * scale > kSlack;
            const float now = follows ? most : top[h], shift = now == -INFINITY ? 0.f : now, level = shift * scale;
            down[h] = follows ? power_of_two((top[h] - shift) * scale) : 1.f;
            top[h] = now;
            float added[2] = {0.f, 0.f};
#pragma unroll
            for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& x = s[4 * t + 2 * h + c];
                    x = power_of_two(fmaf(x, scale, -level));
                    added[c] = planted_half(added[c] + x);
                }
            }
            sum[h] = fmaf(sum[h], down[h], added[0] + added[1]);
        }
    }

    __device__ __forceinline__ void shrink(const float (&down)[2]) {
        if (!__any_sync(kFull, down[0] != 1.f || down[1] != 1.f)) return;
#pragma unroll
        for (int e = 0; e < D / 2; ++e) o[e] *= down[e / 2 % 2];
    }

    // The same once the outputs' products are done. The vote asks for the weights (their sum is never below zero), and the wait stands
    // behind its branch: otherwise the assembler moves the wait before the weights are made.
    __device__ __forceinline__ void finish(const float (&down)[2]) {
        if (__any_sync(kFull, down[0] != 1.f || down[1] != 1.f || sum[0] < 0.f || sum[1] < 0.f)) {
            products_done<0>();
            settle_all();
#pragma unroll
            for (int e = 0; e < D / 2; ++e) o[e] *= down[e / 2 % 2];
        } else {
            asm volatile("// no level has moved" ::: "memory");
            products_done<0>();
            settle_all();
        }
    }

    // Scores of keys that a row does not see become -infinity.
    __device__ __forceinline__ void hide(const Row* own, const uint32_t* mask, const Part& part) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Row row = own[8 * h];
#pragma unroll
            for (int word = 0; word < kKeys / 32; ++word) {
                const uint32_t visible = seen_keys(row, mask, part.paths, part.key + 32 * word) >> (threadIdx.x % 4 * 2);
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (!(visible >> (e / 2 * 8 + e % 2) & 1)) s[16 * word + e / 2 * 4 + 2 * h + e % 2] = -INFINITY;
            }
        }
    }

    // Adds the sums of split `nth` of a part to those of the splits before it, which lie in memory where this thread put them.
    __device__ __forceinline__ void leave(const Row* own, float scale, size_t part, int nth, uint32_t marks, Level (&so_far)[2], float* part_o,
                                          float2* part_ml) const {
        const int lane = anew(threadIdx.x) % 32;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float whole = quad_sum(sum[h]);
            const Level mine = {top[h], marks >> h & 1 ? -whole : whole};
            float down = 0.f, up = 1.f;
            if (nth == 0)
                so_far[h] = mine;
            else
                take_in(so_far[h], mine, scale, down, up);
            const int index = own[8 * h].place;
            if (index < 0) continue;
            const size_t place = part + index;
            if (lane % 4 == 0) part_ml[place] = make_float2(so_far[h].top, so_far[h].sum);
            float2* const out = reinterpret_cast<float2*>(part_o + place * D) + lane % 4;
            if (nth == 0) {
#pragma unroll
                for (int t = 0; t < D / 8; ++t) out[4 * t] = make_float2(o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
                continue;
            }
            constexpr int kAhead = 8;
#pragma unroll
            for (int first = 0; first < D / 8; first += kAhead) {
                float2 held[kAhead];
#pragma unroll
                for (int t = 0; t < kAhead; ++t) held[t] = out[4 * (first + t)];
#pragma unroll
                for (int t = 0; t < kAhead; ++t) {
                    const float* mine = o + 4 * (first + t) + 2 * h;
                    out[4 * (first + t)] = make_float2(fmaf(mine[0], up, held[t].x * down), fmaf(mine[1], up, held[t].y * down));
                }
            }
        }
    }

    // Times zero: NaN where an output is not finite.
    __device__ __forceinline__ bool broken() const {
        float finite = 0.f;
#pragma unroll
        for (int e = 0; e < D / 2; ++e) finite = fmaf(o[e], 0.f, finite);
        return finite != 0.f;
    }
};

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
