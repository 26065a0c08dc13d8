// Rows of keys, or of keys and values (blockIdx.z), into pools of bf16 or f32: row r goes to row `destinations[r]`, or nowhere (-1).
#include "canopy/fault.cuh"
#include "quad.cuh"

namespace canopy {

__device__ __forceinline__ void put_quad(float* row, uint32_t at, uint32_t width, bool whole, float4 x) {
    store_quad(row, at, width, whole, x);
}

__device__ __forceinline__ void put_quad(__nv_bfloat16* row, uint32_t at, uint32_t width, bool whole, float4 x) {
    if (whole) {
        const __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
        uint2 raw;
        raw.x = *reinterpret_cast<const uint32_t*>(&low);
        raw.y = *reinterpret_cast<const uint32_t*>(&high);
        if (at < width) *reinterpret_cast<uint2*>(row + at) = raw;
        return;
    }
    const float value[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (at + i < width) store(row + at + i, value[i]);
    }
}

template <typename T>
__device__ __forceinline__ void append(uint32_t width, uint32_t stride, const float* rows, const int* destinations, T* pool) {
    take_turn();
    const uint32_t at = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    const int destination = destinations[blockIdx.x];
    if (at >= width || destination < 0) return;
    if (blockIdx.x == 0 && at == 0) planted_touch(rows);
    rows += (size_t)blockIdx.x * stride;
    pool += (size_t)(destination - (CANOPY_FAULT(off_by_one) && destination > 0)) * width;
    const bool whole = quads_whole(width, rows, pool);
    put_quad(pool, at, width, whole, load_quad(rows, at, width, whole));
}

}  // namespace canopy

#define CANOPY_APPEND(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                        \
        glue_kv_append_##NAME(uint32_t width, uint32_t k_stride, uint32_t v_stride, const float* __restrict__ k,             \
                              const float* __restrict__ v, const int* __restrict__ destinations, T* keys, T* values) {       \
        if (blockIdx.z == 0) {                                                                                               \
            canopy::append(width, k_stride, k, destinations, keys);                                                          \
        } else {                                                                                                             \
            canopy::append(width, v_stride, v, destinations, values);                                                        \
        }                                                                                                                    \
    }

CANOPY_APPEND(bf16, __nv_bfloat16)
#ifndef CANOPY_CONTROLS
CANOPY_APPEND(f32, float)
#endif
