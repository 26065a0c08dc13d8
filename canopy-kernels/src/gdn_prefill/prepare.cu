// gdn_prefill, first launch: what a chunk needs that no state enters, all chunks at once.
//
// One CTA owns one chunk of 64 rows of one key head of one sequence and the value heads that read it, two at a time. k.k and q.k come from
// tensor cores on the raw bf16 rows (exact products, f32 sums); norms, decays and write strengths scale them. T = (I + G)^-1 in f32, two
// warps a value head: both 32 x 32 blocks on the diagonal by forward substitution, a thread a column, right-looking, then the block below
// them as -T_22 G_21 T_11. It and C = decayed q.k are written as fragments (record.cuh).
// Cumulative gates are summed in f64 and kept in two f32 parts; a decay is exp of a difference, never of a sum with the other sign, and a
// log gate of -inf is counted, not added. From the first row on whose key, gate or write strength is not finite G is 0 and T's diagonal
// NaN, so that such a row reaches itself and later rows only.
// Shared memory: 36 KiB for k and q rows, whose place -G and then T take, 36 KiB for the products, 2.5 KiB of scalars.
#include "record.cuh"

namespace canopy {

constexpr int kThreads = 128;
constexpr int kStride = 72;  // of products by row
constexpr int kColumn = 68;  // of -G by column, and of T
constexpr int kHalf = kRows / 2;
constexpr int kRegion = 2 * kRows * kStride * 4;

// What a row brings to a product, read as one 16-byte word.
struct __align__(16) RowGate {
    float high, low;  // finite part of the cumulative log gate
    int zeroed;       // last row up to this one whose decay is exactly 0, else -1
    float write;      // beta / |k|
};

struct Scalars {
    float* k_norm;   // [64] 1 / |k|, NaN for a row that is not finite
    float* q_norm;   // [64] scale / |q|
    RowGate* gate;   // [64] of one value head
    int* first_bad;  // first row that is not finite, else 64
};

__device__ __forceinline__ RowGate read_gate(const Scalars& s, int i) {
    const int4 raw = *reinterpret_cast<const int4*>(s.gate + i);
    return {__int_as_float(raw.x), __int_as_float(raw.y), raw.z, __int_as_float(raw.w)};
}

__device__ __forceinline__ float decay(const RowGate& to, const RowGate& from, int j) {
    return to.zeroed > j ? 0.f : expf((to.high - from.high) + (to.low - from.low));
}

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

__device__ __forceinline__ float inverse_norm(float square) { return isfinite(square) ? rsqrtf(square + 1e-6f) : not_a_number(); }

// Gates of rows 2 lane and 2 lane + 1.
struct Incoming {
    float g[2], beta[2];

    __device__ __forceinline__ void fetch(const float* gates, uint32_t v_heads, uint32_t hv, int rows, int lane) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            const int row = 2 * lane + x;
            g[x] = row < rows ? gates[(size_t)row * 2 * v_heads + hv] : 0.f;
            beta[x] = row < rows ? gates[((size_t)row * 2 + 1) * v_heads + hv] : 0.f;
        }
    }
};

