// y = x W^T with W read once for all rows. A block of 128 outputs (16 a warp) takes the inputs in chunks of 128; W lies in memory in the order in
// which a warp's lanes hold its tensor-core tiles, so it goes from global memory to registers, eight tiles ahead. x is rounded to bf16 in shared
// memory, or split into hi + lo, which makes a product good to about 2^-16 of |x w|. What several CTAs have of
// one output is added in order by the one that finishes last. Neither the rows in a tile nor the number of tiles enters an element's sum, so a row's bits are its own.
#include <stdint.h>

#include "canopy/mma.cuh"
#include "share.cuh"
#include "tiles.cuh"

namespace canopy {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = 128;

// What a thread stages of a row tile: four inputs of every eighth row from its own on.
template <int Rows, int Parts>
struct Stager {
    const float* source;
    int rows_left;  // rows of x from this thread's first on
    int inputs_left;
    uint32_t at;

    __device__ __forceinline__ Stager(const LinearArgs& a, const float* x, uint32_t first_row, uint32_t chunk) {
        const uint32_t row = first_row + threadIdx.x / 32, k = chunk * kChunk + threadIdx.x % 32 * 4;
        source = x + (size_t)row * a.inputs + k;
        rows_left = (int)a.rows - (int)row;
        inputs_left = (int)a.inputs - (int)k;
        at = chunk_offset(threadIdx.x / 32, threadIdx.x % 32 / 2) + threadIdx.x % 2 * 8;
    }

    // The `unit`-th; zeros past the rows and past the inputs.
    __device__ __forceinline__ float4 fetch(uint32_t inputs, int unit) const {
        return 8 * unit < rows_left && inputs_left > 0 ? load4(source + (size_t)(8 * unit) * inputs) : make_float4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void put(uint8_t* buffer, int unit, float4 v) const {
        uint8_t* p = buffer + 8 * unit * kRowBytes + at;
        *reinterpret_cast<uint2*>(p) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
        if (Parts == 2)
            *reinterpret_cast<uint2*>(p + Rows * kRowBytes) = make_uint2(pack_bf16(residual(v.x), residual(v.y)), pack_bf16(residual(v.z), residual(v.w)));
    }

    __device__ __forceinline__ void advance() {
        source += kChunk;
        inputs_left -= kChunk;
    }

    __device__ __forceinline__ void rewind(uint32_t chunks) {
        source -= chunks * kChunk;
        inputs_left += chunks * kChunk;
    }
};

template <int Rows>
struct Sum {
    static constexpr int kTiles = Rows / 8;

    float c[kTiles][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) c[t][0] = c[t][1] = c[t][2] = c[t][3] = 0.f;
    }

    __device__ __forceinline__ float4 at(int t) const { return make_float4(c[t][0], c[t][1], c[t][2], c[t][3]); }
};

// Where worker `v` leaves what it has of a block that others share: it shares at most the first and the last block that it touches.
__device__ __forceinline__ size_t span_of(const LinearArgs& a, uint32_t v, uint32_t block) {
    const uint32_t place = 2 * v + (v * a.per_worker / a.chunks == block ? 0 : 1);
    return (size_t)place * gridDim.x + blockIdx.x;
}

// This worker's sum over its part of `block`: written if it has the whole block, else left for the worker that comes last, which adds all
// in the order of the inputs.
template <int Rows>
__device__ __forceinline__ void finish(const LinearArgs& a, const Sum<Rows>& sum, uint32_t block, float4* spans, uint32_t* arrived, float* y) {
    constexpr int kTiles = Rows / 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = blockIdx.x * Rows;
    const uint32_t tile = block * kWarps + warp;
    const uint32_t first = block * a.chunks / a.per_worker, last = (block * a.chunks + a.chunks - 1) / a.per_worker;
    if (first == last) {
        if (tile >= a.tiles) return;
        const Place place = place_of(a, tile);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) write(a, place, first_row + 8 * t, lane, sum.at(t), y);
        return;
    }
    float4* mine = spans + span_of(a, blockIdx.y, block) * kTiles * kThreads + threadIdx.x;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) __stcg(mine + t * kThreads, sum.at(t));
    __threadfence();
    __shared__ bool is_last;
    __syncthreads();
    uint32_t* counter = arrived + (size_t)block * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) is_last = atomicAdd(counter, 1u) == last - first;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) *counter = 0;
    if (tile >= a.tiles) return;
    const Place place = place_of(a, tile);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
        float4 total = make_float4(0, 0, 0, 0);
        for (uint32_t v = first + CANOPY_FAULT(dropped_slice); v <= last; ++v) {
            const float4 part = __ldcg(spans + (span_of(a, v, block) * kTiles + t) * kThreads + threadIdx.x);
            total = sum4(total, part);
        }
        write(a, place, first_row + 8 * t, lane, total, y);
    }
}

