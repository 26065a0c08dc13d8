// What ring_sm90a.cu is made of: the ring's layout and turns, the orders to the copy engine, and the rows of one warpgroup.
#pragma once
#include "args.cuh"
#include "canopy/bulk.cuh"
#include "canopy/wgmma.cuh"
#include "lanes.cuh"

namespace canopy {

// A row's level is the power of two on a coarse grid that is nearest to its largest score when it last moved: rows of like scores have one
// level in every split, and then sums are added as they are.
constexpr float kGrid = 32.f;
constexpr float kReach = 16.f;  // powers of two by which weights may exceed 1 before the level moves

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

template <int D>
struct Rows {
    using S = Ring<D>;
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
        const Described queries(anew(q_at), 0), keys(anew(k_at), 0);
#pragma unroll
        for (int step = 0; step < D / 16; ++step)
            products(s, queries.at(step / 4 * (S::kRows * 128) + step % 4 * 32), keys.at(step / 4 * (kKeys * 128) + step % 4 * 32), step > 0);
        products_issued();
    }

    __device__ __forceinline__ void mix(uint32_t v_at) {
        const Described values(anew(v_at), kKeys * 128);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) weighted(o, weights[step], values.at(step * 2048));
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

    // Scores become weights, which are summed before they are rounded for the products: a rounding then moves an output by its own value
    // alone. `down` is what older sums are multiplied by.
    __device__ __forceinline__ void weigh(float scale, float (&down)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most = -INFINITY;
#pragma unroll
            for (int t = 0; t < kKeys / 8; ++t) most = fmaxf(most, fmaxf(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]));
            most = quad_max(most) * scale;
            const bool follows = most - top[h] > kReach;
            const float now = follows ? kGrid * rintf(most / kGrid) : top[h], level = fmaxf(now, -3e38f);
            down[h] = follows ? power_of_two(top[h] - level) : 1.f;
            top[h] = now;
            float added[2] = {0.f, 0.f};
#pragma unroll
            for (int t = 0; t < kKeys / 8; ++t) {
                float* const x = s + 4 * t + 2 * h;
                x[0] = power_of_two(fmaf(x[0], scale, -level));
                x[1] = power_of_two(fmaf(x[1], scale, -level));
                added[0] = planted_half(added[0] + x[0]);
                added[1] = planted_half(added[1] + x[1]);
            }
            sum[h] = planted_half(fmaf(sum[h], down[h], planted_half(added[0] + added[1])));
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

    // Adds the sums of a split to those of the fold's splits before it, which lie in shared memory at `fold`; the last one's go to memory.
    __device__ __forceinline__ void hold(const Row* own, size_t part, int nth, bool last, uint32_t marks, Level (&so_far)[2], float2* fold,
                                         float* part_o, float2* part_ml) {
        const int lane = anew(threadIdx.x) % 32;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float whole = quad_sum(sum[h]);
            const Level mine = {top[h], marks >> h & 1 ? -whole : whole};
            float2* const held = fold + h * (D / 8) * S::kWorkers;
            if (nth == 0) {
                so_far[h] = mine;
            } else {
                float down, up;
                take_in(so_far[h], mine, down, up);
#pragma unroll
                for (int t = 0; t < D / 8; ++t) {
                    const float2 x = held[t * S::kWorkers];
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float& y = o[4 * t + 2 * h + c];
                        y = taken_in(c ? x.y : x.x, down, y, up);
                    }
                }
            }
            if (!last) {
#pragma unroll
                for (int t = 0; t < D / 8; ++t) held[t * S::kWorkers] = make_float2(o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
                continue;
            }
            const int index = own[8 * h].place;
            if (index < 0) continue;
            const size_t place = part + index;
            if (lane % 4 == 0) part_ml[place] = make_float2(so_far[h].top, so_far[h].sum);
            float2* const out = reinterpret_cast<float2*>(part_o + place * D) + lane % 4;
#pragma unroll
            for (int t = 0; t < D / 8; ++t) out[4 * t] = make_float2(o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
        }
    }

    // Adds the sums of split `nth` of a part to those of the splits before it, which lie in memory where this thread put them.
    __device__ __forceinline__ void leave(const Row* own, size_t part, int nth, uint32_t marks, Level (&so_far)[2], float* part_o,
                                          float2* part_ml) const {
        const int lane = anew(threadIdx.x) % 32;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float whole = quad_sum(sum[h]);
            const Level mine = {top[h], marks >> h & 1 ? -whole : whole};
            float down = 1.f, up = 1.f;
            // where there are no sums yet, or no new ones, these are zeros
            const bool level = nth == 0 || so_far[h].top == mine.top || so_far[h].top == -INFINITY || mine.top == -INFINITY;
            const bool plain = __all_sync(kFull, level);
            if (nth == 0)
                so_far[h] = mine;
            else
                take_in(so_far[h], mine, down, up);
            const int index = own[8 * h].place;
            if (index < 0) continue;
            const size_t place = part + index;
            if (lane % 4 == 0) part_ml[place] = make_float2(so_far[h].top, so_far[h].sum);
            float2* const out = reinterpret_cast<float2*>(part_o + place * D) + lane % 4;
            if (nth == 0) {
#pragma unroll
                for (int t = 0; t < D / 8; ++t) out[4 * t] = make_float2(o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
            } else if (plain) {
#pragma unroll
                for (int t = 0; t < D / 8; ++t) add_in_memory(out + 4 * t, o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
            } else {
                constexpr int kAhead = 8;
#pragma unroll
                for (int first = 0; first < D / 8; first += kAhead) {
                    float2 held[kAhead];
#pragma unroll
                    for (int t = 0; t < kAhead; ++t) held[t] = __ldcg(out + 4 * (first + t));  // where additions in memory are seen
#pragma unroll
                    for (int t = 0; t < kAhead; ++t) {
                        const float* mine = o + 4 * (first + t) + 2 * h;
                        out[4 * (first + t)] = make_float2(taken_in(held[t].x, down, mine[0], up), taken_in(held[t].y, down, mine[1], up));
                    }
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

}  // namespace canopy
