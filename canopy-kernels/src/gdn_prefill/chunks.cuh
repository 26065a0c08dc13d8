// gdn_prefill, second launch: the chunks of a sequence one after another, the state in registers.
//
// A warp owns sixteen value columns of one value head of one sequence: S^T [16, 128] in f32 accumulators. Per chunk of 64 rows, with the
// record of prepare (record.cuh) and everything transposed, so that one product's sums are the next one's operand:
//   R^T = beta (V^T - exp(g_cum) S^T K^T)     U^T = R^T T^T
//   O^T = exp(g_cum) S^T Q^T + U^T C^T        S^T <- exp(g_cum_end) S^T + (exp(g_cum_end - g_cum) U)^T K
// k and q rows stay raw bf16, their norms are in the record's factors. SPLIT (tier A) takes S beside them as two bf16 parts (2^-17 of an
// element is left out), U as three, and the triangles and what they weigh as two tf32 parts (2^-20): on nearly equal keys neighbouring
// rows of U cancel, so that their errors would add up over a chunk. Otherwise all are rounded once, to bf16 and tf32.
// PAIRED: two warps share the columns. The first finds U and hands it on; the second, one chunk behind, gives O from its own copy of S.
// Both keep S by the same operations, so bits do not depend on the form, nor on COLS or STAGES.
// A row that is not finite would reach earlier rows of its tile of sixteen through coefficients that are 0: where a column holds such a row
// behind a finite first one, every row is found by itself from the rows up to it. The others keep their bits, as zeros add nothing.
// Shared memory: k, q and v rows, records, and U of a pair; STAGES of each, one more of k.
#pragma once
#include "record.cuh"

namespace canopy {

constexpr int kParts = kRows / 16;

// Eight columns a lane pair: the accumulators of [16, 64].
using Sums = float[2 * kParts][4];

// Two neighbours as bf16, and what is left of them.
__device__ __forceinline__ uint32_t cut_bf16(float (&two)[2]) {
    const uint32_t packed = pack_bf16(two[0], two[1]);
    two[0] -= __uint_as_float(packed << 16);
    two[1] -= __uint_as_float(packed & 0xffff0000u);
    return packed;
}

// Two accumulators of [16, 8] as the A operand of a k-step, in bf16 parts that add up to them.
template <int PARTS>
__device__ __forceinline__ void to_operand(uint32_t (&parts)[PARTS][4], const float (&left)[4], const float (&right)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float* from = e < 2 ? left : right;
        float two[2] = {from[e % 2 * 2], from[e % 2 * 2 + 1]};
#pragma unroll
        for (int part = 0; part < PARTS; ++part) parts[part][e] = cut_bf16(two);
    }
}

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int n = 0; n < 2 * kParts; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.f;
}

// S^T times the rows of a tile.
template <bool SPLIT>
__device__ __forceinline__ void project(Sums& sums, const float (&s)[16][4], uint32_t tile, int lane) {
    clear(sums);
#pragma unroll
    for (int step = 0; step < kDk / 16; ++step) {
        uint32_t x[SPLIT ? 2 : 1][4], rows[kParts][4];
        to_operand(x, s[2 * step], s[2 * step + 1]);
#pragma unroll
        for (int p = 0; p < kParts; ++p) load_columns(rows[p], tile, 16 * p, step, lane);
#pragma unroll
        for (int part = 0; part < (SPLIT ? 2 : 1); ++part)
#pragma unroll
            for (int p = 0; p < kParts; ++p) {
                mma(sums[2 * p], x[part], rows[p][0], rows[p][1]);
                mma(sums[2 * p + 1], x[part], rows[p][2], rows[p][3]);
            }
    }
}

