// What the kernels of this room share within a warp.
#pragma once
#include "canopy/numeric.cuh"

namespace canopy {

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// As an addition in global memory rounds: numbers below the normal ones are zero.
__device__ __forceinline__ float add_flushed(float x, float y) {
    float z;
    asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

__device__ __forceinline__ float times_flushed(float x, float y) {
    float z;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// Adds to two neighbours in global memory, in the order of this thread's additions.
__device__ __forceinline__ void add_in_memory(float2* to, float x, float y) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

// x, as a value that the compiler cannot keep in registers over a loop: addresses made from it are made anew in every turn.
__device__ __forceinline__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ float inverse_of(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x / sum, `inverse` being about 1 / sum: the remainder makes up for it.
__device__ __forceinline__ float share_of(float x, float sum, float inverse) {
    const float y = __fmul_rn(x, inverse);
    return fmaf(fmaf(-y, sum, x), inverse, y);
}

// What will be read soon.
__device__ __forceinline__ void ask_for(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFull, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFull, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(kFull, x, 1);
    return x + __shfl_xor_sync(kFull, x, 2);
}

}  // namespace canopy
