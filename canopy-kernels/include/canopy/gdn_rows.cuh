// What the kernels of the gated delta rule share: where a row's q, k and v lie, and the L2 norm in f32.
#pragma once
#include "canopy/numeric.cuh"

namespace canopy {

constexpr int kDk = 128;
constexpr int kDv = 128;
constexpr int kMaskWords = 8;  // 256 nodes

__device__ __forceinline__ size_t qkv_width(uint32_t k_heads, uint32_t v_heads) {
    return 2ull * k_heads * kDk + (size_t)v_heads * kDv;
}

// A q or k head, normalised: lane l holds values 4 l .. 4 l + 3.
__device__ __forceinline__ float4 normed(float4 x, float scale) {
    const float sum = warp_sum(dot4(x, x, 0.f));
    return scaled(x, rsqrtf(sum + 1e-6f) * scale);
}

template <typename T>
__device__ __forceinline__ float4 normed_row(const T* head, int lane, float scale) {
    return normed(load4(head + 4 * lane), scale);
}

}  // namespace canopy
