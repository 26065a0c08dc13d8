// What the kernels of the split design share: 32 x 32 tiles of pairs, a block's tables, R, the elimination of a diagonal block and the sums
// over ancestors.
#pragma once
#include "args.cuh"
#include "canopy/fault.cuh"
#include "canopy/gdn_rows.cuh"

namespace canopy {

constexpr int kTile = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPad = kDk + 4;

__device__ __forceinline__ size_t tile_index(uint32_t i, uint32_t j) { return (size_t)i * (i + 1) / 2 + j; }

__device__ __forceinline__ const float* gram_tile(const float* scratch, const VerifyArgs& a, uint32_t b, uint32_t h, uint32_t i,
                                                  uint32_t j) {
    return scratch + (((size_t)b * a.k_heads + h) * a.tiles + tile_index(i, j)) * (2 * kTile * kTile);
}

struct SolveShared {
    float* u;         // [nodes rounded up to 32][32]: R, then U
    float* rows;      // [2][32][128] staged k and q rows; before that [32][132] of S0
    float* g;         // [8 warps][4 rows][32] coefficients; the diagonal block uses it as [32][32] transposed
    float* g_cum;     // [256] finite part
    float* beta;      // [256]
    int* zeroed;      // [256] last path node whose decay is exactly 0, else -1
    uint32_t* mask;   // [nodes][8]
};

__device__ __forceinline__ SolveShared carve(float* base, int padded) {
    SolveShared s;
    s.u = base;
    s.rows = s.u + padded * kTile;
    s.g = s.rows + 2 * kTile * kDk;
    s.g_cum = s.g + kTile * kTile;
    s.beta = s.g_cum + 256;
    s.zeroed = reinterpret_cast<int*>(s.beta + 256);
    s.mask = reinterpret_cast<uint32_t*>(s.zeroed + 256);
    return s;
}

// exp(g_cum_i - g_cum_j) for j on i's path: 0 where a decay of exactly 0 lies between them.
__device__ __forceinline__ float decay_of(const SolveShared& s, int i, int j) {
    return s.zeroed[i] > j ? 0.f : expf(s.g_cum[i] - s.g_cum[j]);
}

// g_cum by pointer jumping: the order of the sum depends on the node's depth alone. An infinite log gate is noted, not added.
__device__ void cumulative_gates(const SolveShared& s, const int* parents, const float* gates, int first, int nodes, uint32_t v_heads,
                                 uint32_t hv) {
    __shared__ int anc[256];
    const int i = threadIdx.x;
    if (i < nodes) {
        const float* row = gates + (size_t)(first + i) * 2 * v_heads;
        const float g = row[hv];
        const bool zero = g == -INFINITY;
        s.g_cum[i] = zero ? 0.f : g;
        s.zeroed[i] = zero ? i : -1;
        s.beta[i] = row[v_heads + hv];
        anc[i] = parents[first + i];
    }
    __syncthreads();
    while (true) {
        const int up = i < nodes ? anc[i] : -1;
        const float add = up >= 0 ? s.g_cum[up] : 0.f;
        const int next = up >= 0 ? anc[up] : -1, zero = up >= 0 ? s.zeroed[up] : -1;
        if (!__syncthreads_or(up >= 0)) break;
        if (up >= 0) {
            s.g_cum[i] += add;
            s.zeroed[i] = max(s.zeroed[i], zero);
            anc[i] = next;
        }
        __syncthreads();
    }
}

// R into s.u, and exp(g_cum) q S0 into o, for every row.
template <typename T>
__device__ void project(const VerifyArgs& a, const SolveShared& s, const T* qkv, const float* state, float* o, int first, int nodes,
                        uint32_t hv, int col) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int idx = threadIdx.x; idx < kTile * kDk / 4; idx += kThreads) {
        const int r = idx / (kDk / 4), c = idx % (kDk / 4);
        *reinterpret_cast<float4*>(&s.rows[r * kPad + 4 * c]) = load4(state + (size_t)(col - lane + r) * kDk + 4 * c);
    }
    __syncthreads();
    float4 s0[kDk / 4];