// One warp: cumulative gates of a value head's rows, and the record's scalars.
__device__ void sum_gates(const Incoming& in, const Scalars& s, float* planes, int lane) {
    double own[2], sum;
    int zero[2];
    bool bad[2];
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        const bool none = in.g[x] == -INFINITY;
        own[x] = none ? 0.0 : (double)in.g[x];
        zero[x] = none ? 2 * lane + x : -1;
        bad[x] = !isfinite(none ? 0.f : in.g[x]) || !isfinite(in.beta[x]) || isnan(s.k_norm[2 * lane + x]);
    }
    sum = own[0] + own[1];
    int last = max(zero[0], zero[1]);
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const double below = __shfl_up_sync(kFull, sum, offset);
        const int before = __shfl_up_sync(kFull, last, offset);
        if (lane >= offset) {
            sum += below;
            last = max(last, before);
        }
    }
    const double below = __shfl_up_sync(kFull, sum, 1);
    const int before = __shfl_up_sync(kFull, last, 1);
    double total = lane ? below : 0.0;
    int zeroed = lane ? before : -1;
    RowGate row[2];
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        total += own[x];
        zeroed = max(zeroed, zero[x]);
        const float high = (float)total;
        row[x] = {high, (float)(total - (double)high), zeroed, in.beta[x] * s.k_norm[2 * lane + x]};
        s.gate[2 * lane + x] = row[x];
    }
    const RowGate end = {__shfl_sync(kFull, row[1].high, 31), __shfl_sync(kFull, row[1].low, 31), __shfl_sync(kFull, row[1].zeroed, 31), 0.f};
    const uint32_t even = __ballot_sync(kFull, bad[0]), odd = __ballot_sync(kFull, bad[1]);
    if (lane == 0) *s.first_bad = min(even ? 2 * (__ffs(even) - 1) : kRows, odd ? 2 * (__ffs(odd) - 1) + 1 : kRows);
    const RowGate start = {0.f, 0.f, -1, 0.f};
    float kd[2], to_end[2], qd[2];
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        const int i = 2 * lane + x;
        const float from_start = decay(row[x], start, -1);
        kd[x] = from_start * s.k_norm[i];
        qd[x] = from_start * s.q_norm[i];
        to_end[x] = decay(end, row[x], i) * s.k_norm[i];
    }
    float2* out = reinterpret_cast<float2*>(planes) + lane;
    out[0] = make_float2(kd[0], kd[1]);
    out[kRows / 2] = make_float2(in.beta[0], in.beta[1]);
    out[kRows] = make_float2(to_end[0], to_end[1]);
    out[3 * kRows / 2] = make_float2(qd[0], qd[1]);
    if (lane == 0) *reinterpret_cast<float4*>(planes + 4 * kRows) = make_float4(decay(end, start, -1), 0.f, 0.f, 0.f);
}

// Raw products of a warp's sixteen rows with all rows up to them, and the norms.
__device__ void products(const Scalars& s, uint32_t k_tile, uint32_t q_tile, float* kk, float* qk, float scale, int warp, int lane) {
    uint32_t k[8][4], q[8][4];
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        load_a(k[step], k_tile, 16 * warp, step, lane);
        load_a(q[step], q_tile, 16 * warp, step, lane);
    }
    const bool diagonal = lane % 4 == lane / 8, second = lane / 4 % 2;
    const int row = 16 * warp + lane / 4;
    {
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            uint32_t b[4];
            load_columns(b, q_tile, 16 * warp, step, lane);
            mma(even, q[step], b[0], b[1]);
            mma(odd, q[step], b[2], b[3]);
        }
        if (diagonal) {
            s.q_norm[row] = inverse_norm(second ? even[1] : even[0]) * scale;
            s.q_norm[row + 8] = inverse_norm(second ? odd[3] : odd[2]) * scale;
        }
    }
    for (int tile = 0; tile <= warp; ++tile) {
        float kk_even[4] = {}, kk_odd[4] = {}, qk_even[4] = {}, qk_odd[4] = {};
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            uint32_t b[4];
            load_columns(b, k_tile, 16 * tile, step, lane);
            mma(kk_even, k[step], b[0], b[1]);
            mma(kk_odd, k[step], b[2], b[3]);
            mma(qk_even, q[step], b[0], b[1]);
            mma(qk_odd, q[step], b[2], b[3]);
        }
        if (tile == warp && diagonal) {
            s.k_norm[row] = inverse_norm(second ? kk_even[1] : kk_even[0]);
            s.k_norm[row + 8] = inverse_norm(second ? kk_odd[3] : kk_odd[2]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = (row + 8 * half) * kStride + 16 * tile + lane % 4 * 2;
            *reinterpret_cast<float2*>(kk + at) = make_float2(kk_even[2 * half], kk_even[2 * half + 1]);
            *reinterpret_cast<float2*>(kk + at + 8) = make_float2(kk_odd[2 * half], kk_odd[2 * half + 1]);
            *reinterpret_cast<float2*>(qk + at) = make_float2(qk_even[2 * half], qk_even[2 * half + 1]);
            *reinterpret_cast<float2*>(qk + at + 8) = make_float2(qk_odd[2 * half], qk_odd[2 * half + 1]);
        }
    }
}

// Column j of -G.
__device__ __forceinline__ void build_column(const Scalars& s, const float* kk, float* column, int j) {
    const RowGate from = read_gate(s, j);
    const float k_norm = s.k_norm[j];
    const int bad = *s.first_bad;
#pragma unroll 2
    for (int i0 = 0; i0 < kRows; i0 += 4) {
        float x[4] = {};
        if (i0 + 3 > j)
#pragma unroll
            for (int y = 0; y < 4; ++y) {
                const int i = i0 + y;
                const RowGate to = read_gate(s, i);
                if (i > j && i < bad) x[y] = -(decay(to, from, j) * k_norm * to.write) * kk[i * kStride + j];
            }
        *reinterpret_cast<float4*>(column + i0) = make_float4(x[0], x[1], x[2], x[3]);
    }
}

