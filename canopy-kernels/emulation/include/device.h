// CUDA C++ as g++ reads it: keywords, types and built-in functions of a device, over emulation's threads.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <cmath>

#include "threads.h"

#define __global__ CANOPY_KERNEL
#ifndef CANOPY_LIST  // the tool that lists kernels looks for this word
#define CANOPY_KERNEL
#endif
#define __device__
#define __forceinline__ inline
#define __shared__ thread_local
#define __constant__ thread_local
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

using std::isfinite;
using std::max;
using std::min;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct ThreadIndex {
    struct {
        operator unsigned() const { return emulation::current; }
    } x;
    static constexpr unsigned y = 0, z = 0;
};
static constexpr ThreadIndex threadIdx{};
#define blockIdx emulation::block_index
#define gridDim emulation::grid_size
#define blockDim emulation::block_size

template <typename To, typename From>
inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
inline uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
inline int __double2loint(double x) { return static_cast<int>(same_bits<uint64_t>(x)); }

inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t pick = selector >> 4 * i & 15, byte = bytes >> 8 * (pick & 7) & 255;
        result |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}

template <typename T> inline T __ldg(const T* p) { return *p; }
template <typename T> inline T __ldcg(const T* p) { return *p; }
template <typename T> inline void __stcg(T* p, T x) { *p = x; }
inline void __threadfence() {}

template <typename T> inline T atomicAdd(T* p, T x) { const T old = *p; *p += x; return old; }
template <typename T> inline T atomicOr(T* p, T x) { const T old = *p; *p |= x; return old; }
template <typename T> inline T atomicMin(T* p, T x) { const T old = *p; *p = std::min(old, x); return old; }
template <typename T> inline T atomicMax(T* p, T x) { const T old = *p; *p = std::max(old, x); return old; }

inline void __syncthreads() { emulation::meet_threads(0, 0); }
inline bool __syncthreads_or(bool x) { return emulation::any_thread(x); }

namespace emulation {

// Every lane that has not ended takes part, which is what the full mask asks for.
inline Meeting& full(uint32_t mask) {
    if (mask != 0xffffffffu) {
        fprintf(stderr, "emulation: only the full mask of lanes is known, not %08x\n", mask);
        abort();
    }
    return meeting();
}

// One word in and one out.
inline uint32_t of_warp(uint32_t mask, uint32_t x, Together together) {
    Meeting& m = full(mask);
    const int lane = current % kLanes;
    m.in[lane][0] = x;
    meet_lanes(together);
    return m.out[lane][0];
}

template <typename Fold>
inline void folded(Meeting& m, uint32_t start, Fold fold) {
    uint32_t all = start;
    for (int lane = 0; lane < kLanes; ++lane)
        if (m.present >> lane & 1) all = fold(all, m.in[lane][0], lane);
    for (int lane = 0; lane < kLanes; ++lane) m.out[lane][0] = all;
}

}  // namespace emulation

inline void __syncwarp(uint32_t mask = ~0u) { emulation::of_warp(mask, 0, [](emulation::Meeting&) {}); }
inline uint32_t __ballot_sync(uint32_t mask, bool x) {
    return emulation::of_warp(mask, x, [](emulation::Meeting& m) {
        emulation::folded(m, 0, [](uint32_t all, uint32_t one, int lane) { return all | one << lane; });
    });
}
inline bool __any_sync(uint32_t mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(uint32_t mask, bool x) { return __ballot_sync(mask, !x) == 0; }
inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t x) {
    return emulation::of_warp(mask, x, [](emulation::Meeting& m) {
        emulation::folded(m, ~0u, [](uint32_t all, uint32_t one, int) { return std::min(all, one); });
    });
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t x) {
    return emulation::of_warp(mask, x, [](emulation::Meeting& m) {
        emulation::folded(m, 0, [](uint32_t all, uint32_t one, int) { return std::max(all, one); });
    });
}
// Values of 4 or 8 bytes.
template <typename T>
inline T __shfl_sync(uint32_t mask, T x, int from, int width = 32) {
    emulation::Meeting& m = emulation::full(mask);
    const int lane = emulation::current % 32;
    memcpy(m.in[lane], &x, sizeof x);
    m.in[lane][2] = lane / width * width + (from & (width - 1));
    emulation::meet_lanes([](emulation::Meeting& m) {
        for (int to = 0; to < emulation::kLanes; ++to) memcpy(m.out[to], m.in[m.in[to][2] & 31], 8);
    });
    memcpy(&x, m.out[lane], sizeof x);
    return x;
}
template <typename T>
inline T __shfl_xor_sync(uint32_t mask, T x, int other) { return __shfl_sync(mask, x, emulation::current % 32 ^ other); }
template <typename T>
inline T __shfl_up_sync(uint32_t mask, T x, unsigned by) {
    const int lane = emulation::current % 32;
    return __shfl_sync(mask, x, lane < static_cast<int>(by) ? lane : lane - by);
}
