// What the kernels of this room share within a warp.
#pragma once
#include "canopy/ptx.cuh"

namespace canopy {

// x / sum, `inverse` being about 1 / sum: the remainder makes up for it.
__device__ __forceinline__ float share_of(float x, float sum, float inverse) {
    const float y = __fmul_rn(x, inverse);
    return fmaf(fmaf(-y, sum, x), inverse, y);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFull, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFull, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(kFull, x, 1);
    return x + __shfl_xor_sync(kFull, x, 2);
}

}  // namespace canopy
