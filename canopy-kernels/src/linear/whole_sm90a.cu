// y = x W^T for hundreds of rows and more on compute capability 9.0: one CTA sums each output from its first input to its last, so that nothing is
// left for others to add. A tile is a block of 128 outputs by 256 rows; the two CTAs of a cluster take neighbouring blocks of the same rows, of which
// each copies half into both. A cluster has one tile after another, rows fastest, so that those under way at once share weights and rows in the
// L2; the copies of the next tile begin while this one's sums are written. Two warpgroups multiply 64 outputs each, a lane's 16 bytes of weights
// being what wgmma takes of A in registers, and have one stage's products under way while they read the next one's weights.
//
// Neither the number of rows nor of CTAs enters an element's sum, and its order is another than linear_sm90a.cu's.
#include <stdint.h>

#include "canopy/bulk.cuh"
#include "canopy/wgmma.cuh"
#include "share.cuh"
#include "tiles.cuh"

namespace canopy {

constexpr int kRows = 256, kInputs = 64, kStages = 4, kHalf = kSteps / 2;
constexpr int kProducts = 256, kThreads = kProducts + 128;
constexpr uint32_t kPart = Bf16Tiles::kTileBytes / 2;  // a tile's 64 inputs
constexpr uint32_t kRowsBytes = kRows * kInputs * 2, kStage = 8 * kPart + kRowsBytes;

struct Ring {
    uint32_t base, barriers;

    __device__ __forceinline__ uint32_t weights(uint32_t unit) const { return base + unit % kStages * kStage; }
    __device__ __forceinline__ uint32_t rows(uint32_t unit) const { return weights(unit) + 8 * kPart; }
    __device__ __forceinline__ uint32_t full(uint32_t unit) const { return barriers + unit % kStages * 16; }
    __device__ __forceinline__ uint32_t empty(uint32_t unit) const { return full(unit) + 8; }
    static __device__ __forceinline__ uint32_t turn(uint32_t unit) { return unit / kStages & 1; }
};

// The tiles of this CTA, one after another.
struct Walk {
    uint32_t row_tiles, tile, total;

    __device__ __forceinline__ explicit Walk(const LinearArgs& a)
        : row_tiles((a.rows + kRows - 1) / kRows), tile(blockIdx.x / 2), total(row_tiles * ((a.blocks + 1) / 2)) {}
    __device__ __forceinline__ bool more() const { return tile < total; }
    __device__ __forceinline__ void next() { tile += gridDim.x / 2; }
    // Behind an odd number of blocks there is one without outputs.
    __device__ __forceinline__ uint32_t block() const { return tile / row_tiles * 2 + cluster_rank(); }
    __device__ __forceinline__ uint32_t row() const { return tile % row_tiles * kRows; }
};

__device__ __forceinline__ uint32_t outputs_of(const LinearArgs& a, uint32_t block) { return block < a.blocks ? tiles_of(a, block) : 0; }

// One thread copies all units of all tiles, in order.
__device__ __forceinline__ void copy_all(const LinearArgs& a, const CUtensorMap* x, const uint8_t* weight, const Ring& ring) {
    const uint32_t rank = cluster_rank();
    uint32_t unit = 0;
    for (Walk walk(a); walk.more(); walk.next()) {
        const uint32_t block = walk.block(), tiles = outputs_of(a, block), row = walk.row();
        for (uint32_t half = 0; half < 2 * a.chunks; ++half, ++unit) {
            if (unit >= kStages) wait_phase(ring.empty(unit), Ring::turn(unit) ^ 1);
            arrive_expecting(ring.full(unit), tiles * kPart + kRowsBytes);
            for (uint32_t t = 0; t < tiles; ++t)
                copy_bulk(ring.weights(unit) + t * kPart, weight + Bf16Tiles::place(a, block, t, half / 2) + half % 2 * kPart, kPart, ring.full(unit));
            copy_box_to(ring.rows(unit) + rank * kRowsBytes / 2, x, half * kInputs, row + rank * kRows / 2, ring.full(unit), 3);
        }
    }
}

using Weights = uint4[kHalf];

// What products under way read stays where it is until here.
__device__ __forceinline__ void held(Weights& w) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) asm volatile("" : "+r"(w[i].x), "+r"(w[i].y), "+r"(w[i].z), "+r"(w[i].w)::"memory");
}

