// attend.cu on warpgroup products (Hopper only): the same walk, parts and careful second pass, other tiles and sums.
//
// A warpgroup takes 64 rows and the whole width of a head: scores of 64 (width 128: 128) keys and outputs lie in registers, weights go from
// registers into the second product. The products of the next tile's scores and of this tile's outputs run while the next weights are
// made.
#include "args.cuh"
#include "canopy/wgmma.cuh"
#include "lanes.cuh"

namespace canopy {

template <int D, int GROUPS>
struct Wide {
    static constexpr int kKeys = kTileKeys<D>, kRows = 64 * GROUPS, kThreads = 128 * GROUPS;
    static constexpr int kTile = kKeys * 2 * D, kQ = kRows * 2 * D;
    static constexpr int kBytes = kQ + 4 * kTile + 16 * kRows + 16;
};

// Where 16-byte chunk `chunk` of a row lies in a tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ uint32_t spot(int row, int chunk) {
    return chunk / 8 * (ROWS * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

// `count` rows of `stride` elements from `src` on; the rest of the tile becomes zeros.
template <int ROWS, int D, int THREADS>
__device__ __forceinline__ void fetch(uint32_t dst, const __nv_bfloat16* src, int stride, int count) {
    constexpr int kChunks = D / 8, kStep = THREADS / kChunks;
    const int tid = anew(threadIdx.x), row = tid / kChunks, chunk = tid % kChunks;
    const __nv_bfloat16* from = src + (size_t)row * stride + chunk * 8;
    const size_t step = (size_t)kStep * anew(stride);
#pragma unroll
    for (int n = 0; n < ROWS / kStep; ++n) {
        const bool valid = row + n * kStep < count;
        copy16(dst + spot<ROWS>(row + n * kStep, chunk), valid ? from : src, valid);
        from += step;
    }
}

// Replaces values that are not finite by zeros; bit r % 32 of bad[r / 32] says that row r had one.
template <int ROWS, int D, int THREADS>
__device__ __forceinline__ void sanitize(char* tile, uint32_t* bad) {
    if (threadIdx.x < ROWS / 32) bad[threadIdx.x] = 0;
    __syncthreads();
    for (int idx = threadIdx.x; idx < ROWS * D / 2; idx += THREADS) {
        const int row = idx / (D / 2), word = idx % (D / 2);
        uint32_t* p = reinterpret_cast<uint32_t*>(tile + spot<ROWS>(row, word / 4)) + word % 4;
        const uint32_t x = *p;
        const bool low = (x & 0x7f80u) == 0x7f80u, high = (x & 0x7f800000u) == 0x7f800000u;
        if (!low && !high) continue;
        *p = (low ? 0u : x & 0xffffu) | (high ? 0u : x & 0xffff0000u);
        atomicOr(bad + row / 32, 1u << (row % 32));
    }
    writes_visible();
    __syncthreads();
}

template <int D, int GROUPS>
__device__ __forceinline__ void attend_wide(const AttendArgs& a, const __nv_bfloat16* q, const __nv_bfloat16* keys,
                                            const __nv_bfloat16* values, const int* lens, const int* slots, const int* cu_nodes,
                                            const uint32_t* mask, float* part_o, float2* part_ml) {
    using S = Wide<D, GROUPS>;
    constexpr int kKeys = S::kKeys, kHalves = D / 128, kSteps = kKeys / 16;
    extern __shared__ __align__(1024) char shared[];
    const Walk w = walk_of<D>(a, blockIdx.z, lens, slots, cu_nodes);
    const int group = a.q_heads / a.kv_heads, total = w.rows * group;
    const int kv_head = blockIdx.x % a.kv_heads, row0 = blockIdx.x / a.kv_heads * S::kRows;
    // the paths' CTAs come first: they are short, and leave their place to a split
    const bool paths = w.tree && blockIdx.y == 0;
    const int split = (int)blockIdx.y - (w.tree ? 1 : 0);
    if (w.slot < 0 || !w.fits || row0 >= total || split >= w.splits) return;
    const int part = paths ? w.splits : split;
    const int tid = threadIdx.x, lane = tid % 32, crew = __shfl_sync(kFull, tid / 128, 0), own0 = 16 * (tid / 32) + lane / 4;

    const int last = min(total, row0 + S::kRows) - 1;
    const int tiles = paths ? last / group / kKeys + 1 : min(w.per, w.tiles - split * w.per);
    const int base = paths ? 0 : (w.tile + split * w.per) * kKeys, limit = paths ? w.rows : w.end;
    // tiles that some row of this warpgroup sees: paths end before the others
    const int crew0 = row0 + 64 * crew, crew_last = min(total, crew0 + 64) - 1;
    const int seen = __shfl_sync(kFull, crew0 >= total ? 0 : paths ? crew_last / group / kKeys + 1 : tiles, 0);
    const int stride = a.kv_heads * D;
    const size_t origin = ((size_t)w.slot * a.capacity + (paths ? w.context : 0)) * stride + (size_t)kv_head * D;

    char* const k_tile = shared + S::kQ;
    char* const v_tile = k_tile + 2 * S::kTile;
    Row* const table = reinterpret_cast<Row*>(v_tile + 2 * S::kTile);
    uint32_t* const bad = reinterpret_cast<uint32_t*>(table + S::kRows);
    const uint32_t q_at = shared_address(shared), k_at = shared_address(k_tile), v_at = shared_address(v_tile);
    const auto fetch_tile = [&](uint32_t to, const __nv_bfloat16* pool, int tile) {
        const int key = base + tile * kKeys;
        if (tile < tiles)
            fetch<kKeys, D, S::kThreads>(to + (CANOPY_FAULT(early_fetch) && tile > 0 ? tile - 1 : tile) % 2 * S::kTile, pool + origin + (size_t)key * stride, stride, limit - key);
        copies_issued();
        if (CANOPY_FAULT(early_fetch)) copies_arrived<0>(), writes_visible(), __syncthreads();
    };

    {  // the rows' queries
        constexpr int kChunks = D / 8;
        const int chunk = tid % kChunks;
#pragma unroll 4
        for (int r = tid / kChunks; r < S::kRows; r += S::kThreads / kChunks) {
            const int m = row0 + r;
            const bool valid = m < total;
            const size_t row = ((size_t)(w.first + m / group) * a.q_heads + kv_head * group + m % group) * D;
            copy16(q_at + spot<S::kRows>(r, chunk), q + (valid ? row + chunk * 8 : 0), valid);
        }
    }
    if (tid < S::kRows) {
        const int m = row0 + tid, row = min(m, total - 1) / group;
        const int2 range = sight(a, w.context, w.end, row);
        const int place = (w.first + row) * (int)a.q_heads + kv_head * group + m % group;
        table[tid] = {range.x, range.y, w.first + row, m < total ? place : -1};
    }
    // keys in [common_from, common_to) are seen by every row of the stream
    const int common_from = sight(a, w.context, w.end, w.rows - 1).x, common_to = sight(a, w.context, w.end, 0).y;

    float o[kHalves][64], s[kKeys / 2], top[2], sum[2];
    uint32_t weights[kSteps][4];
    uint32_t marks;  // bit h: row own0 + 8 h sees a value that is not finite
    const auto score = [&](int tile) {
        const uint32_t k_stage = anew(k_at + tile % 2 * S::kTile), q_crew = anew(q_at + crew * 8192);
#pragma unroll
        for (int step = 0; step < D / 16; ++step)
            products(s, descriptor(q_crew + step / 4 * (S::kRows * 128) + step % 4 * 32, 0),
                     descriptor(k_stage + step / 4 * (kKeys * 128) + step % 4 * 32, 0), step > 0);
        products_issued();
    };
    const auto mix = [&](int tile) {
        const uint32_t v_stage = anew(v_at + tile % 2 * S::kTile);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
                weighted(o[half], weights[step], descriptor(v_stage + half * (2 * kKeys * 128) + step * 2048, kKeys * 128));
        products_issued();
    };
    const auto settle_all = [&] {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) settle(o[half]);
        settle(s);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) settle(weights[step]);
    };
    // once no product reads the last tile's weights any more
    const auto pack = [&] {
#pragma unroll
        for (int t = 0; t < kKeys / 8; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) weights[t / 2][t % 2 * 2 + h] = pack_bf16(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]);
    };
    // scores of a tile become weights, in f32; `down` is what older sums are multiplied by
    const auto weigh = [&](int tile, float (&down)[2]) {
        const int key0 = base + tile * kKeys;
        if (paths || key0 < common_from || key0 + kKeys > common_to) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Row row = table[own0 + 8 * h];
#pragma unroll
                for (int word = 0; word < kKeys / 32; ++word) {
                    const uint32_t visible = seen_keys(row, mask, paths, key0 + 32 * word) >> (lane % 4 * 2);
#pragma unroll
                    for (int e = 0; e < 8; ++e)
                        if (!(visible >> (e / 2 * 8 + e % 2) & 1)) s[16 * word + e / 2 * 4 + 2 * h + e % 2] = -INFINITY;
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most = top[h];
#pragma unroll
            for (int t = 0; t < kKeys / 8; ++t) most = fmaxf(most, fmaxf(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]));
            most = quad_max(most);
            const float shift = most == -INFINITY ? 0.f : most, level = shift * a.scale;
            down[h] = power_of_two((top[h] - shift) * a.scale);
            top[h] = most;
            float added = 0.f;
#pragma unroll
            for (int t = 0; t < kKeys / 8; ++t) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& x = s[4 * t + 2 * h + c];
                    x = power_of_two(fmaf(x, a.scale, -level));
                    added = planted_half(added + x);
                }
            }
            sum[h] = fmaf(sum[h], down[h], added);
        }
    };

    for (int pass = 0; pass < 2; ++pass) {
        const bool careful = pass == 1;
        marks = 0;
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
#pragma unroll
            for (int e = 0; e < 64; ++e) o[half][e] = 0.f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            top[h] = -INFINITY;
            sum[h] = 0.f;
        }
        fetch_tile(k_at, keys, 0);
        fetch_tile(v_at, values, 0);
        copies_arrived<1>();
        writes_visible();
        __syncthreads();  // queries and the first keys are here
        fetch_tile(k_at, keys, 1);
        if (seen > 0) {
            float down[2];
            settle(s);
            products_begin();
            score(0);
            products_done<0>();
            settle(s);
            weigh(0, down);
            pack();
        }
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            copies_arrived<0>();
            writes_visible();
            __syncthreads();  // this tile's values and the next one's keys are here; nobody reads the tiles before them any more
            fetch_tile(k_at, keys, tile + 2);
            fetch_tile(v_at, values, tile + 1);
            if (careful) {
                sanitize<kKeys, D, S::kThreads>(v_tile + tile % 2 * S::kTile, bad);
#pragma unroll 1
                for (int h = 0; h < 2; ++h)
#pragma unroll 1
                    for (int word = 0; word < kKeys / 32; ++word)
                        if (bad[word] & seen_keys(table[own0 + 8 * h], mask, paths, base + tile * kKeys + 32 * word)) marks |= 1u << h;
            }
            if (tile + 1 < seen) {
                float down[2];
                settle_all();
                products_begin();
                score(tile + 1);
                mix(tile);
                products_done<1>();
                settle(s);
                weigh(tile + 1, down);
                products_done<0>();
                settle_all();
                if (__any_sync(kFull, down[0] != 1.f || down[1] != 1.f)) {
#pragma unroll
                    for (int half = 0; half < kHalves; ++half)
#pragma unroll
                        for (int e = 0; e < 64; ++e) o[half][e] *= down[e / 2 % 2];
                }
                pack();
            } else if (tile + 1 == seen) {
                settle_all();
                products_begin();
                mix(tile);
                products_done<0>();
                settle_all();
            }
        }
        copies_arrived<0>();
        float finite = 0.f;  // times zero: NaN where a value is not finite
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
#pragma unroll
            for (int e = 0; e < 64; ++e) finite = fmaf(o[half][e], 0.f, finite);
        if (!__syncthreads_or(finite != 0.f) || CANOPY_FAULT(leak)) break;
    }

    const size_t heads = (size_t)a.rows * a.q_heads;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float all = quad_sum(sum[h]);
        const int index = table[own0 + 8 * h].place;
        if (index < 0) continue;
        const size_t place = part * heads + index;
        if (lane % 4 == 0) part_ml[place] = make_float2(top[h], marks >> h & 1 ? -all : all);
        float* out = part_o + place * D + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
#pragma unroll
            for (int t = 0; t < 16; ++t)
                *reinterpret_cast<float2*>(out + 128 * half + 8 * t) =
                    make_float2(o[half][4 * t + 2 * h], o[half][4 * t + 2 * h + 1]);
    }
}

}  // namespace canopy

#define CANOPY_ATTEND_WIDE(D, ROWS, GROUPS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS, 1) attend_sm90a_d##D##_r##ROWS(                                     \
        const __grid_constant__ AttendArgs a, const __nv_bfloat16* q, const __nv_bfloat16* keys, const __nv_bfloat16* values,      \
        const int* lens, const int* slots, const int* cu_nodes, const uint32_t* mask, float* part_o, float2* part_ml) {            \
        canopy::attend_wide<D, GROUPS>(canopy::planted(a), q, keys, values, lens, slots, cu_nodes, mask, part_o, part_ml);                          \
    }

CANOPY_ATTEND_WIDE(256, 64, 1)
#ifndef CANOPY_CONTROLS
CANOPY_ATTEND_WIDE(256, 128, 2)
CANOPY_ATTEND_WIDE(128, 128, 2)
CANOPY_ATTEND_WIDE(128, 64, 1)
#endif