// x times a triangle of a record, transposed: sums over the rows up to each row, tile by tile. APART: rows of x past `last` count as 0.
template <bool SPLIT, bool APART>
__device__ __forceinline__ void weigh(Sums& sums, const Sums& x, const char* triangle, int lane, int last) {
    clear(sums);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        if (CANOPY_FAULT(dropped_slice) && p == 1) continue;
        if (APART) asm volatile("" ::: "memory");  // or loads move ahead, into registers that there are not
        float high[2][4], low[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const bool past = APART && 16 * p + 8 * half + lane % 4 * 2 + e / 2 > last;
                const float own = past ? 0.f : x[2 * p + half][e % 2 * 2 + e / 2];
                high[half][e] = SPLIT ? cut_tf32(own) : to_tf32(own);
                low[half][e] = nudged_tf32(own - high[half][e]);
            }
        float4 w[kParts][2];
#pragma unroll
        for (int n = p; n < kParts; ++n)
#pragma unroll
            for (int down = 0; down < 2; ++down)
                w[n][down] = *reinterpret_cast<const float4*>(triangle + (n * (n + 1) / 2 + p) * kTile + 512 * down + 16 * lane);
        // a k-step of eight rows: a lane's columns 0 and 1 of x and w stand for the k-step's columns lane % 4 and lane % 4 + 4
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int product = 0; product < (SPLIT ? 3 : 1); ++product)
#pragma unroll
                for (int n = p; n < kParts; ++n)
#pragma unroll
                    for (int down = 0; down < 2; ++down) {
                        const float w0 = half ? w[n][down].z : w[n][down].x, w1 = half ? w[n][down].w : w[n][down].y;
                        float(&own)[4] = sums[2 * n + down];
                        if (!SPLIT) mma_tf32(own, high[half], cut_tf32(nudged_tf32(w0)), cut_tf32(nudged_tf32(w1)));
                        else if (product < 2) mma_tf32(own, product ? low[half] : high[half], cut_tf32(w0), cut_tf32(w1));
                        else mma_tf32(own, high[half], nudged_tf32(w0 - cut_tf32(w0)), nudged_tf32(w1 - cut_tf32(w1)));
                    }
    }
}

// `weigh` row by row, each from the rows up to it.
template <bool SPLIT>
__device__ __forceinline__ void weigh_apart(Sums& sums, const Sums& x, const char* triangle, int lane) {
    clear(sums);
#pragma unroll 1
    for (int last = 0; last < kRows; ++last) {
        Sums own;
        weigh<SPLIT, true>(own, x, triangle, lane, last);
#pragma unroll
        for (int n = 0; n < 2 * kParts; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (8 * n + lane % 4 * 2 + e % 2 == last) sums[n][e] = own[n][e];
    }
}

// Whether one of the warp's columns holds a row that is not finite behind a finite first one.
__device__ __forceinline__ bool rows_to_keep_apart(const Sums& x, int lane) {
    bool apart = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float nought = 0.f;  // NaN as soon as one is not finite
#pragma unroll
        for (int n = 0; n < 2 * kParts; ++n) nought = fmaf(x[n][2 * half + 1], 0.f, fmaf(x[n][2 * half], 0.f, nought));
        const float first = __shfl_sync(kFull, x[0][2 * half], lane & ~3);
        apart |= isnan(nought) && isfinite(first);
    }
    return __any_sync(kFull, apart);
}

template <bool SPLIT>
__device__ __forceinline__ void weigh_rows(Sums& sums, const Sums& x, const char* triangle, int lane) {
    if (rows_to_keep_apart(x, lane) && !CANOPY_FAULT(leak)) weigh_apart<SPLIT>(sums, x, triangle, lane);
    else weigh<SPLIT, false>(sums, x, triangle, lane, kRows);
}

// A record's factors of the two rows of a lane in tile n.
__device__ __forceinline__ float2 factors(const float* plane, int n, int lane) {
    return *reinterpret_cast<const float2*>(plane + 8 * n + lane % 4 * 2);
}

