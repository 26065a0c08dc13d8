// Attention over a pool of keys: one CTA walks one split of a stream's keys under one KV head for a tile of its rows.
//
// A tile's rows are (row, query head of the group) pairs, so the keys are read once for all query heads. Two warps share 32 rows: each
// multiplies them with half of the tile's keys, they exchange row maxima and weights through shared memory, and each adds up half of the
// head's width. Scores, weights' sums and outputs are f32, weights enter the second product as bf16. A split leaves (m, l, o) in scratch;
// merge.cu adds the splits in order.
// A value that is not finite makes an output of its tile not finite in every row (0 times infinity). Where that happens the split is walked
// again carefully: such values are replaced by zeros, which leaves the sums of rows that do not see them as they are, and rows that do
// see one are marked by the sign of l, for merge.cu to settle in float64.
#include "args.cuh"
#include "canopy/tf32.cuh"
#include "lanes.cuh"

namespace canopy {

template <int D, int ROWS, int STAGES>
struct Shape {
    static constexpr int kKeys = kTileKeys<D>, kHalf = kKeys / 2;
    static constexpr int kRow = 2 * D, kChunks = D / 8;  // bytes and 16-byte chunks of a row of q, k or v
    static constexpr int kThreads = 2 * ROWS;
    static constexpr int kQ = ROWS * kRow, kTile = kKeys * kRow, kP = ROWS * 2 * kKeys;
    static constexpr bool kApart = STAGES > 1;  // with one stage the weights lie over the keys
    static constexpr int kBytes = kQ + 2 * STAGES * kTile + (kApart ? kP : 0) + 24 * ROWS + 16;
    static constexpr int kTilesS = kHalf / 8, kTilesO = D / 16;  // column tiles of a warp's scores and outputs
};

template <int ROW_BYTES>
__device__ __forceinline__ uint32_t at(int row, int chunk) {
    return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

// Waits for the two warps that share rows.
__device__ __forceinline__ void pair_sync(int pair) { meet<64>(pair + 1); }

// `count` rows of `stride` elements from `src` on; the rest of the tile becomes zeros.
template <int TILE_ROWS, int D, int THREADS>
__device__ __forceinline__ void fetch(uint32_t dst, const __nv_bfloat16* src, int stride, int count) {
    constexpr int kChunks = D / 8, kStep = THREADS / kChunks;
    const int tid = anew(threadIdx.x), row = tid / kChunks, chunk = tid % kChunks;
    const __nv_bfloat16* from = src + (size_t)row * stride + chunk * 8;
    const size_t step = (size_t)kStep * anew(stride);
#pragma unroll
    for (int n = 0; n < TILE_ROWS / kStep; ++n) {
        const bool valid = row + n * kStep < count;
        copy16(dst + at<2 * D>(row + n * kStep, chunk), valid ? from : src, valid);
        from += step;
    }
}

// Replaces values that are not finite by zeros; bit r % 32 of bad[r / 32] says that row r had one.
template <int TILE_ROWS, int D, int THREADS>
__device__ __forceinline__ void sanitize(char* tile, uint32_t* bad) {
    if (threadIdx.x < TILE_ROWS / 32) bad[threadIdx.x] = 0;
    __syncthreads();
    for (int idx = threadIdx.x; idx < TILE_ROWS * D / 2; idx += THREADS) {
        const int row = idx / (D / 2), word = idx % (D / 2);
        uint32_t* p = reinterpret_cast<uint32_t*>(tile + at<2 * D>(row, word / 4)) + word % 4;
        const uint32_t x = *p;
        const bool low = (x & 0x7f80u) == 0x7f80u, high = (x & 0x7f800000u) == 0x7f800000u;
        if (!low && !high) continue;
        *p = (low ? 0u : x & 0xffffu) | (high ? 0u : x & 0xffff0000u);
        atomicOr(bad + row / 32, 1u << (row % 32));
    }
    __syncthreads();
}

template <int D, int ROWS, int STAGES>
__device__ __forceinline__ void attend(const AttendArgs& a, const __nv_bfloat16* q, const __nv_bfloat16* keys, const __nv_bfloat16* values,
                                       const int* lens, const int* slots, const int* cu_nodes, const uint32_t* mask, float* part_o,
                                       float2* part_ml) {
    using S = Shape<D, ROWS, STAGES>;
    extern __shared__ __align__(128) char shared[];
    next_may_begin();
    const Walk w = walk_of<D>(a, blockIdx.z, lens, slots, cu_nodes);
    const int group = a.q_heads / a.kv_heads, total = w.rows * group;
    const int kv_head = blockIdx.x % a.kv_heads, row0 = blockIdx.x / a.kv_heads * ROWS;
    // the paths' CTAs come first: they are short, and leave their place to a split
    const bool paths = w.tree && blockIdx.y == 0;
    const int split = (int)blockIdx.y - (w.tree ? 1 : 0);
    if (w.slot < 0 || !w.fits || row0 >= total || split >= w.splits) return;
    const int part = paths ? w.splits : split;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, pair = warp / 2, half = warp % 2;
    const int pair0 = row0 + 32 * pair;  // the first row of this warp
    const bool active = pair0 < total;

    // tiles and keys of this CTA, from `base` on
    const int last = min(total, row0 + ROWS) - 1;
    const int tiles = paths ? last / group / S::kKeys + 1 : min(w.per, w.tiles - split * w.per);
    const int base = paths ? 0 : (w.tile + split * w.per) * S::kKeys;
    const int limit = paths ? w.rows : w.end;
    const int stride = a.kv_heads * D;
    const size_t origin = ((size_t)w.slot * a.capacity + (paths ? w.context : 0)) * stride + (size_t)kv_head * D;
    const int pair_last = min(total, pair0 + 32) - 1;  // its last row

    char* const q_tile = shared;
    char* const k_tile = q_tile + S::kQ;
    char* const v_tile = k_tile + STAGES * S::kTile;
    char* const p_tile = S::kApart ? v_tile + STAGES * S::kTile : k_tile;
    float* const exchange = reinterpret_cast<float*>(shared + S::kBytes - 24 * ROWS - 16);  // [2][ROWS]
    int4* const table = reinterpret_cast<int4*>(exchange + 2 * ROWS);                          // [ROWS]
    uint32_t* const bad = reinterpret_cast<uint32_t*>(table + ROWS);
    const uint32_t q_at = shared_address(q_tile), p_at = shared_address(p_tile);
    const auto into = [](int tile) { return (CANOPY_FAULT(early_fetch) && tile > 0 ? tile - 1 : tile) % STAGES; };
    const auto fetch_keys = [&](int tile) {
        const int key = base + tile * S::kKeys;
        if (tile < tiles)
            fetch<S::kKeys, D, S::kThreads>(shared_address(k_tile) + into(tile) * S::kTile, keys + origin + (size_t)key * stride, stride, limit - key);
        copies_issued();
        if (CANOPY_FAULT(early_fetch)) copies_arrived<0>(), __syncthreads();
    };
    const auto fetch_values = [&](int tile) {
        const int key = base + tile * S::kKeys;
        if (tile < tiles)
            fetch<S::kKeys, D, S::kThreads>(shared_address(v_tile) + into(tile) * S::kTile, values + origin + (size_t)key * stride, stride, limit - key);
        copies_issued();
        if (CANOPY_FAULT(early_fetch)) copies_arrived<0>(), __syncthreads();
    };

    {  // the rows' queries
        constexpr int kStep = S::kThreads / S::kChunks;
        const int chunk = tid % S::kChunks;
#pragma unroll 4
        for (int r = tid / S::kChunks; r < ROWS; r += kStep) {
            const int m = row0 + r;
            const bool valid = m < total;
            const size_t row = ((size_t)(w.first + m / group) * a.q_heads + kv_head * group + m % group) * D;
            copy16(q_at + at<S::kRow>(r, chunk), q + (valid ? row + chunk * 8 : 0), valid);
        }
    }
    if (tid < ROWS) {  // x, y: the keys in position order that a row sees; z: its packed row; w: its place in out, -1 where there is none
        const int m = row0 + tid, row = min(m, total - 1) / group;
        const int2 range = sight(a, w.context, w.end, row);
        const int place = (w.first + row) * (int)a.q_heads + kv_head * group + m % group;
        table[tid] = make_int4(range.x, range.y, w.first + row, m < total ? place : -1);
    }
    // row 16 mt + 8 h + lane / 4 of the warp's 32
    const auto row_of = [&](int mt, int h) { return table[32 * pair + 16 * mt + 8 * h + lane / 4]; };
    // keys in [common_from, common_to) are seen by every row of the stream
    const int common_from = sight(a, w.context, w.end, w.rows - 1).x, common_to = sight(a, w.context, w.end, 0).y;

    float o[2][S::kTilesO][4], top[2][2], sum[2][2];
    bool marked[2][2];
    for (int pass = 0; pass < 2; ++pass) {
        const bool careful = pass == 1;
#pragma unroll
        for (int mt = 0; mt < 2; ++mt) {
#pragma unroll
            for (int t = 0; t < S::kTilesO; ++t) o[mt][t][0] = o[mt][t][1] = o[mt][t][2] = o[mt][t][3] = 0.f;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                top[mt][h] = -INFINITY;
                sum[mt][h] = 0.f;
                marked[mt][h] = false;
            }
        }
        fetch_keys(0);
        if (S::kApart) fetch_values(0);
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            const int stage = tile % STAGES, key0 = base + tile * S::kKeys + half * S::kHalf;
            // a tile that none of the warp's rows sees is left out: their paths end before it
            const bool seen = active && !(paths && tile * S::kKeys > pair_last / group);
            copies_arrived<S::kApart ? 1 : 0>();
            __syncthreads();  // the tile's keys are here; nobody reads the last tile's weights and values any more
            if (S::kApart) fetch_keys(tile + 1);
            else fetch_values(tile);
            float s[2][S::kTilesS][4];
            if (seen) {
                const int lane = anew(threadIdx.x % 32);
#pragma unroll
                for (int mt = 0; mt < 2; ++mt)
#pragma unroll
                    for (int t = 0; t < S::kTilesS; ++t) s[mt][t][0] = s[mt][t][1] = s[mt][t][2] = s[mt][t][3] = 0.f;
                const uint32_t k_at = shared_address(k_tile) + stage * S::kTile;
#pragma unroll
                for (int step = 0; step < D / 16; ++step) {
                    uint32_t qa[2][4];
#pragma unroll
                    for (int mt = 0; mt < 2; ++mt)
                        load_matrices(qa[mt], q_at + at<S::kRow>(32 * pair + 16 * mt + lane % 16, 2 * step + lane / 16));
#pragma unroll
                    for (int np = 0; np < S::kTilesS / 2; ++np) {
                        uint32_t kb[4];
                        load_matrices(kb, k_at + at<S::kRow>(half * S::kHalf + 16 * np + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
#pragma unroll
                        for (int mt = 0; mt < 2; ++mt) {
                            mma(s[mt][2 * np], qa[mt], kb[0], kb[1]);
                            mma(s[mt][2 * np + 1], qa[mt], kb[2], kb[3]);
                        }
                    }
                }
                if (paths || key0 < common_from || key0 + S::kHalf > common_to) {
#pragma unroll
                    for (int mt = 0; mt < 2; ++mt)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const int4 row = row_of(mt, h);
                            const uint32_t* words = mask + (size_t)row.z * kMaskWords + key0 / 32;
#pragma unroll
                            for (int t = 0; t < S::kTilesS; ++t) {
                                const uint32_t word = paths ? words[t / 4] >> (t % 4 * 8 + lane % 4 * 2) : 0;
                                const bool cut = CANOPY_FAULT(short_path) && key0 + 8 * t + lane % 4 == 0;
#pragma unroll
                                for (int c = 0; c < 2; ++c) {
                                    const int key = key0 + 8 * t + lane % 4 * 2 + c;
                                    const bool visible = paths ? word >> c & 1 && !(cut && c == 0) : key >= row.x && key < row.y;
                                    if (!visible) s[mt][t][2 * h + c] = -INFINITY;
                                }
                            }
                        }
                }
#pragma unroll
                for (int mt = 0; mt < 2; ++mt)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float most = -INFINITY;
#pragma unroll
                        for (int t = 0; t < S::kTilesS; ++t) most = fmaxf(most, fmaxf(s[mt][t][2 * h], s[mt][t][2 * h + 1]));
                        most = quad_max(most);
                        if (lane % 4 == 0) exchange[half * ROWS + 32 * pair + 16 * mt + 8 * h + lane / 4] = most;
                    }
            }
            if (S::kApart) copies_arrived<1>();
            __syncthreads();  // maxima are here, and with two stages the tile's values
            if (S::kApart) fetch_values(tile + 1);
            if (careful) {
                copies_arrived<0>();
                __syncthreads();
                sanitize<S::kKeys, D, S::kThreads>(v_tile + stage * S::kTile, bad);
            }
            if (seen) {
                const int lane = anew(threadIdx.x % 32);
                bool moved = false;
                float down[2][2];
#pragma unroll
                for (int mt = 0; mt < 2; ++mt)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int r = 32 * pair + 16 * mt + 8 * h + lane / 4;
                        const float before = top[mt][h];
                        const float now = fmaxf(before, fmaxf(exchange[r], exchange[ROWS + r]));
                        const float shift = now == -INFINITY ? 0.f : now;
                        down[mt][h] = power_of_two((before - shift) * a.scale);
                        moved |= down[mt][h] != 1.f;
                        top[mt][h] = now;
                        const float level = shift * a.scale;
                        float added = 0.f;
#pragma unroll
                        for (int t = 0; t < S::kTilesS; ++t) {
                            float p[2];
#pragma unroll
                            for (int c = 0; c < 2; ++c) {
                                const float score = s[mt][t][2 * h + c];
                                p[c] = power_of_two(fmaf(score, a.scale, -level));
                                added = planted_half(added + p[c]);
                            }
                            *reinterpret_cast<uint32_t*>(p_tile + at<2 * S::kKeys>(r, half * (S::kHalf / 8) + t) + lane % 4 * 4) =
                                pack_bf16(p[0], p[1]);
                        }
                        sum[mt][h] = fmaf(sum[mt][h], down[mt][h], added);
                        if (careful) {
                            const int4 row = row_of(mt, h);
                            const uint32_t* words = mask + (size_t)row.z * kMaskWords + key0 / 32;
                            for (int n = lane % 4; n < S::kHalf; n += 4) {
                                const int key = key0 + n;
                                const bool visible = paths ? words[n / 32] >> (n % 32) & 1 : key >= row.x && key < row.y;
                                const int in_tile = half * S::kHalf + n;
                                if (visible && (bad[in_tile / 32] >> (in_tile % 32) & 1)) marked[mt][h] = true;
                            }
                        }
                    }
                if (__any_sync(kFull, moved)) {
#pragma unroll
                    for (int mt = 0; mt < 2; ++mt)
#pragma unroll
                        for (int t = 0; t < S::kTilesO; ++t)
#pragma unroll
                            for (int e = 0; e < 4; ++e) o[mt][t][e] *= down[mt][e / 2];
                }
            }
            if (!S::kApart) {
                copies_arrived<0>();
                __syncthreads();  // the tile's values and weights are here
            } else if (active) {
                pair_sync(pair);  // the pair's weights are here
            }
            if (seen) {
                const int lane = anew(threadIdx.x % 32);
                const uint32_t v_at = shared_address(v_tile) + stage * S::kTile;
#pragma unroll
                for (int step = 0; step < S::kKeys / 16; ++step) {
                    uint32_t pa[2][4];
#pragma unroll
                    for (int mt = 0; mt < 2; ++mt)
                        load_matrices(pa[mt], p_at + at<2 * S::kKeys>(32 * pair + 16 * mt + lane % 16, 2 * step + lane / 16));
#pragma unroll
                    for (int np = 0; np < S::kTilesO / 2; ++np) {
                        uint32_t vb[4];
                        load_columns_of_rows(vb, v_at + at<S::kRow>(16 * step + lane % 16, half * S::kTilesO + 2 * np + lane / 16));
#pragma unroll
                        for (int mt = 0; mt < 2; ++mt) {
                            mma(o[mt][2 * np], pa[mt], vb[0], vb[1]);
                            mma(o[mt][2 * np + 1], pa[mt], vb[2], vb[3]);
                        }
                    }
                }
            }
            if (!S::kApart) {
                __syncthreads();  // nobody reads the weights any more, which lie over the keys
                fetch_keys(tile + 1);
            }
        }
        copies_arrived<0>();
        float finite = 0.f;  // times zero: NaN where a value is not finite
#pragma unroll
        for (int mt = 0; mt < 2; ++mt)
#pragma unroll
            for (int t = 0; t < S::kTilesO; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e) finite = fmaf(o[mt][t][e], 0.f, finite);
        if (!__syncthreads_or(finite != 0.f) || CANOPY_FAULT(leak)) break;
    }

    // half 1 hands over its sums of weights; half 0 adds them to its own