// Grid (row tiles, workers). The chunks of all blocks of 128 outputs stand in one line, of which every worker takes an equal piece. `spans`
// holds two blocks' sums a worker and row tile, `arrived` a zero for each (block, row tile); it is zero again afterwards.
template <typename Form, int Rows, int Parts>
__device__ __forceinline__ void product(const LinearArgs& a, const float* x, const uint8_t* weight, float4* spans, uint32_t* arrived, float* y) {
    constexpr int kTiles = Rows / 8, kUnits = Rows * kChunk / 4 / kThreads;
    constexpr int kTurns = Rows > 32 ? 2 : 1;  // parts of the row tiles between which a thread stages one unit
    constexpr uint32_t kBuffer = Parts * Rows * kRowBytes;
    next_may_begin();
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t begin = blockIdx.y * a.per_worker, end = min(begin + a.per_worker, a.blocks * a.chunks);
    uint32_t block = begin / a.chunks, chunk = begin % a.chunks;
    // a warp past the last tile reads the first one's weights and writes nothing
    const auto tile_start = [&](uint32_t of_block, uint32_t from_chunk) {
        return weight + (of_block * kWarps + warp < a.tiles ? Form::place(a, of_block, warp, from_chunk) : Form::place(a, 0, 0, from_chunk));
    };
    const uint8_t* w = tile_start(block, chunk);

    Stager<Rows, Parts> stager(a, x, blockIdx.x * Rows, chunk);
    Sum<Rows> sum;
    sum.clear();
    typename Form::Ahead ahead;
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) ahead.fetch(w, lane, pair);
    // the weights above are nobody's output
    wait_for_kernels_ahead();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) stager.put(shared, u, stager.fetch(a.inputs, u));
    __syncthreads();
    for (uint32_t unit = begin; unit < end; ++unit) {
        const bool more = unit + 1 < end, ends_block = chunk + 1 == a.chunks;
        if (ends_block) {
            w = tile_start(block + 1, 0);
            stager.rewind(a.chunks - 1);
        } else {
            w += Form::stride(a, block);
            stager.advance();
        }
        uint8_t* next = shared + ((unit - begin + 1) & 1) * kBuffer;
        const uint32_t tiles = shared_address(shared + ((unit - begin) & 1) * kBuffer);
#pragma unroll
        for (int pair = 0; pair < kSteps / 2; ++pair) {
            uint4 steps[2];
            ahead.take(pair, steps);
            const uint32_t a0[4] = {steps[0].x, steps[0].y, steps[0].z, steps[0].w}, a1[4] = {steps[1].x, steps[1].y, steps[1].z, steps[1].w};
            if (more && !(CANOPY_FAULT(stale) && pair == 0)) ahead.fetch(w, lane, pair);
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn) {
                const int staged_unit = pair * kTurns + turn;
                const bool stages = more && staged_unit < kUnits;
                float4 staged;
                if (stages) staged = stager.fetch(a.inputs, staged_unit);
#pragma unroll
                for (int t = turn * kTiles / kTurns; t < (turn + 1) * kTiles / kTurns; ++t) {
#pragma unroll
                    for (int plane = 0; plane < Parts; ++plane) {
                        uint32_t b[4];
                        load_matrices(b, tiles + chunk_offset(lane % 8, 4 * pair + lane / 8) + (plane * Rows + 8 * t) * kRowBytes);
                        mma(sum.c[t], a0, b[0], b[1]);
                        mma(sum.c[t], a1, b[2], b[3]);
                    }
                }
                if (stages) stager.put(next, staged_unit, staged);
            }
        }
        if (ends_block || !more) {
            finish<Rows>(a, sum, block, spans, arrived, y);
            sum.clear();
        }
        chunk = ends_block ? 0 : chunk + 1;
        block += ends_block;
        __syncthreads();
    }
}

