// tree_gdn commit: S <- exp(g_0 + .. + g_a) S + sum over the accepted path of exp(g_{j+1} + .. + g_a) k_j u_j^T, in place.
// The exponents are suffix sums taken from the path's end, so that the entries that weigh most have the smallest rounding error.
// One CTA owns 32 to 128 value rows of one value head of one sequence and takes 32 at a time, the next of which are on their way meanwhile; a
// warp owns four of them, a lane four keys. 16 path rows are staged at a time in shared memory (12 KiB with the sums), two a warp; the state
// and the first rows are on their way while the gates are summed. Of a path of no more rows the keys are staged once. The layers of a model,
// whose pools lie one after another, take one launch. The sum runs along the path, root first. k is normalised again in f32 from qkv.
#include "args.cuh"
#include "canopy/gdn_rows.cuh"
#include "replay.cuh"

namespace canopy {

constexpr int kStage = 16;

// A warp's two rows of a stage on their way into it.
template <typename T>
struct PathRows {
    decltype(raw4(static_cast<const T*>(nullptr))) k[2];
    float u[2];

    // `k_head` and `u_head` point into row 0.
    __device__ __forceinline__ void fetch(const T* k_head, size_t width, const float* u_head, size_t u_width, const int* path, int left,
                                          int warp, int lane) {
#pragma unroll
        for (int x = 0; x < 2; ++x)
            if (warp + 8 * x < left) k[x] = raw4(k_head + path[warp + 8 * x] * width + 4 * lane);
        fetch_u(u_head, u_width, path, left, warp, lane);
    }

    __device__ __forceinline__ void fetch_u(const float* u_head, size_t u_width, const int* path, int left, int warp, int lane) {
#pragma unroll
        for (int x = 0; x < 2; ++x)
            if (warp + 8 * x < left) u[x] = u_head[path[warp + 8 * x] * u_width + lane];
    }
};

__device__ __forceinline__ void load_rows(float4 (&to)[4], const float* s) {
#pragma unroll
    for (int x = 0; x < 4; ++x) to[x] = load4(s + (size_t)x * kDk);
}

template <typename T, int TILES>
__device__ __forceinline__ void commit(const CommitArgs& a, const int* path, const int* cu_rows, const int* slots, float* state) {
    __shared__ __align__(16) float k_rows[kStage][kDk];
    __shared__ __align__(16) float u_rows[kStage][32];
    __shared__ float suffix[2][kPath + 1];
    next_may_begin();
    const uint32_t layer = blockIdx.z / a.batch, b = blockIdx.z % a.batch, hv = blockIdx.y;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slot = slots[b];  // slots come from the host, paths need not
    wait_for_kernels_ahead();
    const int begin = cu_rows[b], length = cu_rows[b + 1] - begin;
    if (slot < 0 || length == 0) return;
    const size_t width = qkv_width(a.k_heads, a.v_heads), u_width = (size_t)a.v_heads * kDv;
    const int dv0 = blockIdx.x * TILES * 32;
    const T* k_head = static_cast<const T*>(a.qkv[layer]) + (size_t)(a.k_heads + hv / (a.v_heads / a.k_heads)) * kDk;
    const float* u_head = a.u[layer] + (size_t)hv * kDv + dv0;
    float* s = state + layer * a.layer_state + (((size_t)slot * a.v_heads + hv) * kDv + dv0 + warp * 4) * kDk + 4 * lane;
    float4 acc[4], next[4];
    load_rows(acc, s);
    path += begin;
    PathRows<T> rows;
    rows.fetch(k_head, width, u_head, u_width, path, length, warp, lane);
    const float* later = suffix_sums<256>(suffix, a.gates[layer], path, length, a.v_heads, hv);
    const float decay = planted_ulp(expf(later[0]));
    const bool at_once = length <= kStage;
    for (int tile = 0; tile < TILES; ++tile) {
        const bool more = tile + 1 < TILES;
        if (more) load_rows(next, s + 32 * kDk);
#pragma unroll
        for (int x = 0; x < 4; ++x) acc[x] = scaled(acc[x], decay);
        for (int j0 = 0; j0 < length; j0 += kStage) {
            const int count = min(kStage, length - j0);
            const bool again = tile > 0 || j0 > 0;
            if (again) __syncthreads();
            if (again && !at_once) rows.fetch(k_head, width, u_head, u_width, path + j0, count, warp, lane);
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                const int j = warp + 8 * x;
                if (j >= count) continue;
                if (!again || !at_once) {
                    const float4 k = normed(widened(rows.k[x]), 1.f);
                    *reinterpret_cast<float4*>(&k_rows[j][4 * lane]) = scaled(k, expf(later[j0 + j + 1]));
                }
                u_rows[j][lane] = rows.u[x];
            }
            __syncthreads();
            if (more && at_once) rows.fetch_u(u_head + 32, u_width, path, count, warp, lane);
            const bool short_of = CANOPY_FAULT(missed_node) && j0 + kStage >= length;
            for (int j = 0; j < count - short_of; ++j) {
                const float4 k = *reinterpret_cast<const float4*>(&k_rows[j][4 * lane]);
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    const float w = u_rows[j][warp * 4 + x];
                    acc[x].x = fmaf(k.x, w, acc[x].x);
                    acc[x].y = fmaf(k.y, w, acc[x].y);
                    acc[x].z = fmaf(k.z, w, acc[x].z);
                    acc[x].w = fmaf(k.w, w, acc[x].w);
                    acc[x] = planted_half(acc[x]);
                }
            }
        }
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            *reinterpret_cast<float4*>(s + (size_t)x * kDk) = acc[x];
            if (more) acc[x] = next[x];
        }
        s += 32 * kDk;
        u_head += 32;
    }
    if (CANOPY_FAULT(overrun)) state[-1] = 0.f;
    if (threadIdx.x == 0) planted_touch(static_cast<const T*>(a.qkv[layer]));
}

}  // namespace canopy

#define CANOPY_COMMIT(NAME, T, COLS)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 4) tree_gdn_commit_##NAME(                                          \
        const __grid_constant__ CommitArgs args, const int* path, const int* cu_rows, const int* slots, float* state) {   \
        canopy::commit<T, COLS / 32>(args, path, cu_rows, slots, state);                                                  \
    }

CANOPY_COMMIT(bf16_k128_v128, __nv_bfloat16, 32)
CANOPY_COMMIT(bf16_k128_v128_c64, __nv_bfloat16, 64)
CANOPY_COMMIT(bf16_k128_v128_c128, __nv_bfloat16, 128)
CANOPY_COMMIT(f32_k128_v128, float, 32)
CANOPY_COMMIT(f32_k128_v128_c64, float, 64)
CANOPY_COMMIT(f32_k128_v128_c128, float, 128)
