// tree_gdn verify, split design, with the system's inverse taken apart: matrices made once per value head, then applied by every value tile.
// For comparison with forward substitution (verify.cu), whose gram tiles, R and outputs these kernels share. f32 throughout.
//
// scaled:   P0 = -G in 32 x 32 tiles of a value head.
// square:   the next P = P P; what is not on a path between two nodes is left out, so that a NaN stays with the descendants.
// inverse:  (I + G)^-1 - I by forward substitution, one CTA a block column.
// apply:    one CTA owns 32 value columns of one value head. Inverse: U = R + P R. Squaring: U = R, then U = U + P U for P0, P0^2, P0^4, ...
//           Neumann: T = R, U = R, then depth times T = P0 T, U = U + T.
// Order of every sum over nodes: ancestors in ascending node order, one FMA each, as in verify.cu.
#include "split.cuh"

namespace canopy {

struct Matrices {
    float* tiles;
    size_t stride;  // elements from one matrix of all sequences and heads to the next

    __device__ float* of(const VerifyArgs& a, uint32_t at, uint32_t b, uint32_t hv) const {
        return tiles + at * stride + ((size_t)b * a.v_heads + hv) * a.tiles * (kTile * kTile);
    }
};

__device__ __forceinline__ void tile_of(uint32_t tile, uint32_t& bi, uint32_t& bj) {
    bi = 0;
    while (tile_index(bi + 1, 0) <= tile) ++bi;
    bj = tile - tile_index(bi, 0);
}

__device__ void load_mask(const SolveShared& s, const uint32_t* mask, int first, int nodes) {
    for (int i = threadIdx.x; i < nodes * kMaskWords; i += kThreads) s.mask[i] = mask[(size_t)first * kMaskWords + i];
}

__device__ void scaled(VerifyArgs a, const float* gates, const int* parents, const uint32_t* mask, const int* cu_nodes, const int* slots,
                       const float* scratch, Matrices to) {
    __shared__ __align__(16) float tables[3 * 256];
    take_turn();
    const uint32_t b = blockIdx.z, hv = blockIdx.y, h = hv / (a.v_heads / a.k_heads);
    const int first = cu_nodes[b], nodes = cu_nodes[b + 1] - first, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t bi, bj;
    tile_of(blockIdx.x, bi, bj);
    if (slots[b] < 0 || (int)bi * kTile >= nodes) return;
    SolveShared s;
    s.g_cum = tables;
    s.beta = tables + 256;
    s.zeroed = reinterpret_cast<int*>(tables + 512);
    cumulative_gates(s, parents, gates, first, nodes, a.v_heads, hv);
    const float* pairs = gram_tile(scratch, a, b, h, bi, bj);
    float* out = to.of(a, 0, b, hv) + (size_t)blockIdx.x * (kTile * kTile);
    const int j = bj * kTile + lane;
    for (int r = warp; r < kTile; r += kWarps) {
        const int i = bi * kTile + r;
        const bool ancestor = i < nodes && j < i && (mask[(size_t)(first + i) * kMaskWords + bj] >> lane & 1u);
        out[r * kTile + lane] = ancestor ? -s.beta[i] * (decay_of(s, i, j) * pairs[r * kTile + lane]) : 0.f;
    }
}

__device__ void square(VerifyArgs a, const uint32_t* mask, const int* cu_nodes, const int* slots, Matrices p, uint32_t from) {
    __shared__ float left[kTile][kTile], right[kTile][kTile];
    take_turn();
    const uint32_t b = blockIdx.z, hv = blockIdx.y;
    const int first = cu_nodes[b], nodes = cu_nodes[b + 1] - first, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t bi, bj;
    tile_of(blockIdx.x, bi, bj);
    if (slots[b] < 0 || (int)bi * kTile >= nodes) return;
    const float* all = p.of(a, from, b, hv);
    const int row = warp * 4;
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
    for (uint32_t bk = bj; bk <= bi; ++bk) {
        __syncthreads();
        for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
            left[i / kTile][i % kTile] = all[tile_index(bi, bk) * (kTile * kTile) + i];
            right[i / kTile][i % kTile] = all[tile_index(bk, bj) * (kTile * kTile) + i];
        }
        __syncthreads();
        uint32_t bits[4], any = 0;
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const int i = bi * kTile + row + x;
            bits[x] = i < nodes ? mask[(size_t)(first + i) * kMaskWords + bk] : 0u;
            any |= bits[x];
        }
        while (any) {
            const int m = __ffs(any) - 1;
            any &= any - 1;
            const bool below = mask[(size_t)(first + bk * kTile + m) * kMaskWords + bj] >> lane & 1u;
#pragma unroll
            for (int x = 0; x < 4; ++x)
                if (below && (bits[x] >> m & 1u)) acc[x] = fmaf(left[row + x][m], right[m][lane], acc[x]);
        }
    }
    float* out = p.of(a, from + 1, b, hv) + (size_t)blockIdx.x * (kTile * kTile);
