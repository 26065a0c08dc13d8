// y = x W^T with W read once for all rows. A CTA owns 128 outputs (a warp 16) and one span of the inputs; W lies in memory in the order in
// which a warp's lanes hold its tensor-core tiles, so it goes from global memory to registers, eight tiles ahead. x is rounded to bf16 in shared
// memory, or split into hi + lo, which makes a product good to about 2^-16 of |x w|. The spans of one output are added in order by the
// CTA that finishes last. Neither the rows in a tile nor the number of tiles enters an element's sum, so a row's bits are its own.
#include <stdint.h>

#include "args.cuh"
#include "canopy/mma.cuh"

namespace canopy {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = 128;
constexpr int kSteps = kChunk / 16;

// Past the L1, which has no second reader.
__device__ __forceinline__ uint4 stream16(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

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
};

struct Place {
    uint32_t start, width, column;
};

__device__ __forceinline__ Place place_of(const LinearArgs& a, uint32_t tile) {
    uint32_t part = 0, before = 0;
    while (part + 1 < a.parts && tile >= a.tile_end[part]) before = a.tile_end[part++];
    return {a.start[part], a.width[part], (tile - before) * 16};
}

// Accumulator c[0..3] holds outputs lane / 4 and lane / 4 + 8 of rows 2 (lane % 4) and the next.
__device__ __forceinline__ void write(const LinearArgs& a, const Place& p, int row, int lane, float4 c, float* y) {
    const float values[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t column = p.column + lane / 4 + i / 2 * 8, r = row + lane % 4 * 2 + i % 2;
        if (r < a.rows && column < p.width) y[(size_t)p.start + (size_t)r * p.width + column] = values[i];
    }
}

// Grid (row tiles, blocks of 128 outputs, splits). `spans` holds every split's accumulators, `arrived` one zero for each (block, row tile); it
// is zero again afterwards.
template <int Rows, int Parts>
__device__ __forceinline__ void product(const LinearArgs& a, const float* x, const uint4* weight, float4* spans, uint32_t* arrived, float* y) {
    constexpr int kTiles = Rows / 8, kUnits = Rows * kChunk / 4 / kThreads;
    constexpr int kTurns = Rows > 32 ? 2 : 1;  // parts of the row tiles between which a thread stages one unit
    constexpr uint32_t kBuffer = Parts * Rows * kRowBytes;
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = blockIdx.x * Rows;
    const uint32_t tile = blockIdx.y * kWarps + warp;
    const bool live = tile < a.tiles;
    const uint32_t begin = blockIdx.z * a.per_split, end = min(begin + a.per_split, a.chunks);
    const uint4* w = weight + (((size_t)(live ? tile : 0) * a.chunks + begin) * kSteps) * 32 + lane;

    Stager<Rows, Parts> stager(a, x, first_row, begin);
    float acc[kTiles][4] = {};
    uint4 ahead[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) ahead[s] = stream16(w + s * 32);
    w += kSteps * 32;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) stager.put(shared, u, stager.fetch(a.inputs, u));
    stager.advance();
    __syncthreads();
    for (uint32_t chunk = begin; chunk < end; ++chunk) {
        const bool more = chunk + 1 < end;
        uint8_t* next = shared + ((chunk - begin + 1) & 1) * kBuffer;
        const uint32_t tiles = shared_address(shared + ((chunk - begin) & 1) * kBuffer);
#pragma unroll
        for (int pair = 0; pair < kSteps / 2; ++pair) {
            const uint4 w0 = ahead[2 * pair], w1 = ahead[2 * pair + 1];
            const uint32_t a0[4] = {w0.x, w0.y, w0.z, w0.w}, a1[4] = {w1.x, w1.y, w1.z, w1.w};
            if (more) {
                ahead[2 * pair] = stream16(w + 2 * pair * 32);
                ahead[2 * pair + 1] = stream16(w + (2 * pair + 1) * 32);
            }
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn) {
                const int unit = pair * kTurns + turn;
                const bool stages = more && unit < kUnits;
                float4 staged;
                if (stages) staged = stager.fetch(a.inputs, unit);
#pragma unroll
                for (int t = turn * kTiles / kTurns; t < (turn + 1) * kTiles / kTurns; ++t) {
#pragma unroll
                    for (int plane = 0; plane < Parts; ++plane) {
                        uint32_t b[4];
                        load_matrices(b, tiles + chunk_offset(lane % 8, 4 * pair + lane / 8) + (plane * Rows + 8 * t) * kRowBytes);
                        mma(acc[t], a0, b[0], b[1]);
                        mma(acc[t], a1, b[2], b[3]);
                    }
                }
                if (stages) stager.put(next, unit, staged);
            }
        }
        w += kSteps * 32;
        stager.advance();
        __syncthreads();
    }

    const Place place = place_of(a, live ? tile : 0);
    if (a.splits == 1) {
        if (live)
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
                write(a, place, first_row + 8 * t, lane, make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]), y);
        return;
    }
    const size_t group = (size_t)blockIdx.y * gridDim.x + blockIdx.x, groups = (size_t)gridDim.x * gridDim.y;
    const size_t element = (size_t)warp * 32 + lane;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
        __stcg(spans + ((blockIdx.z * groups + group) * kTiles + t) * kThreads + element,
               make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]));
    __threadfence();
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(arrived + group, 1u) == a.splits - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) arrived[group] = 0;
    if (!live) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
        float4 sum = make_float4(0, 0, 0, 0);
        for (uint32_t split = 0; split < a.splits; ++split) {
            const float4 span = __ldcg(spans + ((split * groups + group) * kTiles + t) * kThreads + element);
            sum = make_float4(sum.x + span.x, sum.y + span.y, sum.z + span.z, sum.w + span.w);
        }
        write(a, place, first_row + 8 * t, lane, sum, y);
    }
}