#pragma unroll
    for (int c = 0; c < kDk / 4; ++c) s0[c] = *reinterpret_cast<const float4*>(&s.rows[lane * kPad + 4 * c]);
    const size_t width = qkv_width(a.k_heads, a.v_heads);
    const uint32_t h = hv / (a.v_heads / a.k_heads);
    for (int row0 = 0; row0 < nodes; row0 += kTile) {
        __syncthreads();
        for (int r = warp; r < kTile; r += kWarps) {
            if (row0 + r >= nodes) continue;
            const T* row = qkv + (size_t)(first + row0 + r) * width;
            *reinterpret_cast<float4*>(&s.rows[r * kDk + 4 * lane]) = normed_row(row + (size_t)(a.k_heads + h) * kDk, lane, 1.f);
            *reinterpret_cast<float4*>(&s.rows[(kTile + r) * kDk + 4 * lane]) = normed_row(row + (size_t)h * kDk, lane, a.scale);
        }
        __syncwarp();
        for (int r = warp; r < kTile; r += kWarps) {
            const int node = row0 + r;
            if (node >= nodes) continue;
            float ks[2] = {0.f, 0.f}, qs[2] = {0.f, 0.f};
#pragma unroll
            for (int c = 0; c < kDk / 4; ++c) {
                ks[c & 1] = dot4(*reinterpret_cast<const float4*>(&s.rows[r * kDk + 4 * c]), s0[c], ks[c & 1]);
                qs[c & 1] = dot4(*reinterpret_cast<const float4*>(&s.rows[(kTile + r) * kDk + 4 * c]), s0[c], qs[c & 1]);
            }
            const float decay = s.zeroed[node] >= 0 ? 0.f : planted_ulp(expf(s.g_cum[node]));
            const float v = to_f32(qkv[(size_t)(first + node) * width + 2ull * a.k_heads * kDk + (size_t)hv * kDv + col]);
            s.u[node * kTile + lane] = s.beta[node] * (v - decay * (ks[0] + ks[1]));
            o[((size_t)(first + node) * a.v_heads + hv) * kDv + col] = decay * (qs[0] + qs[1]);
        }
    }
    __syncthreads();
}

// Column I of the elimination; a template, because a register array must only see constant indices on every target.
template <int I>
__device__ __forceinline__ void eliminate(const SolveShared& s, uint32_t above, float (&r)[kTile]) {
    if constexpr (I < kTile) {
        const uint32_t below = __ballot_sync(kFull, above >> I & 1u);
        const float* g = s.g + I * kTile;
#pragma unroll
        for (int t = I + 1; t < kTile; ++t) r[t] = (below >> t & 1u) || CANOPY_FAULT(leak) ? fmaf(-g[t], r[I], r[t]) : r[t];
        eliminate<I + 1>(s, above, r);
    }
}

// One warp solves a diagonal block in registers, right-looking: u_i is final, then it is taken from its descendants.
__device__ void solve_diagonal(const SolveShared& s, const float* kk, int row0, int nodes) {
    const int lane = threadIdx.x % 32;
    const uint32_t word = row0 / kTile;
    const bool live = row0 + lane < nodes;
    const uint32_t above = live ? s.mask[(row0 + lane) * kMaskWords + word] & (((1u << lane) - 1u) >> CANOPY_FAULT(short_path)) : 0u;
    const float write = live ? s.beta[row0 + lane] : 0.f;
#pragma unroll 4
    for (int j = 0; j < kTile; ++j) {  // lane = row here
        const bool ancestor = above >> j & 1u;
        s.g[j * kTile + lane] = ancestor ? write * (decay_of(s, row0 + lane, row0 + j) * kk[lane * kTile + j]) : 0.f;
    }
    __syncwarp();
    float r[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) r[i] = s.u[(row0 + i) * kTile + lane];  // lane = column from here
    eliminate<0>(s, above, r);
#pragma unroll
    for (int i = 0; i < kTile; ++i) s.u[(row0 + i) * kTile + lane] = r[i];
}