#pragma unroll
    for (int x = 0; x < 4; ++x) out[(row + x) * kTile + lane] = acc[x];
}

__device__ void inverse(VerifyArgs a, const float* gates, const int* parents, const uint32_t* mask, const int* cu_nodes, const int* slots,
                        const float* scratch, Matrices to) {
    extern __shared__ __align__(16) float shared[];
    take_turn();
    const uint32_t b = blockIdx.z, hv = blockIdx.y, bj = blockIdx.x;
    const int first = cu_nodes[b], nodes = cu_nodes[b + 1] - first, lane = threadIdx.x % 32;
    if (slots[b] < 0 || (int)bj * kTile >= nodes) return;
    const int blocks = (nodes + kTile - 1) / kTile;
    const SolveShared s = carve(shared, blocks * kTile);
    load_mask(s, mask, first, nodes);
    cumulative_gates(s, parents, gates, first, nodes, a.v_heads, hv);
    for (int row = threadIdx.x / 32; row < blocks * kTile; row += kWarps) s.u[row * kTile + lane] = row == (int)bj * kTile + lane ? 1.f : 0.f;
    __syncthreads();
    eliminate_blocks(a, s, scratch, b, hv / (a.v_heads / a.k_heads), bj, nodes);
    float* out = to.of(a, 0, b, hv);
    for (int row = bj * kTile + threadIdx.x / 32; row < blocks * kTile; row += kWarps) {
        const float unit = row == (int)bj * kTile + lane ? 1.f : 0.f;
        out[tile_index(row / kTile, bj) * (kTile * kTile) + row % kTile * kTile + lane] = s.u[row * kTile + lane] - unit;
    }
}

// acc[x] += sum over those ancestors j in block bj that are `least` levels up or more of P's entry times from's row j.
__device__ __forceinline__ void add_product(const SolveShared& s, const uint8_t* depth, const float* tile, const float* from, int row,
                                            int rows, int bj, int least, float* acc) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, j = bj * kTile + lane;
    float* g = s.g + warp * 4 * kTile;
    uint32_t bits[4], any = 0;
    __syncwarp();
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        const bool mine = x < rows && (s.mask[(row + x) * kMaskWords + bj] >> CANOPY_FAULT(short_path) >> lane & 1u) &&
                          depth[row + x] - depth[j] >= least;
        bits[x] = __ballot_sync(kFull, mine);
        any |= bits[x];
        g[x * kTile + lane] = mine ? tile[((row + x) % kTile) * kTile + lane] : 0.f;
    }
    __syncwarp();
    while (any) {
        const int at = __ffs(any) - 1;
        any &= any - 1;
        const float u = from[(bj * kTile + at) * kTile + lane];
#pragma unroll
        for (int x = 0; x < 4; ++x)
            if (bits[x] >> at & 1u) acc[x] = planted_half(fmaf(g[x * kTile + at], u, acc[x]));
    }
}

// to = P from for every row, plus `add` where there is one; or added to `sum` too.
__device__ void apply_once(const SolveShared& s, const uint8_t* depth, const float* p, const float* from, const float* add, float* to,
                           float* sum, int least, int nodes) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int row = warp * 4; row < nodes; row += kWarps * 4) {
        const int rows = min(4, nodes - row);
        float acc[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) acc[x] = add && x < rows ? add[(row + x) * kTile + lane] : 0.f;
        for (int bj = 0; bj <= row / kTile; ++bj) {
            if (CANOPY_FAULT(dropped_slice) && bj > 0) continue;
            add_product(s, depth, p + tile_index(row / kTile, bj) * (kTile * kTile), from, row, rows, bj, least, acc);
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            if (x >= rows) continue;
            to[(row + x) * kTile + lane] = acc[x];
            if (sum) sum[(row + x) * kTile + lane] += acc[x];
        }
    }
    __syncthreads();
}

