// f32 in tf32 parts.
#pragma once
#include "canopy/mma.cuh"

namespace canopy {

// x without the bits that tf32 has no room for.
__device__ __forceinline__ float cut_tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

// A finite x to the nearest tf32, its low bits left as they are.
__device__ __forceinline__ float nudged_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

}  // namespace canopy