// Rows of the matrix by index, in f32: ids count the outputs of all parts. A CTA a row.
__device__ __forceinline__ void lookup(const LinearArgs& a, const uint32_t* ids, const uint16_t* weight, float* y) {
    uint32_t id = ids[blockIdx.x], part = 0, before = 0;
    while (part + 1 < a.parts && id >= a.width[part]) {
        id -= a.width[part];
        before = a.tile_end[part++];
    }
    const uint32_t row = id % 16;
    const uint16_t* tile = weight + (size_t)(before + id / 16) * a.chunks * kSteps * 256;
    for (uint32_t k = threadIdx.x; k < a.inputs; k += blockDim.x) {
        const uint32_t in_step = k % 16, lane = row % 8 * 4 + in_step % 8 / 2, word = row / 8 + in_step / 8 * 2;
        const uint32_t bits = tile[(size_t)(k / 16) * 256 + lane * 8 + word * 2 + in_step % 2];
        y[(size_t)blockIdx.x * a.inputs + k] = __uint_as_float(bits << 16);
    }
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

#define CANOPY_LINEAR(ROWS, PARTS)                                                                                     \
    extern "C" __global__ void __launch_bounds__(canopy::kThreads, 2) linear_r##ROWS##_p##PARTS(                       \
        const __grid_constant__ LinearArgs a, const float* x, const uint4* weight, float4* spans, uint32_t* arrived,   \
        float* y) {                                                                                                    \
        canopy::product<ROWS, PARTS>(a, x, weight, spans, arrived, y);                                                 \
    }

CANOPY_LINEAR(8, 1)
CANOPY_LINEAR(16, 1)
CANOPY_LINEAR(32, 1)
CANOPY_LINEAR(64, 1)
CANOPY_LINEAR(8, 2)
CANOPY_LINEAR(16, 2)
CANOPY_LINEAR(32, 2)
CANOPY_LINEAR(64, 2)

extern "C" __global__ void __launch_bounds__(256) linear_lookup(const __grid_constant__ LinearArgs a, const uint32_t* ids, const uint16_t* weight, float* y) {
    canopy::lookup(a, ids, weight, y);
}

extern "C" __global__ void __launch_bounds__(256) linear_fill(const __grid_constant__ LinearArgs a, uint64_t seed, float scale, uint4* weight) {
    canopy::fill(a, seed, scale, weight);
}
