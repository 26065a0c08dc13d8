// Instructions of the device that CUDA C++ has no name for.
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

// What will be read soon.
__device__ __forceinline__ void ask_for(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

// Past the L1, which has no second reader.
__device__ __forceinline__ uint4 stream16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// a b + c of two bf16 each, rounded once.
__device__ __forceinline__ uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// Waits for as many threads at one of the block's barriers 1 to 15; 0 is __syncthreads.
template <int Threads>
__device__ __forceinline__ void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}

}  // namespace canopy