// The products of one unit, under way behind this.
__device__ __forceinline__ void multiply(const uint8_t* shared, const Ring& ring, uint32_t unit, Weights& w, float (&sum)[kRows / 2]) {
    wait_phase(ring.full(unit), Ring::turn(unit));
    const uint32_t from = CANOPY_FAULT(stale) && unit > 0 ? unit - 1 : unit;
    const uint4* at = reinterpret_cast<const uint4*>(shared + from % kStages * kStage + threadIdx.x / 32 * kPart) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) w[i] = at[i * 32];
    held(w);
    products_begin();
#pragma unroll
    for (int i = 0; i < kHalf; ++i)
        if (!CANOPY_FAULT(dropped_slice) || i != 1) products(sum, w[i], descriptor(ring.rows(unit) + i * 32, 1));
    products_issued();
}

// The unit's stage may be filled again, here and in the other CTA, whose copies come to both.
__device__ __forceinline__ void release(const Ring& ring, uint32_t unit) {
    __syncwarp();  // every lane has read its weights
    if (threadIdx.x % 32 != 0) return;
    arrive(ring.empty(unit));
    arrive_at(ring.empty(unit), cluster_rank() ^ 1);
}

__device__ __forceinline__ void put(const LinearArgs& a, uint32_t block, uint32_t row, const float (&sum)[kRows / 2], float* y) {
    const uint32_t tile = block * 8 + threadIdx.x / 32;
    if (tile >= a.tiles) return;
    const Place place = place_of(a, tile);
    const int tiles = min(kRows / 8, ((int)a.rows - (int)row + 7) / 8);
#pragma unroll
    for (int t = 0; t < kRows / 8; ++t) {
        int at = row + 8 * t;
        // keeps the addresses of one tile at a time in registers
        asm volatile("" : "+r"(at)::"memory");
        if (t < tiles) write(a, place, at, threadIdx.x % 32, make_float4(sum[4 * t], sum[4 * t + 1], sum[4 * t + 2], sum[4 * t + 3]), y);
    }
}

}  // namespace canopy

// `x` by map, in bf16, in boxes of 64 inputs by 128 rows. Grid (an even number of CTAs).
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(canopy::kThreads, 1)
    linear_whole(const __grid_constant__ LinearArgs a, const __grid_constant__ CUtensorMap x, const uint8_t* weight, float* y) {
    using namespace canopy;
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ __align__(16) uint64_t barriers[2 * kStages];
    const Ring ring{shared_address(shared), shared_address(barriers)};
    if (threadIdx.x == kProducts) {
#pragma unroll
        for (int s = 0; s < kStages; ++s) {
            barrier_init(ring.full(s), 1);
            barrier_init(ring.empty(s), 2 * kProducts / 32);
        }
        barriers_ready();
    }
    next_may_begin();
    cluster_meets();
    wait_for_kernels_ahead();
    if (threadIdx.x >= kProducts) {
        keep_registers<40>();
        if (threadIdx.x == kProducts) copy_all(a, &x, weight, ring);
        // the other CTA's copies and arrivals come to what this one leaves
        if (threadIdx.x == kProducts) cluster_meets();
        return;
    }
    take_registers<232>();
    uint32_t unit = 0;
    for (Walk walk(a); walk.more(); walk.next()) {
        float sum[kRows / 2];
#pragma unroll
        for (int i = 0; i < kRows / 2; ++i) sum[i] = 0.f;
        settle(sum);
        Weights even, odd;
        multiply(shared, ring, unit, even, sum);
        for (uint32_t end = unit + 2 * a.chunks - 2; unit < end; unit += 2) {
            multiply(shared, ring, unit + 1, odd, sum);
            products_done<1>();
            held(even);
            release(ring, unit);
            multiply(shared, ring, unit + 2, even, sum);
            products_done<1>();
            held(odd);
            release(ring, unit + 1);
            if (CANOPY_FAULT(half_sum)) {
                products_done<0>();
                for (float& s : sum) s = planted_half(s);
                settle(sum);
            }
        }
        multiply(shared, ring, unit + 1, odd, sum);
        products_done<0>();
        settle(sum);
        held(even);
        held(odd);
        release(ring, unit);
        release(ring, unit + 1);
        unit += 2;
        put(a, walk.block(), walk.row(), sum, y);
    }
    cluster_meets();
}
