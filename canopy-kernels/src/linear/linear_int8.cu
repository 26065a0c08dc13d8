// int8 weights from bf16 ones, and their rows by index; int8.rs says what a value and a scale are.
#include <stdint.h>

#include "canopy/numeric.cuh"
#include "share.cuh"
#include "tiles.cuh"

namespace canopy {

// The scale of a group whose largest magnitude has these bits; NaN where a value is not finite or near the end of the range.
__device__ __forceinline__ uint32_t scale_of_largest(uint32_t bits) {
    if (bits > 0x7e96u) return 0x7fc0u;  // 1e38
    return (__float_as_uint(__fdiv_rn(__uint_as_float(bits << 16), 127.f)) + 0xffffu) >> 16;
}

// Magnitude in bits 0 to 6, sign in bit 7.
__device__ __forceinline__ uint32_t value_of(uint32_t bits, uint32_t scale) {
    if (scale == 0) return 0;
    const float exact = __fdiv_rn(__uint_as_float(bits << 16), __uint_as_float(scale << 16));
    const uint32_t magnitude = (uint32_t)fminf(rintf(fabsf(exact)), 127.f);
    return magnitude == 0 ? 0 : magnitude | (bits >> 15 << 7);
}

// A word of four values, the two of a pair of inputs in its halves: the first pair's magnitudes and the second's signs in the low bytes.
__device__ __forceinline__ uint32_t pack_values(uint32_t first, uint32_t second, uint32_t scale) {
    uint32_t word = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t a = value_of(first >> 16 * half & 0xffffu, scale), b = value_of(second >> 16 * half & 0xffffu, scale);
        word |= ((a & 0x7f) | (b & 0x80) | (b & 0x7f) << 8 | (a & 0x80) << 8) << 16 * half;
    }
    return word;
}

__device__ __forceinline__ uint32_t largest_of(uint32_t a, uint32_t b) {
    return max(max(a & 0x7fffu, a >> 16 & 0x7fffu), max(b & 0x7fffu, b >> 16 & 0x7fffu));
}

// A CTA a tile and chunk, a warp a step.
__device__ __forceinline__ void quantise(const LinearArgs& a, const uint8_t* weight, uint8_t* out) {
    __shared__ uint32_t largest[kSteps][16];
    __shared__ uint32_t scales[16];
    const uint32_t chunk = blockIdx.x, tile = blockIdx.y, step = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint4 w = stream16(weight + Bf16Tiles::place(a, tile / 8, tile % 8, chunk) + (step * 32 + lane) * 16);
    uint32_t low = largest_of(w.x, w.z), high = largest_of(w.y, w.w);
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
        low = max(low, __shfl_xor_sync(kFull, low, offset));
        high = max(high, __shfl_xor_sync(kFull, high, offset));
    }
    if (lane % 4 == 0) {
        largest[step][lane / 4] = low;
        largest[step][lane / 4 + 8] = high;
    }
    __syncthreads();
    uint8_t* to = out + Int8Tiles::place(a, tile / 8, tile % 8, chunk);
    if (threadIdx.x < 16) {
        uint32_t all = 0;
#pragma unroll
        for (int s = 0; s < kSteps; ++s) all = max(all, largest[s][threadIdx.x]);
        scales[threadIdx.x] = scale_of_largest(all);
        reinterpret_cast<uint16_t*>(to + Int8Tiles::kValueBytes)[threadIdx.x] = (uint16_t)scales[threadIdx.x];
    }
    __syncthreads();
    const uint32_t first = scales[lane / 4], second = scales[lane / 4 + 8];
    *reinterpret_cast<uint2*>(to + step / 2 * 512 + lane * 16 + step % 2 * 8) =
        make_uint2(pack_values(w.x, w.z, first), pack_values(w.y, w.w, second));
}

// Rows of the matrix by index, in f32: ids count the outputs of all parts. A CTA a row.
__device__ __forceinline__ void lookup(const LinearArgs& a, const uint32_t* ids, const uint8_t* weight, float* y) {
    take_turn();
    const Row at = row_of(a, ids[blockIdx.x]);
    for (uint32_t k = threadIdx.x; k < a.inputs; k += blockDim.x) {
        const uint8_t* tile = weight + Int8Tiles::place(a, at.tile / 8, at.tile % 8, k / 128);
        const uint32_t step = k / 16 % 8, in_step = k % 16, lane = at.row % 8 * 4 + in_step % 8 / 2, word = step % 2 * 2 + at.row / 8;
        const Scale scale(reinterpret_cast<const uint16_t*>(tile + Int8Tiles::kValueBytes)[at.row]);
        uint32_t first, second;
        Int8Tiles::widen(scale, reinterpret_cast<const uint32_t*>(tile)[(step / 2 * 32 + lane) * 4 + word], first, second);
        const uint32_t pair = in_step < 8 ? first : second;
        y[(size_t)blockIdx.x * a.inputs + k] = __uint_as_float(in_step % 2 ? pair & 0xffff0000u : pair << 16);
    }
}

}  // namespace canopy

extern "C" __global__ void __launch_bounds__(256) linear_quantise(const __grid_constant__ LinearArgs a, const uint8_t* weight, uint8_t* out) {
    canopy::quantise(a, weight, out);
}

extern "C" __global__ void __launch_bounds__(256) linear_lookup_int8(const __grid_constant__ LinearArgs a, const uint32_t* ids, const uint8_t* weight, float* y) {
    canopy::lookup(a, ids, weight, y);
}