// Columns from I on of the elimination; a template, because a register array must only see constant indices.
template <int I>
__device__ __forceinline__ void eliminate(const float* g, float (&t)[kHalf]) {
    if constexpr (I < kHalf - 1) {
#pragma unroll
        for (int i = (I + 1) / 4 * 4; i < kHalf; i += 4) {
            const float4 raw = *reinterpret_cast<const float4*>(g + I * kColumn + i);
            const float x[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int y = 0; y < 4; ++y)
                if (i + y > I) t[i + y] = fmaf(x[y], t[I], t[i + y]);
        }
        eliminate<I + 1>(g, t);
    }
}

// Sixteen rows from `row` on of one column of a product: the left factor lies column by column, the right one row by row.
__device__ __forceinline__ void multiply(float (&sums)[kHalf / 2], const float* left, const float* right) {
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) sums[i] = 0.f;
#pragma unroll 2
    for (int k = 0; k < kHalf; ++k) {
        const float y = right[k * kColumn];
#pragma unroll
        for (int i = 0; i < kHalf / 2; i += 4) {
            const float4 x = *reinterpret_cast<const float4*>(left + k * kColumn + i);
            sums[i] = fmaf(x.x, y, sums[i]);
            sums[i + 1] = fmaf(x.y, y, sums[i + 1]);
            sums[i + 2] = fmaf(x.z, y, sums[i + 2]);
            sums[i + 3] = fmaf(x.w, y, sums[i + 3]);
        }
    }
}

__device__ __forceinline__ void put_column(float* to, const float (&x)[kHalf / 2]) {
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) to[i * kColumn] = x[i];
}

// Columns of -G become T: T_11 and T_21 row by row, T_22 column by column. All threads; `live` ones work, warp 0 or 1 of their value head.
__device__ __forceinline__ void invert(float* g, bool live, int warp, int lane) {
    float t[kHalf], sums[kHalf / 2];
    float* diagonal = g + warp * kHalf * (kColumn + 1);
    float* below = g + kHalf * kColumn + lane;  // row 32 of column `lane`
#pragma unroll
    for (int i = 0; i < kHalf; ++i) t[i] = i == lane ? 1.f : 0.f;
    if (live) eliminate<0>(diagonal, t);
    __syncthreads();
    if (live && warp == 0)
#pragma unroll
        for (int i = 0; i < kHalf; ++i) diagonal[i * kColumn + lane] = t[i];
    if (live && warp == 1)
#pragma unroll
        for (int i = 0; i < kHalf; i += 4) *reinterpret_cast<float4*>(diagonal + lane * kColumn + i) = make_float4(t[i], t[i + 1], t[i + 2], t[i + 3]);
    __syncthreads();
    if (live) {
        multiply(sums, g + kHalf + 16 * warp, g + lane);
        put_column(below + 16 * warp * kColumn, sums);
    }
    __syncthreads();
    if (live) multiply(sums, g + kHalf * (kColumn + 1) + 16 * warp, below);
    __syncthreads();
    if (live) put_column(below + 16 * warp * kColumn, sums);
    __syncthreads();
}

// Eight entries of a lane into a tile of a record.
__device__ __forceinline__ void put_tile(char* tile, const float (&x)[8], int lane) {
    *reinterpret_cast<float4*>(tile + 16 * lane) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4*>(tile + 512 + 16 * lane) = make_float4(x[4], x[5], x[6], x[7]);
}

// A lane's entries of tile `number`, which starts at row0 and column0: row and column of the first.
__device__ __forceinline__ void tile_place(int number, int lane, int& i, int& j) {
    const int row = number >= 6 ? 3 : number >= 3 ? 2 : number >= 1 ? 1 : 0;
    i = 16 * row + lane / 4;
    j = 16 * (number - row * (row + 1) / 2) + lane % 4 * 2;
}

