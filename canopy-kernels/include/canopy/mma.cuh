// Tiles of bf16 rows and their tensor-core fragments (m16n8k16, f32 accumulated).
// Tiles lie in shared memory as rows of 128 bf16 (256 bytes); 16-byte chunk c of row r is stored at chunk c ^ (r & 7), which keeps
// ldmatrix free of bank conflicts.
#pragma once
#include "canopy/ptx.cuh"

namespace canopy {

constexpr int kRowBytes = 256;

__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }

// The 16 x 16 A tile at (row0, k-step): rows of the tile by lane % 16, the two halves of k by lane / 16.
__device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t base, int row0, int step, int lane) {
    load_matrices(a, base + chunk_offset(row0 + lane % 16, 2 * step + lane / 16));
}

// B for eight columns (rows of the tile in memory) and two k-steps: b[0..1] is step 2 pair, b[2..3] step 2 pair + 1.
__device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t base, int row0, int pair, int lane) {
    load_matrices(b, base + chunk_offset(row0 + lane % 8, 4 * pair + lane / 8));
}

__device__ __forceinline__ uint32_t pack_bf16(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// What bf16 leaves of x; 0 where x is not finite, so that an infinity stays one.
__device__ __forceinline__ float residual(float x) {
    const float rest = x - __bfloat162float(__float2bfloat16_rn(x));
    return isfinite(rest) ? rest : 0.f;
}

}  // namespace canopy
