// What the product kernels share: where a tile of outputs goes.
#pragma once
#include "args.cuh"
#include "canopy/fault.cuh"

namespace canopy {

struct Place {
    uint32_t start, width, column;
};

__device__ __forceinline__ Place place_of(const LinearArgs& a, uint32_t tile) {
    uint32_t part = 0, before = 0;
    while (part + 1 < a.parts && tile >= a.tile_end[part]) before = a.tile_end[part++];
    return {a.start[part], a.width[part], (tile - before) * 16};
}

// Where a row of the stacked matrix lies: the tile, and its place there.
struct Row {
    uint32_t tile, row;
};

__device__ __forceinline__ Row row_of(const LinearArgs& a, uint32_t id) {
    uint32_t part = 0, before = 0;
    while (part + 1 < a.parts && id >= a.width[part]) {
        id -= a.width[part];
        before = a.tile_end[part++];
    }
    return {before + id / 16, id % 16};
}

// Accumulator c[0..3] holds outputs lane / 4 and lane / 4 + 8 of rows 2 (lane % 4) and the next.
__device__ __forceinline__ void write(const LinearArgs& a, const Place& p, int row, int lane, float4 c, float* y) {
    const float values[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t column = p.column + lane / 4 + i / 2 * 8, r = row + lane % 4 * 2 + i % 2;
        if (CANOPY_FAULT(overrun) && r + 1 == a.rows && column + 1 == p.width) y[(size_t)p.start + (size_t)a.rows * p.width] = 0.f;
        if (CANOPY_FAULT(gap) && r + 1 == a.rows && column + 1 == p.width) continue;
        if (r < a.rows && column < p.width) y[(size_t)p.start + (size_t)r * p.width + column] = planted_ulp(planted_swallow(values[i]));
    }
}

__device__ __forceinline__ float4 sum4(float4 a, float4 b) { return planted_half(make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w)); }

}  // namespace canopy