// U of a chunk. `v` is the tile of value rows, its sixteen columns first.
template <bool SPLIT, int V_ROW>
__device__ __forceinline__ void pseudo_values(Sums& u, const float (&s)[16][4], uint32_t k_tile, uint32_t v, const char* inverse,
                                              const float* planes, int lane) {
    Sums r;
    project<SPLIT>(r, s, k_tile, lane);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        uint32_t pairs[4];
        load_columns_of_rows(pairs, v + (16 * p + lane / 16 * 8 + lane % 8) * V_ROW + lane / 8 % 2 * 16);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int n = 2 * p + side;
            const float2 down = factors(planes, n, lane), write = factors(planes + kRows, n, lane);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t two = pairs[2 * side + half];
                r[n][2 * half] = write.x * fmaf(-down.x, r[n][2 * half], __uint_as_float(two << 16));
                r[n][2 * half + 1] = write.y * fmaf(-down.y, r[n][2 * half + 1], __uint_as_float(two & 0xffff0000u));
            }
        }
    }
    weigh_rows<SPLIT>(u, r, inverse, lane);
}

// O of a chunk into `out`, which is the lane's first column of the chunk's first row; `step` elements a row.
template <bool SPLIT, typename Out>
__device__ __forceinline__ void outputs(Out* out, size_t step, int rows, const Sums& u, const float (&s)[16][4], uint32_t q_tile,
                                        const char* triangle, const float* planes, int lane) {
    Sums before, inside;
    weigh_rows<SPLIT>(inside, u, triangle, lane);
    project<SPLIT>(before, s, q_tile, lane);
    out += (size_t)(lane % 4 * 2) * step;
#pragma unroll
    for (int n = 0; n < 2 * kParts; ++n) {
        const float2 down = factors(planes + 3 * kRows, n, lane);
        const int row = 8 * n + lane % 4 * 2;
        if (row < rows) {
            store(out, fmaf(down.x, before[n][0], inside[n][0]));
            store(out + 8, fmaf(down.x, before[n][2], inside[n][2]));
        }
        if (row + 1 < rows) {
            store(out + step, fmaf(down.y, before[n][1], inside[n][1]));
            store(out + step + 8, fmaf(down.y, before[n][3], inside[n][3]));
        }
        out += 8 * step;
    }
}

// S after a chunk. u is scaled on the way.
template <bool SPLIT>
__device__ __forceinline__ void advance(float (&s)[16][4], Sums& u, uint32_t k_tile, const float* planes, int lane) {
    const float decay = planted_ulp(planes[4 * kRows]);
#pragma unroll
    for (int n = 0; n < 2 * kParts; ++n) {
        const float2 to_end = factors(planes + 2 * kRows, n, lane);
#pragma unroll
        for (int e = 0; e < 4; ++e) u[n][e] *= e % 2 ? to_end.y : to_end.x;
    }
    constexpr int kUParts = SPLIT ? 3 : 2;
    uint32_t x[kParts][kUParts][4];
#pragma unroll
    for (int p = 0; p < kParts; ++p) to_operand(x[p], u[2 * p], u[2 * p + 1]);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
        Sums sums;
        clear(sums);
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            uint32_t keys[4][4];
#pragma unroll
            for (int c = 0; c < 4; ++c)
                load_columns_of_rows(keys[c], k_tile + chunk_offset(16 * p + lane / 8 % 2 * 8 + lane % 8, 8 * group + 2 * c + lane / 16));
#pragma unroll
            for (int part = 0; part < kUParts; ++part)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    mma(sums[2 * c], x[p][part], keys[c][0], keys[c][1]);
                    mma(sums[2 * c + 1], x[p][part], keys[c][2], keys[c][3]);
                }
        }
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[8 * group + n][e] = planted_half(fmaf(decay, s[8 * group + n][e], sums[n][e]));
    }
}

// Where everything lies in shared memory, and the copies into it.
template <int COLS, bool PAIRED, int STAGES>
struct Stages {
    static constexpr int kThreads = COLS / 16 * (PAIRED ? 64 : 32);
    static constexpr int kKeys = PAIRED ? 3 : STAGES;  // the second warp of a pair needs the keys for one chunk more
    static constexpr int kRowTile = kRows * kRowBytes, kVRow = 2 * COLS + 16;
    static constexpr int kQ = kKeys * kRowTile, kT = kQ + STAGES * kRowTile, kC = kT + STAGES * kTriangle;
    static constexpr int kPlanes = kC + STAGES * kTriangle, kV = kPlanes + kKeys * kScalars;
    static constexpr int kU = kV + STAGES * kRows * kVRow;
    static constexpr int kBytes = kU + (PAIRED ? 2 * COLS / 16 * 4096 : 0);

