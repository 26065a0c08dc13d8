// What prepare leaves for one chunk of 64 rows and one value head, and how both kernels see it.
//
// Two lower triangles of 16 x 16 tiles of f32, T = (I + G)^-1 and then C, as B fragments: tile (i, j) is number i (i + 1) / 2 + j and holds
// 16 bytes a lane, (row lane / 4, columns 2 (lane % 4) and the next, and eight columns on), then the same eight rows down. Then f32
// planes of 64: exp(g_cum) / |k|, beta, exp(g_cum_end - g_cum) / |k|, exp(g_cum) scale / |q|; and exp(g_cum_end).
#pragma once
#include "args.cuh"
#include "canopy/fault.cuh"
#include "canopy/gdn_rows.cuh"
#include "canopy/tf32.cuh"

namespace canopy {

constexpr int kRows = 64;  // of a chunk
constexpr int kTiles = 10;
constexpr int kTile = 1024;
constexpr int kTriangle = kTiles * kTile;
constexpr int kScalars = 4 * kRows * 4 + 16;
constexpr int kRecord = 2 * kTriangle + kScalars;

// Bytes of records ahead of one.
__device__ __forceinline__ size_t record_at(const PrefillArgs& a, uint32_t b, uint32_t chunk, uint32_t hv) {
    return (((size_t)b * a.chunks + chunk) * a.v_heads + hv) * kRecord;
}

// Sixteen bytes of a packed matrix: B for two tiles of eight columns (rows of the tile in memory) and one k-step.
__device__ __forceinline__ void load_columns(uint32_t (&b)[4], uint32_t tile, int row0, int step, int lane) {
    load_matrices(b, tile + chunk_offset(row0 + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
}

}  // namespace canopy