template <typename T>
__device__ void apply(VerifyArgs a, SeriesArgs how, const T* qkv, const float* gates, const float* state, const int* parents,
                      const uint32_t* mask, const int* cu_nodes, const int* slots, const float* scratch, Matrices p, float* o, float* u_out,
                      float* g_cum_out) {
    extern __shared__ __align__(16) float shared[];
    __shared__ uint8_t depth[256];
    __shared__ int deepest;
    take_turn();
    const uint32_t b = blockIdx.z, hv = blockIdx.y;
    const int lane = threadIdx.x % 32;
    const int first = cu_nodes[b], nodes = cu_nodes[b + 1] - first, slot = slots[b];
    const int col = blockIdx.x * kTile + lane;
    if (slot < -1) return;  // another launch's
    if (slot < 0) return zero_rows(a, first, nodes, hv, o, u_out, g_cum_out);
    const int padded = (nodes + kTile - 1) / kTile * kTile;
    SolveShared s = carve(shared, padded);
    float* more = reinterpret_cast<float*>(s.mask + padded * kMaskWords);
    load_mask(s, mask, first, nodes);
    if (threadIdx.x == 0) deepest = 0;
    cumulative_gates(s, parents, gates, first, nodes, a.v_heads, hv);
    if ((int)threadIdx.x < nodes) {
        int above = -1;
#pragma unroll
        for (int w = 0; w < kMaskWords; ++w) above += __popc(s.mask[threadIdx.x * kMaskWords + w]);
        depth[threadIdx.x] = (uint8_t)above;
        atomicMax(&deepest, above);
    }
    project(a, s, qkv, state + ((size_t)slot * a.v_heads + hv) * kDv * kDk, o, first, nodes, hv, col);

    if (how.terms) {  // the first term where the second does not go
        for (int i = threadIdx.x; i < nodes * kTile; i += kThreads) s.rows[i] = s.u[i];
        __syncthreads();
        for (int n = 0; n < deepest; ++n) {
            float* even = n % 2 ? more : s.rows;
            apply_once(s, depth, p.of(a, 0, b, hv), even, nullptr, n % 2 ? s.rows : more, s.u, 1, nodes);
        }
    } else {
        for (uint32_t n = 0; n < how.matrices; ++n) {
            float* to = n % 2 ? s.rows : more;
            apply_once(s, depth, p.of(a, n, b, hv), s.u, s.u, to, nullptr, 1 << n, nodes);
            s.u = to;
        }
    }
    write_outputs(a, s, qkv, cu_nodes, scratch, b, hv, first, nodes, col, o, u_out, g_cum_out);
}

}  // namespace canopy

extern "C" __global__ void __launch_bounds__(256) tree_gdn_scaled(VerifyArgs args, const float* gates, const int* parents,
                                                                  const uint32_t* mask, const int* cu_nodes, const int* slots,
                                                                  const float* scratch, size_t stride, float* tiles) {
    canopy::scaled(args, gates, parents, mask, cu_nodes, slots, scratch, {tiles, stride});
}
extern "C" __global__ void __launch_bounds__(256) tree_gdn_square(VerifyArgs args, const uint32_t* mask, const int* cu_nodes,
                                                                  const int* slots, uint32_t from, size_t stride, float* tiles) {
    canopy::square(args, mask, cu_nodes, slots, {tiles, stride}, from);
}
extern "C" __global__ void __launch_bounds__(256) tree_gdn_inverse(VerifyArgs args, const float* gates, const int* parents,
                                                                   const uint32_t* mask, const int* cu_nodes, const int* slots,
                                                                   const float* scratch, size_t stride, float* tiles) {
    canopy::inverse(args, gates, parents, mask, cu_nodes, slots, scratch, {tiles, stride});
}

#define CANOPY_APPLY(NAME, T)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) tree_gdn_apply_##NAME##_k128_v128(                                               \
        VerifyArgs args, SeriesArgs how, const T* qkv, const float* gates, const float* state, const int* parents,                     \
        const uint32_t* mask, const int* cu_nodes, const int* slots, const float* scratch, size_t stride, float* tiles, float* o,      \
        float* u, float* g_cum) {                                                                                                      \
        canopy::apply<T>(args, how, qkv, gates, state, parents, mask, cu_nodes, slots, scratch, {tiles, stride}, o, u, g_cum);         \
    }

CANOPY_APPLY(f32, float)
#ifndef CANOPY_CONTROLS
CANOPY_APPLY(bf16, __nv_bfloat16)
#endif