    char* shared;
    const __nv_bfloat16 *q, *v;  // the sequence's first row in this launch: q of the key head, v of the CTA's columns
    size_t width, to_k;
    int rows;  // of the sequence, from there on
    const char* record;
    size_t next_record;

    __device__ __forceinline__ void copy_rows(int at, const __nv_bfloat16* from, int chunk) const {
        const uint32_t to = shared_address(shared + at);
        const int row0 = chunk * kRows, left = rows - row0;
        for (int idx = threadIdx.x; idx < kRows * 16; idx += kThreads) {
            const int row = idx / 16, part = idx % 16;
            copy16(to + chunk_offset(row, part), from + (size_t)(row < left ? row0 + row : 0) * width + 8 * part, row < left);
        }
    }

    __device__ __forceinline__ void copy_record(int at, int from, int bytes, int chunk) const {
        const uint32_t to = shared_address(shared + at);
        const char* source = record + chunk * next_record + from;
        for (int idx = threadIdx.x; idx < bytes / 16; idx += kThreads) copy16(to + 16 * idx, source + 16 * idx, true);
    }

    // Keys and values.
    __device__ __forceinline__ void fetch_rows(int chunk) const {
        copy_rows(chunk % kKeys * kRowTile, q + to_k, chunk);
        const uint32_t to = shared_address(shared + kV + chunk % STAGES * kRows * kVRow);
        const int row0 = chunk * kRows, left = rows - row0;
        for (int idx = threadIdx.x; idx < kRows * COLS / 8; idx += kThreads) {
            const int row = idx / (COLS / 8), part = idx % (COLS / 8);
            copy16(to + row * kVRow + 16 * part, v + (size_t)(row < left ? row0 + row : 0) * width + 8 * part, row < left);
        }
    }

    __device__ __forceinline__ void fetch_inverse(int chunk) const {
        copy_record(kT + chunk % STAGES * kTriangle, 0, kTriangle, chunk);
        copy_record(kPlanes + chunk % kKeys * kScalars, 2 * kTriangle, kScalars, chunk);
    }

    // What outputs read.
    __device__ __forceinline__ void fetch_queries(int chunk) const {
        copy_rows(kQ + chunk % STAGES * kRowTile, q, chunk);
        copy_record(kC + chunk % STAGES * kTriangle, kTriangle, kTriangle, chunk);
    }

    __device__ __forceinline__ uint32_t k_tile(int chunk) const { return shared_address(shared + chunk % kKeys * kRowTile); }
    __device__ __forceinline__ uint32_t q_tile(int chunk) const { return shared_address(shared + kQ + chunk % STAGES * kRowTile); }
    __device__ __forceinline__ uint32_t values(int chunk, int group) const {
        return shared_address(shared + kV + chunk % STAGES * kRows * kVRow + 32 * group);
    }
    __device__ __forceinline__ const char* inverse(int chunk) const { return shared + kT + chunk % STAGES * kTriangle; }
    __device__ __forceinline__ const char* weights(int chunk) const { return shared + kC + chunk % STAGES * kTriangle; }
    __device__ __forceinline__ const float* planes(int chunk) const {
        return reinterpret_cast<const float*>(shared + kPlanes + chunk % kKeys * kScalars);
    }
    __device__ __forceinline__ float4* handed(int chunk, int group, int lane) const {
        return reinterpret_cast<float4*>(shared + kU + (chunk % 2 * (COLS / 16) + group) * 4096) + lane;
    }
};