// acc[x] += sign * sum over ancestors j in block bj of coefficient * u_j, for this warp's rows row + x.
template <bool kOutput>
__device__ __forceinline__ void accumulate(const SolveShared& s, const float* pairs, int row, int rows, int bj, int tile_row, float* acc) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* g = s.g + warp * 4 * kTile;
    const int col0 = bj * kTile;
    uint32_t bits[4], any = 0;
    __syncwarp();
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        bits[x] = x < rows ? s.mask[(row + x) * kMaskWords + bj] : 0u;
        any |= bits[x];
        float c = 0.f;
        if (bits[x] >> lane & 1u) {
            c = decay_of(s, row + x, col0 + lane) * pairs[(tile_row + x) * kTile + lane];
            if (!kOutput) c *= -s.beta[row + x];
        }
        g[x * kTile + lane] = c;
    }
    __syncwarp();
    while (any) {
        const int j = __ffs(any) - 1;
        any &= any - 1;
        const float u = s.u[(col0 + j) * kTile + lane];
#pragma unroll
        for (int x = 0; x < 4; ++x)
            if (bits[x] >> j & 1u) acc[x] = planted_half(fmaf(g[x * kTile + j], u, acc[x]));
    }
}

// A padding sequence's rows.
__device__ void zero_rows(const VerifyArgs& a, int first, int nodes, uint32_t hv, float* o, float* u_out, float* g_cum_out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = blockIdx.x * kTile + lane;
    for (int i = warp; i < nodes; i += kWarps) {
        const size_t at = ((size_t)(first + i) * a.v_heads + hv) * kDv + col;
        o[at] = 0.f;
        u_out[at] = 0.f;
        if (blockIdx.x == 0 && lane == 0) g_cum_out[(size_t)(first + i) * a.v_heads + hv] = 0.f;
    }
}

// Forward substitution on s.u, block by block from block `from` on; the rows above are zero.
__device__ void eliminate_blocks(const VerifyArgs& a, const SolveShared& s, const float* scratch, uint32_t b, uint32_t h, int from,
                                 int nodes) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, blocks = (nodes + kTile - 1) / kTile;
    for (int bi = from; bi < blocks; ++bi) {
        if (warp == 0) solve_diagonal(s, gram_tile(scratch, a, b, h, bi, bi), bi * kTile, nodes);
        __syncthreads();
        for (int row = (bi + 1) * kTile + warp * 4; row < nodes; row += kWarps * 4) {
            if (CANOPY_FAULT(dropped_slice)) continue;
            const int rows = min(4, nodes - row);
            float acc[4];
#pragma unroll
            for (int x = 0; x < 4; ++x) acc[x] = x < rows ? s.u[(row + x) * kTile + lane] : 0.f;
            accumulate<false>(s, gram_tile(scratch, a, b, h, row / kTile, bi), row, rows, bi, row % kTile, acc);
#pragma unroll
            for (int x = 0; x < 4; ++x)
                if (x < rows) s.u[(row + x) * kTile + lane] = acc[x];
        }
        __syncthreads();
    }
}

// o += C u over every row's path, and the tape.
template <typename T>
__device__ void write_outputs(const VerifyArgs& a, const SolveShared& s, const T* qkv, const int* cu_nodes, const float* scratch, uint32_t b,
                              uint32_t hv, int first, int nodes, int col, float* o, float* u_out, float* g_cum_out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t h = hv / (a.v_heads / a.k_heads);
    for (int row = warp * 4; row < nodes; row += kWarps * 4) {
        const int rows = min(4, nodes - row);
        float acc[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) acc[x] = x < rows ? o[((size_t)(first + row + x) * a.v_heads + hv) * kDv + col] : 0.f;
        for (int bj = 0; bj <= row / kTile; ++bj) {
            const float* pairs = gram_tile(scratch, a, b, h, row / kTile, bj) + kTile * kTile;
            accumulate<true>(s, pairs, row, rows, bj, row % kTile, acc);
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            if (x >= rows) continue;
            const size_t at = ((size_t)(first + row + x) * a.v_heads + hv) * kDv + col;
            o[at] = acc[x];
            if (!CANOPY_FAULT(gap) || row + x + 1 < nodes) u_out[at] = s.u[(row + x) * kTile + lane];
            if (CANOPY_FAULT(overrun)) u_out[(size_t)cu_nodes[gridDim.z] * a.v_heads * kDv] = 0.f;
            if (lane == 0) planted_touch(qkv);
            if (blockIdx.x == 0 && lane == 0) g_cum_out[(size_t)(first + row + x) * a.v_heads + hv] = s.zeroed[row + x] >= 0 ? -INFINITY : s.g_cum[row + x];
        }
    }
}

}  // namespace canopy
