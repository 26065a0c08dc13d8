// tree_gdn verify, split design, f32 throughout.
//
// gram:  one CTA owns one 32 x 32 tile (row block I, column block J <= I) of one key head of one sequence; a lane owns a column j and
//        keeps k_j in registers, a warp walks 8 rows. Writes k_i.k_j and q_i.k_j; tiles without an ancestor pair are skipped.
// solve: one CTA owns 32 value columns of one value head of one sequence; a lane owns a column. S0's 32 x 128 slice sits in registers
//        while k and q rows are broadcast from shared memory; R, then U, sit in shared memory [nodes][32].
// Order of every sum over nodes: ancestors in ascending node order, one FMA each, and nothing else is added, so a row's bits depend on
// its root path alone and a NaN reaches descendants only.
// Shared memory of solve: 128 nodes + 44 KiB of staging + tables, at most 88 KiB at 256 nodes.
#include "split.cuh"

namespace canopy {

template <typename T>
__device__ void gram(VerifyArgs a, const T* qkv, const uint32_t* mask, const int* cu_nodes, const int* slots, float* scratch) {
    __shared__ __align__(16) float k_rows[kTile][kPad];
    __shared__ __align__(16) float q_rows[kTile][kPad];
    take_turn();
    const uint32_t b = blockIdx.z, h = blockIdx.y;
    const int first = cu_nodes[b], nodes = cu_nodes[b + 1] - first;
    uint32_t bi = 0;
    while (tile_index(bi + 1, 0) <= blockIdx.x) ++bi;
    const uint32_t bj = blockIdx.x - tile_index(bi, 0);
    const int row0 = bi * kTile, col0 = bj * kTile;
    if (slots[b] < 0 || row0 >= nodes) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool related = row0 + lane < nodes && mask[(size_t)(first + row0 + lane) * kMaskWords + bj] != 0;
    if (!__any_sync(kFull, related)) return;

    const size_t width = qkv_width(a.k_heads, a.v_heads);
    const T* k_head = qkv + (size_t)(a.k_heads + h) * kDk;
    const T* q_head = qkv + (size_t)h * kDk;
    float4 kj[kDk / 4];
    for (int r = warp; r < kTile; r += 4) {
        const int col = col0 + r;
        const float4 k = col < nodes ? normed_row(k_head + (size_t)(first + col) * width, lane, 1.f) : make_float4(0, 0, 0, 0);
        *reinterpret_cast<float4*>(&k_rows[r][4 * lane]) = k;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kDk / 4; ++c) kj[c] = *reinterpret_cast<const float4*>(&k_rows[lane][4 * c]);
    __syncthreads();
    for (int r = warp; r < kTile; r += 4) {
        const int row = row0 + r;
        float4 k = make_float4(0, 0, 0, 0), q = k;
        if (row < nodes) {
            k = normed_row(k_head + (size_t)(first + row) * width, lane, 1.f);
            q = normed_row(q_head + (size_t)(first + row) * width, lane, a.scale);
        }
        *reinterpret_cast<float4*>(&k_rows[r][4 * lane]) = k;
        *reinterpret_cast<float4*>(&q_rows[r][4 * lane]) = q;
    }
    __syncwarp();
    float* out = const_cast<float*>(gram_tile(scratch, a, b, h, bi, bj));
    for (int r = warp; r < kTile; r += 4) {
        float kk[2] = {0.f, 0.f}, qk[2] = {0.f, 0.f};
#pragma unroll
        for (int c = 0; c < kDk / 4; ++c) {
            kk[c & 1] = dot4(*reinterpret_cast<const float4*>(&k_rows[r][4 * c]), kj[c], kk[c & 1]);
            qk[c & 1] = dot4(*reinterpret_cast<const float4*>(&q_rows[r][4 * c]), kj[c], qk[c & 1]);
        }
        out[r * kTile + lane] = kk[0] + kk[1];
        out[kTile * kTile + r * kTile + lane] = qk[0] + qk[1];
    }
}

template <typename T>
__device__ void solve(VerifyArgs a, const T* qkv, const float* gates, const float* state, const int* parents, const uint32_t* mask,
                      const int* cu_nodes, const int* slots, const float* scratch, float* o, float* u_out, float* g_cum_out) {
    extern __shared__ __align__(16) float shared[];
    take_turn();
    const uint32_t b = blockIdx.z, hv = blockIdx.y;
    const int lane = threadIdx.x % 32;
    const int first = cu_nodes[b], nodes = cu_nodes[b + 1] - first, slot = slots[b];
    const int col = blockIdx.x * kTile + lane;
    if (slot < -1) return;  // another launch's
    if (slot < 0) return zero_rows(a, first, nodes, hv, o, u_out, g_cum_out);
    const int blocks = (nodes + kTile - 1) / kTile;
    const SolveShared s = carve(shared, blocks * kTile);
    for (int i = threadIdx.x; i < nodes * kMaskWords; i += kThreads) s.mask[i] = mask[(size_t)first * kMaskWords + i];
    for (int i = nodes * kTile + threadIdx.x; i < blocks * kTile * kTile; i += kThreads) s.u[i] = 0.f;
    cumulative_gates(s, parents, gates, first, nodes, a.v_heads, hv);
    project(a, s, qkv, state + ((size_t)slot * a.v_heads + hv) * kDv * kDk, o, first, nodes, hv, col);

    const uint32_t h = hv / (a.v_heads / a.k_heads);
    eliminate_blocks(a, s, scratch, b, h, 0, nodes);
    write_outputs(a, s, qkv, cu_nodes, scratch, b, hv, first, nodes, col, o, u_out, g_cum_out);
}

}  // namespace canopy

#define CANOPY_VERIFY(NAME, T)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(128) tree_gdn_gram_##NAME##_k128(                                                    \
        VerifyArgs args, const T* qkv, const uint32_t* mask, const int* cu_nodes, const int* slots, float* scratch) {                 \
        canopy::gram<T>(args, qkv, mask, cu_nodes, slots, scratch);                                                                   \
    }                                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 1) tree_gdn_solve_##NAME##_k128_v128(                                           \
        VerifyArgs args, const T* qkv, const float* gates, const float* state, const int* parents, const uint32_t* mask,              \
        const int* cu_nodes, const int* slots, const float* scratch, float* o, float* u, float* g_cum) {                              \
        canopy::solve<T>(args, qkv, gates, state, parents, mask, cu_nodes, slots, scratch, o, u, g_cum);                              \
    }

CANOPY_VERIFY(f32, float)
#ifndef CANOPY_CONTROLS
CANOPY_VERIFY(bf16, __nv_bfloat16)
#endif