template <int COLS, bool PAIRED, bool SPLIT, int STAGES, typename Out>
__device__ void chunks(PrefillArgs a, const __nv_bfloat16* qkv, float* state, const int* cu_rows, const int* slots, const char* scratch,
                       Out* o) {
    static_assert(!PAIRED || STAGES == 2, "a pair works on two chunks");
    constexpr int kLag = PAIRED ? 1 : 0;
    extern __shared__ __align__(128) char shared[];
    const uint32_t b = blockIdx.z, hv = blockIdx.y, h = hv / (a.v_heads / a.k_heads);
    const int tid = threadIdx.x, lane = tid % 32, group = tid / (32 << kLag), role = PAIRED ? tid / 32 % 2 : 0;
    const int row0 = (int)a.first_chunk * kRows, first = cu_rows[b] + row0, slot = slots[b];
    const int rows = min((int)a.chunks * kRows, cu_rows[b + 1] - first), count = (rows + kRows - 1) / kRows;
    const int col0 = blockIdx.x * COLS;
    const size_t width = qkv_width(a.k_heads, a.v_heads), step = (size_t)a.v_heads * kDv;
    Stages<COLS, PAIRED, STAGES> stages;
    stages.shared = shared;
    stages.q = qkv + (size_t)first * width + (size_t)h * kDk;
    stages.to_k = (size_t)a.k_heads * kDk;
    stages.v = qkv + (size_t)first * width + 2ull * a.k_heads * kDk + (size_t)hv * kDv + col0;
    stages.width = width;
    stages.rows = rows;
    stages.record = scratch + record_at(a, b, 0, hv);
    stages.next_record = (size_t)a.v_heads * kRecord;
    Out* out = o + (size_t)first * step + (size_t)hv * kDv + col0;
    if (slot < 0)
        for (int idx = tid; idx < rows * COLS; idx += stages.kThreads) store(out + (size_t)(idx / COLS) * step + idx % COLS, 0.f);
    if (slot < 0 || count <= 0) return;
    if (STAGES > 1) {
        stages.fetch_rows(0);
        stages.fetch_inverse(0);
        if (!PAIRED) stages.fetch_queries(0);
        copies_issued();
    }
    float s[16][4];
    float* own = state + (((size_t)slot * a.v_heads + hv) * kDv + col0 + 16 * group + lane / 4) * kDk + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 two = *reinterpret_cast<const float2*>(own + half * 8 * kDk + 8 * n);
            s[n][2 * half] = two.x;
            s[n][2 * half + 1] = two.y;
        }
    out += 16 * group + lane / 4;
#pragma unroll 1
    for (int turn = 0; turn < count + kLag; ++turn) {
        if (STAGES == 1) {
            __syncthreads();
            stages.fetch_rows(turn);
            stages.fetch_inverse(turn);
            stages.fetch_queries(turn);
            copies_issued();
        }
        copies_arrived<0>();
        __syncthreads();
        if (STAGES > 1) {
            if (turn + 1 < count) {
                stages.fetch_rows(turn + 1);
                stages.fetch_inverse(turn + 1);
            }
            if (turn + 1 - kLag < count) stages.fetch_queries(turn + 1 - kLag);
            copies_issued();
        }
        const int chunk = turn - kLag * role;
        if (chunk < 0 || chunk >= count) continue;
        Sums u;
        if (role == 0)
            pseudo_values<SPLIT, stages.kVRow>(u, s, stages.k_tile(chunk), stages.values(chunk, group), stages.inverse(chunk),
                                               stages.planes(chunk), lane);
        if (PAIRED) {
            float4* handed = stages.handed(chunk, group, lane);
#pragma unroll
            for (int n = 0; n < 2 * kParts; ++n) {
                if (role == 0) handed[32 * n] = make_float4(u[n][0], u[n][1], u[n][2], u[n][3]);
                else *reinterpret_cast<float4*>(u[n]) = handed[32 * n];
            }
        }
        if (!PAIRED || role == 1)
            outputs<SPLIT>(out + (size_t)chunk * kRows * step, step, rows - chunk * kRows - CANOPY_FAULT(gap), u, s, stages.q_tile(chunk),
                           stages.weights(chunk), stages.planes(chunk), lane);
        advance<SPLIT>(s, u, stages.k_tile(chunk), stages.planes(chunk), lane);
    }
    if (CANOPY_FAULT(overrun)) store(o + (size_t)cu_rows[gridDim.z] * step, 0.f);
    if (tid == 0) planted_touch(qkv);
    if (role == 0)
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2*>(own + half * 8 * kDk + 8 * n) = make_float2(s[n][2 * half], s[n][2 * half + 1]);
}

}  // namespace canopy
