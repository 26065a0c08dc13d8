// tree_conv verify and commit. A thread owns four channels of one packed row (verify) or of one sequence in one layer (commit). Where
// verify's launch has the gates too, a row's last CTA computes them.
// Taps run along the parent chain, never along row order; past the root they continue into the conv state, newest row first.
// Nothing is staged in shared memory; the four products are added oldest tap first.
#include <stdint.h>

#include "../gates/gates.cuh"
#include "canopy/fault.cuh"
#include "canopy/numeric.cuh"

constexpr int kMostLayers = 64;

struct ConvCommitArgs {
    uint32_t channels;
    uint32_t layers;
    uint64_t layer_state;  // elements from one layer's pool to the next
    const void* x[kMostLayers];
};
static_assert(sizeof(ConvCommitArgs) == 16 + 8 * kMostLayers, "launch.rs ConvCommitArgs");

namespace canopy {

template <typename T>
__device__ __forceinline__ void store4(T* p, float4 x) {
    store(p, x.x);
    store(p + 1, x.y);
    store(p + 2, x.z);
    store(p + 3, x.w);
}

__device__ __forceinline__ float silu(float x) { return planted_ulp(x / (1.f + expf(-x))); }

template <typename T, typename Out>
__device__ void conv_verify(uint32_t channels, const T* x, const T* weight, const T* conv_state, const int* parents,
                            const int* sequence, const int* cu_nodes, const int* slots, Out* out, Gates<T> gates) {
    take_turn();
    const int row = blockIdx.y;
    if (gates.v_heads != 0 && blockIdx.x + 1 == gridDim.x) {
        for (uint32_t h = threadIdx.x; h < gates.v_heads; h += blockDim.x) gates(row, h);
        return;
    }
    const uint32_t c = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (c >= channels) return;
    const int b = sequence[row], first = cu_nodes[b], slot = slots[b];
    Out* dst = out + (size_t)row * channels + c;
    if (slot < 0) {
        store4(dst, make_float4(0, 0, 0, 0));
        return;
    }
    const T* state = conv_state + (size_t)slot * 3 * channels + c;
    float4 tap[4];
    int node = row - first, past = 0;
#pragma unroll
    for (int t = 3; t >= 0; --t) {
        if (node >= 0) {
            tap[t] = load4(x + (size_t)(first + node) * channels + c);
            node = CANOPY_FAULT(row_order) ? node - 1 : parents[first + node];
        } else {
            tap[t] = load4(state + (size_t)(2 - past) * channels);
            ++past;
        }
    }
    float4 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = load4(weight + (size_t)(c + i) * 4);
    float4 y;
    y.x = dot4(w[0], make_float4(tap[0].x, tap[1].x, tap[2].x, tap[3].x), 0.f);
    y.y = dot4(w[1], make_float4(tap[0].y, tap[1].y, tap[2].y, tap[3].y), 0.f);
    y.z = dot4(w[2], make_float4(tap[0].z, tap[1].z, tap[2].z, tap[3].z), 0.f);
    y.w = dot4(w[3], make_float4(tap[0].w, tap[1].w, tap[2].w, tap[3].w), 0.f);
    if (CANOPY_FAULT(half_sum)) y.x = planted_half(planted_half(planted_half(w[0].x * tap[0].x + w[0].y * tap[1].x) + w[0].z * tap[2].x) + w[0].w * tap[3].x);
    if (CANOPY_FAULT(leak)) y.x = fmaf(0.f, to_f32(x[0]), y.x);
    if (CANOPY_FAULT(gap) && row + 1 == gridDim.y) return;
    if (CANOPY_FAULT(overrun) && c == 0) store(out + (size_t)gridDim.y * channels, 0.f);
    if (row == 0 && c == 0) planted_touch(x);
    store4(dst, make_float4(silu(y.x), silu(y.y), silu(y.z), silu(y.w)));
}

template <typename T>
__device__ void conv_commit(const ConvCommitArgs& a, const int* path, const int* cu_rows, const int* slots, T* conv_state) {
    take_turn();
    const uint32_t layer = blockIdx.z, channels = a.channels;
    const T* x = static_cast<const T*>(a.x[layer]);
    const int b = blockIdx.y;
    const uint32_t c = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    const int begin = cu_rows[b], length = cu_rows[b + 1] - begin, slot = slots[b];
    if (c >= channels || slot < 0 || length == 0) return;
    T* state = conv_state + layer * a.layer_state + (size_t)slot * 3 * channels + c;
    float4 keep[3];
#pragma unroll
    for (int s = 0; s < 3; ++s) {
        const int at = length + s - CANOPY_FAULT(missed_node);
        const T* src = at < 3 ? state + (size_t)at * channels : x + (size_t)path[begin + at - 3] * channels + c;
        keep[s] = load4(src);
    }
#pragma unroll
    for (int s = 0; s < 3; ++s) store4(state + (size_t)s * channels, keep[s]);
    if (b == 0 && c == 0) planted_touch(x);
}

}  // namespace canopy

#define CANOPY_CONV_VERIFY(NAME, T, OUT)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128) tree_conv_verify_##NAME(                                               \
        uint32_t channels, const T* x, const T* weight, const T* conv_state, const int* parents, const int* sequence,        \
        const int* cu_nodes, const int* slots, OUT* out, uint32_t v_heads, const T* ab, const float* a_log,                  \
        const float* dt_bias, float* gates) {                                                                                \
        canopy::conv_verify<T, OUT>(channels, x, weight, conv_state, parents, sequence, cu_nodes, slots, out,                \
                                    {gridDim.y, v_heads, ab, a_log, dt_bias, gates});                                        \
    }

#define CANOPY_CONV_COMMIT(NAME, T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(128) tree_conv_commit_##NAME(                                               \
        const __grid_constant__ ConvCommitArgs a, const int* path, const int* cu_rows, const int* slots, T* conv_state) {    \
        canopy::conv_commit<T>(a, path, cu_rows, slots, conv_state);                                                         \
    }

CANOPY_CONV_VERIFY(f32, float, float)
CANOPY_CONV_COMMIT(f32, float)
#ifndef CANOPY_CONTROLS
CANOPY_CONV_VERIFY(bf16, __nv_bfloat16, __nv_bfloat16)
CANOPY_CONV_VERIFY(f32_bf16, float, __nv_bfloat16)
CANOPY_CONV_COMMIT(bf16, __nv_bfloat16)
#endif
