// Rows of q, k and the state in shared memory, and their products: bf16 rows multiply as they are; f32 rows in two parts of tf32 each, three
// products of four (2^-22 of an element is left out).
#pragma once
#include "canopy/mma.cuh"
#include "canopy/tf32.cuh"

namespace canopy {

template <typename Row>
struct RowTile;

template <>
struct RowTile<__nv_bfloat16> {
    static constexpr int kBytes = 256, kSteps = 8, kChunks = 16;  // products of sixteen, chunks of 16 bytes
};

template <>
struct RowTile<float> {
    static constexpr int kBytes = 512, kSteps = 16, kChunks = 32;
};

template <typename Row>
__device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
    return row * RowTile<Row>::kBytes + ((chunk ^ (row & 7)) << 4);
}

// Sixteen rows, one step: ldmatrix moves words of tf32 as it moves pairs of bf16.
template <typename Row>
__device__ __forceinline__ void load_left(uint32_t (&a)[4], uint32_t base, int row0, int step, int lane) {
    load_matrices(a, base + chunk_at<Row>(row0 + lane % 16, 2 * step + lane / 16));
}

// Eight columns (rows of the tile), two steps: b[0..1] is step 2 pair, b[2..3] step 2 pair + 1.
template <typename Row>
__device__ __forceinline__ void load_right(uint32_t (&b)[4], uint32_t base, int row0, int pair, int lane) {
    load_matrices(b, base + chunk_at<Row>(row0 + lane % 8, 4 * pair + lane / 8));
}

// x in two parts; where x is not finite the second is 0 and the first takes no part in mixed products, so that what comes of it has x's class.
struct Parts {
    float high, mixed, low;
    __device__ __forceinline__ explicit Parts(uint32_t bits) {
        const float x = __uint_as_float(bits);
        high = to_tf32(x);
        const float rest = x - high;
        const bool sound = isfinite(rest);
        mixed = sound ? high : 0.f;
        low = sound ? rest : 0.f;
    }
};

template <typename Row>
__device__ __forceinline__ void times(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (RowTile<Row>::kBytes == 256) {
        mma(c, a, b0, b1);
    } else {
        const Parts x0(a[0]), x1(a[1]), x2(a[2]), x3(a[3]), y0(b0), y1(b1);
        const float low[4] = {x0.low, x1.low, x2.low, x3.low}, mixed[4] = {x0.mixed, x1.mixed, x2.mixed, x3.mixed};
        const float high[4] = {x0.high, x1.high, x2.high, x3.high};
        mma_tf32(c, low, y0.mixed, y1.mixed);
        mma_tf32(c, mixed, y0.low, y1.low);
        mma_tf32(c, high, y0.high, y1.high);
    }
}

// Two neighbouring values of a row, as they are read and as they count.
__device__ __forceinline__ uint32_t read_pair(const __nv_bfloat16* at) { return __ldg(reinterpret_cast<const unsigned*>(at)); }
__device__ __forceinline__ float2 read_pair(const float* at) { return __ldg(reinterpret_cast<const float2*>(at)); }
__device__ __forceinline__ float2 widened(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
__device__ __forceinline__ float2 widened(float2 pair) { return pair; }

// Sixteen rows of a tile as left operands: bf16 rows are kept in registers, f32 rows are read again for every product.
template <typename Row>
struct Left {
    uint32_t tile;
    int row0;
    __device__ __forceinline__ Left(uint32_t tile, int row0, int) : tile(tile), row0(row0) {}
    __device__ __forceinline__ void step(uint32_t (&a)[4], int at, int lane) const { load_left<Row>(a, tile, row0, at, lane); }
};

template <>
struct Left<__nv_bfloat16> {
    uint32_t frag[8][4];
    __device__ __forceinline__ Left(uint32_t tile, int row0, int lane) {
#pragma unroll
        for (int at = 0; at < 8; ++at) load_left<__nv_bfloat16>(frag[at], tile, row0, at, lane);
    }
    __device__ __forceinline__ void step(uint32_t (&a)[4], int at, int) const {
#pragma unroll
        for (int x = 0; x < 4; ++x) a[x] = frag[at][x];
    }
};

// Eight columns of a product with sixteen rows: rows of `tile` from `row0` on are the columns.
template <typename Row>
__device__ __forceinline__ void products(float (&dot)[4], const Left<Row>& left, uint32_t tile, int row0, int lane) {
    float other[4] = {0.f, 0.f, 0.f, 0.f};  // two chains of sums, so that one product does not wait for the last
    dot[0] = dot[1] = dot[2] = dot[3] = 0.f;
    constexpr int kPairs = RowTile<Row>::kSteps / 2;
#pragma unroll(kPairs == 4 ? 4 : 2)
    for (int pair = 0; pair < kPairs; ++pair) {
        uint32_t f[4], even[4], odd[4];
        load_right<Row>(f, tile, row0, pair, lane);
        left.step(even, 2 * pair, lane);
        left.step(odd, 2 * pair + 1, lane);
        times<Row>(dot, even, f[0], f[1]);
        times<Row>(other, odd, f[2], f[3]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) dot[e] += other[e];
}

}  // namespace canopy
