// Rows of f32 in quads of four consecutive values. A quad's owner is fixed by its place in the row, so a row's bits depend neither on
// other rows nor on how wide its loads may be.
#pragma once
#include "canopy/numeric.cuh"

namespace canopy {

// True when a row of `width` values at every given address may be read and written 16 bytes at a time.
template <typename... P>
__device__ __forceinline__ bool quads_whole(uint32_t width, const P*... p) {
    return (width % 4 | ((reinterpret_cast<uintptr_t>(p) | ...) & 15)) == 0;
}

// Values at..at + 3 of a row; 0 past its end.
template <typename T>
__device__ __forceinline__ float4 load_quad(const T* row, uint32_t at, uint32_t width, bool whole) {
    if (whole) return at < width ? load4(row + at) : make_float4(0, 0, 0, 0);
    return make_float4(at < width ? to_f32(row[at]) : 0.f, at + 1 < width ? to_f32(row[at + 1]) : 0.f,
                       at + 2 < width ? to_f32(row[at + 2]) : 0.f, at + 3 < width ? to_f32(row[at + 3]) : 0.f);
}

__device__ __forceinline__ void store_quad(float* row, uint32_t at, uint32_t width, bool whole, float4 x) {
    if (whole) {
        if (at < width) *reinterpret_cast<float4*>(row + at) = x;
        return;
    }
    if (at < width) row[at] = x.x;
    if (at + 1 < width) row[at + 1] = x.y;
    if (at + 2 < width) row[at + 2] = x.z;
    if (at + 3 < width) row[at + 3] = x.w;
}

__device__ __forceinline__ void store_quad(__nv_bfloat16* row, uint32_t at, uint32_t width, bool whole, float4 x) {
    if (whole) {
        if (at >= width) return;
        reinterpret_cast<__nv_bfloat162*>(row + at)[0] = __floats2bfloat162_rn(x.x, x.y);
        reinterpret_cast<__nv_bfloat162*>(row + at)[1] = __floats2bfloat162_rn(x.z, x.w);
        return;
    }
    if (at < width) store(row + at, x.x);
    if (at + 1 < width) store(row + at + 1, x.y);
    if (at + 2 < width) store(row + at + 2, x.z);
    if (at + 3 < width) store(row + at + 3, x.w);
}

__device__ __forceinline__ float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float4 operator*(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }

// 1 / (1 + e^-x), without overflow on either side.
__device__ __forceinline__ float sigmoid(float x) {
    const float e = expf(-fabsf(x));
    return (x < 0.f ? e : 1.f) / (1.f + e);
}

__device__ __forceinline__ float4 sigmoid(float4 x) { return make_float4(sigmoid(x.x), sigmoid(x.y), sigmoid(x.z), sigmoid(x.w)); }

// x sigmoid(x); NaN at minus infinity, as the formula gives.
__device__ __forceinline__ float4 silu(float4 x) { return x * sigmoid(x); }

}  // namespace canopy