// Rows of the matrix by index, in f32: ids count the outputs of all parts. A CTA a row.
__device__ __forceinline__ void lookup(const LinearArgs& a, const uint32_t* ids, const uint16_t* weight, float* y) {
    take_turn();
    const Row at = row_of(a, ids[blockIdx.x]);
    const uint32_t row = at.row;
    const uint16_t* tile = weight + (size_t)at.tile * a.chunks * kSteps * 256;
    for (uint32_t k = threadIdx.x; k < a.inputs; k += blockDim.x) {
        const uint32_t in_step = k % 16, lane = row % 8 * 4 + in_step % 8 / 2, word = row / 8 + in_step / 8 * 2;
        const uint32_t bits = tile[(size_t)(k / 16) * 256 + lane * 8 + word * 2 + in_step % 2];
        y[(size_t)blockIdx.x * a.inputs + k] = __uint_as_float(bits << 16);
    }
}

// x to bf16, a quad a thread.
__device__ __forceinline__ void round_rows(uint32_t quads, const float* x, uint2* out) {
    take_turn();
    const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= quads) return;
    const float4 v = load4(x + (size_t)at * 4);
    out[at] = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}

// linear/random.rs in tensor-core order: a thread fills one lane's eight values of one step.
__device__ __forceinline__ void fill(const LinearArgs& a, uint64_t seed, float scale, uint4* weight) {
    const size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (size_t)a.tiles * a.chunks * kSteps * 32) return;
    const uint32_t lane = at % 32;
    const uint64_t step = at / 32 % (a.chunks * kSteps), tile = at / 32 / (a.chunks * kSteps);
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        float pair[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint64_t row = tile * 16 + lane / 4 + w % 2 * 8, k = step * 16 + lane % 4 * 2 + w / 2 * 8 + half;
            uint64_t x = seed + (row << 32 | k) * 0x9e3779b97f4a7c15ull;
            x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
            x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
            x ^= x >> 31;
            const float unit = (float)(uint32_t)(x >> 40) * 0x1p-23f - 1.f;
            pair[half] = k < a.inputs ? __fmul_rn(unit, scale) : 0.f;
        }
        words[w] = pack_bf16(pair[0], pair[1]);
    }
    weight[at] = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace canopy

#define CANOPY_LINEAR(NAME, FORM, ROWS, PARTS)                                                                         \
    extern "C" __global__ void __launch_bounds__(canopy::kThreads, 2) NAME(                                            \
        const __grid_constant__ LinearArgs a, const float* x, const uint8_t* weight, float4* spans, uint32_t* arrived, \
        float* y) {                                                                                                    \
        canopy::product<canopy::FORM, ROWS, PARTS>(a, x, weight, spans, arrived, y);                                   \
    }

CANOPY_LINEAR(linear_r8_p2, Bf16Tiles, 8, 2)
CANOPY_LINEAR(linear_r16_p2, Bf16Tiles, 16, 2)
CANOPY_LINEAR(linear_r32_p2, Bf16Tiles, 32, 2)
CANOPY_LINEAR(linear_r64_p2, Bf16Tiles, 64, 2)
CANOPY_LINEAR(linear_i8_p1, Int8Tiles, 8, 1)
CANOPY_LINEAR(linear_i16_p1, Int8Tiles, 16, 1)
CANOPY_LINEAR(linear_i32_p1, Int8Tiles, 32, 1)
#ifndef CANOPY_CONTROLS
CANOPY_LINEAR(linear_r8_p1, Bf16Tiles, 8, 1)
CANOPY_LINEAR(linear_r16_p1, Bf16Tiles, 16, 1)
CANOPY_LINEAR(linear_r32_p1, Bf16Tiles, 32, 1)
CANOPY_LINEAR(linear_r64_p1, Bf16Tiles, 64, 1)
CANOPY_LINEAR(linear_i8_p2, Int8Tiles, 8, 2)
CANOPY_LINEAR(linear_i16_p2, Int8Tiles, 16, 2)
CANOPY_LINEAR(linear_i32_p2, Int8Tiles, 32, 2)
#endif

extern "C" __global__ void __launch_bounds__(256) linear_lookup(const __grid_constant__ LinearArgs a, const uint32_t* ids, const uint16_t* weight, float* y) {
    canopy::lookup(a, ids, weight, y);
}

extern "C" __global__ void __launch_bounds__(256) linear_fill(const __grid_constant__ LinearArgs a, uint64_t seed, float scale, uint4* weight) {
    canopy::fill(a, seed, scale, weight);
}

extern "C" __global__ void __launch_bounds__(256) linear_round(uint32_t quads, const float* x, uint2* out) { canopy::round_rows(quads, x, out); }