// Tile of C.
__device__ __forceinline__ void put_outputs(const Scalars& s, const float* qk, char* triangle, int number, int lane) {
    int i0, j0;
    tile_place(number, lane, i0, j0);
    float x[8];
#pragma unroll
    for (int down = 0; down < 2; ++down) {
        const int i = i0 + 8 * down;
        const RowGate to = read_gate(s, i);
        const float q_norm = s.q_norm[i];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int j = j0 + e / 2 * 8 + e % 2;
            x[4 * down + e] = j <= i ? decay(to, read_gate(s, j), j) * s.k_norm[j] * q_norm * qk[i * kStride + j] : 0.f;
        }
    }
    put_tile(triangle + number * kTile, x, lane);
}

// Tile of T, as `invert` leaves it.
__device__ __forceinline__ void put_inverse(const Scalars& s, const float* t, char* triangle, int number, int lane) {
    int i0, j0;
    tile_place(number, lane, i0, j0);
    const int bad = *s.first_bad;
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const int i = i0 + e / 4 * 8, j = j0 + e / 2 % 2 * 8 + e % 2;
        x[e] = i == j && i >= bad ? not_a_number() : j < kHalf ? t[i * kColumn + j] : t[j * kColumn + i];
    }
    put_tile(triangle + number * kTile, x, lane);
}

__device__ void prepare(PrefillArgs a, const __nv_bfloat16* qkv, const float* gates, const int* cu_rows, const int* slots, char* scratch) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t b = blockIdx.z, h = blockIdx.y, heads = a.v_heads / a.k_heads;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, half = warp / 2;
    const int row0 = (int)(a.first_chunk + blockIdx.x) * kRows;
    const int first = cu_rows[b] + row0, rows = min(kRows, cu_rows[b + 1] - first);
    if (slots[b] < 0 || rows <= 0) return;
    float* kk = reinterpret_cast<float*>(shared + kRegion);
    float* qk = kk + kRows * kStride;
    Scalars s;
    s.k_norm = qk + kRows * kStride;
    s.q_norm = s.k_norm + kRows;
    RowGate* row_gates = reinterpret_cast<RowGate*>(s.q_norm + kRows);
    s.gate = row_gates + half * kRows;
    s.first_bad = reinterpret_cast<int*>(row_gates + 2 * kRows) + half;
    const uint32_t k_tile = shared_address(shared), q_tile = k_tile + kRows * kRowBytes;
    const size_t width = qkv_width(a.k_heads, a.v_heads);
    for (int idx = tid; idx < kRows * 16; idx += kThreads) {
        const int row = idx / 16, chunk = idx % 16;
        const __nv_bfloat16* src = qkv + (size_t)(first + (row < rows ? row : 0)) * width + (size_t)h * kDk + 8 * chunk;
        copy16(q_tile + chunk_offset(row, chunk), src, row < rows);
        copy16(k_tile + chunk_offset(row, chunk), src + (size_t)a.k_heads * kDk, row < rows);
    }
    copies_issued();
    const float* own_gates = gates + (size_t)first * 2 * a.v_heads;
    Incoming in;
    if (half < (int)heads) in.fetch(own_gates, a.v_heads, h * heads + half, rows, lane);
    copies_arrived<0>();
    __syncthreads();
    products(s, k_tile, q_tile, kk, qk, a.scale, warp, lane);
    __syncthreads();
    for (uint32_t pair = 0; pair < heads; pair += 2) {
        const bool live = pair + half < heads;
        const uint32_t hv = h * heads + pair + half;
        char* record = scratch + record_at(a, b, blockIdx.x, hv);
        float* region = reinterpret_cast<float*>(shared) + half * kRows * kStride;
        if (live && warp % 2 == 0) sum_gates(in, s, reinterpret_cast<float*>(record + 2 * kTriangle), lane);
        if (pair + 2 + half < heads) in.fetch(own_gates, a.v_heads, hv + 2, rows, lane);
        __syncthreads();
        const int column = tid % 64;
        if (live) build_column(s, kk, region + column * kColumn, column);
        __syncthreads();
        invert(region, live, warp % 2, lane);
        if (live)
            for (int number = warp % 2; number < kTiles; number += 2) {
                put_outputs(s, qk, record + kTriangle, number, lane);
                put_inverse(s, region, record, number, lane);
            }
        if (pair + 2 < heads) __syncthreads();
    }
}

}  // namespace canopy

extern "C" __global__ void __launch_bounds__(128, 3) gdn_prefill_prepare(PrefillArgs args, const __nv_bfloat16* qkv, const float* gates,
                                                                         const int* cu_rows, const int* slots, char* scratch) {
    canopy::prepare(args, qkv, gates, cu_rows, slots, scratch);
}