#pragma unroll
    for (int mt = 0; mt < 2; ++mt)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[mt][h] = quad_sum(sum[mt][h]);
            const uint32_t votes = __ballot_sync(kFull, marked[mt][h]);
            marked[mt][h] = votes >> (lane & 28) & 15;
            if (half == 1 && lane % 4 == 0)
                exchange[32 * pair + 16 * mt + 8 * h + lane / 4] = marked[mt][h] ? -sum[mt][h] : sum[mt][h];
        }
    __syncthreads();
    const size_t heads = (size_t)a.rows * a.q_heads;
#pragma unroll
    for (int mt = 0; mt < 2; ++mt)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int index = row_of(mt, h).w;
            if (index < 0) continue;
            const size_t place = part * heads + index;
            if (half == 0 && lane % 4 == 0) {
                const float other = exchange[32 * pair + 16 * mt + 8 * h + lane / 4];
                const float all = sum[mt][h] + fabsf(other);
                part_ml[place] = make_float2(top[mt][h], marked[mt][h] || signbit(other) ? -all : all);
            }
            float* out = part_o + place * D + half * (D / 2) + lane % 4 * 2;
#pragma unroll
            for (int t = 0; t < S::kTilesO; ++t)
                *reinterpret_cast<float2*>(out + 8 * t) = make_float2(o[mt][t][2 * h], o[mt][t][2 * h + 1]);
        }
}

}  // namespace canopy

#define CANOPY_ATTEND(D, ROWS, STAGES, BLOCKS)                                                                                    \
    extern "C" __global__ void __launch_bounds__(2 * ROWS, BLOCKS) attend_d##D##_r##ROWS##_s##STAGES(                             \
        const __grid_constant__ AttendArgs a, const __nv_bfloat16* q, const __nv_bfloat16* keys, const __nv_bfloat16* values,     \
        const int* lens, const int* slots, const int* cu_nodes, const uint32_t* mask, float* part_o, float2* part_ml) {           \
        canopy::attend<D, ROWS, STAGES>(canopy::planted(a), q, keys, values, lens, slots, cu_nodes, mask, part_o, part_ml);                        \
    }

CANOPY_ATTEND(256, 64, 2, 1)
#ifndef CANOPY_CONTROLS
CANOPY_ATTEND(256, 128, 2, 1)
CANOPY_ATTEND(256, 64, 1, 2)
CANOPY_ATTEND(128, 128, 2, 1)
CANOPY_ATTEND(128, 64, 2, 1)
CANOPY_ATTEND(128, 64, 1, 2)
#endif
