// y = x W^T on compute capability 9.0, x rounded to bf16. One CTA a multiprocessor takes an equal piece of the line of all chunks (128 inputs of
// a block of 128 outputs). A warp copies weights and bf16 rows ahead into a ring of stages, the weights of the first ones while the kernel ahead
// still runs; few f32 rows are rounded on their way by a warp of their own. Two warpgroups multiply, 64 outputs each. A lane's 16 bytes of a step are what wgmma takes of A in registers. What several CTAs have of one output
// is added in order by the one that finishes last. Neither the rows in a tile nor the number of tiles enters an element's sum.
//
// Pairs: two CTAs of a cluster take pieces half of the line apart, so that both are at the same inputs of blocks that lie half of all apart. Each
// copies half of the rows' inputs into both, which halves what many rows cost.
#include <stdint.h>

#include "canopy/bulk.cuh"
#include "canopy/wgmma.cuh"
#include "share.cuh"
#include "tiles.cuh"

namespace canopy {

constexpr int kProducts = 256;  // threads that multiply; a warp more copies, and one rounds

// Where sums take more registers than a third of a multiprocessor's has for a thread, a warpgroup copies and leaves its own to the products.
constexpr int threads_of(int rows) { return kProducts + (rows > 128 ? 128 : 32); }

// Piece v of the line is [v total / workers, (v + 1) total / workers).
__device__ __forceinline__ uint32_t begin_of(uint32_t v, uint32_t total) { return v * total / gridDim.y; }
__device__ __forceinline__ uint32_t owner_of(uint32_t chunk, uint32_t total) { return ((chunk + 1) * gridDim.y + total - 1) / total - 1; }

template <int Rows>
struct Sums {
    float d[Rows / 2];

    // Outputs lane / 4 and lane / 4 + 8 of rows 8 t + 2 (lane % 4) and the next.
    __device__ __forceinline__ float4 at(int t) const { return make_float4(d[4 * t], d[4 * t + 1], d[4 * t + 2], d[4 * t + 3]); }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < Rows / 2; ++i) d[i] = 0.f;
    }
};

// This CTA's piece of the line: the two of a pair have pieces half of the line apart.
template <bool Pair>
__device__ __forceinline__ uint32_t worker() {
    return Pair ? blockIdx.y / 2 + cluster_rank() * (gridDim.y / 2) : blockIdx.y;
}

template <typename Form, int Rows, int Stages>
struct Ring {
    // products read rows from 1,024-byte boundaries on
    static constexpr uint32_t kRowsAt = (8 * Form::kTileBytes + 1023) / 1024 * 1024, kRowsBytes = Rows * 256, kStage = kRowsAt + kRowsBytes;

    uint32_t base, barriers;

    __device__ __forceinline__ uint32_t weights(uint32_t stage) const { return base + stage * kStage; }
    __device__ __forceinline__ uint32_t rows(uint32_t stage) const { return base + stage * kStage + kRowsAt; }
    __device__ __forceinline__ uint32_t full(uint32_t stage) const { return barriers + stage * 16; }
    __device__ __forceinline__ uint32_t empty(uint32_t stage) const { return barriers + stage * 16 + 8; }
};

// bf16 rows come by this map. Of f32 rows, the map is never read.
template <bool Wide>
struct Source {
    const CUtensorMap* map;
    const float* rows;
};

// One thread copies every chunk of the piece, in order.
template <bool Pair, typename Form, int Rows, int Stages, bool Wide>
__device__ __forceinline__ void copy_all(const LinearArgs& a, const Source<Wide>& x, const uint8_t* weight, const Ring<Form, Rows, Stages>& ring,
                                         uint32_t begin, uint32_t end) {
    const auto weights = [&](uint32_t unit, uint32_t stage) {
        const uint32_t block = unit / a.chunks;
        arrive_expecting(ring.full(stage), tiles_of(a, block) * Form::kTileBytes + (Wide ? 0 : Ring<Form, Rows, Stages>::kRowsBytes));
        Form::copy(a, weight, block, unit % a.chunks, ring.weights(stage), ring.full(stage));
    };
    const auto rows = [&](uint32_t unit, uint32_t stage) {
        if constexpr (Wide) return;
        const uint32_t column = unit % a.chunks * 128, row = blockIdx.x * Rows;
        if constexpr (Pair) {
            const uint32_t half = cluster_rank();
            copy_box_to(ring.rows(stage) + half * Rows * 128, x.map, column + half * 64, row, ring.full(stage), 3);
        } else {
            copy_box(ring.rows(stage), x.map, column, row, ring.full(stage));
            copy_box(ring.rows(stage) + Rows * 128, x.map, column + 64, row, ring.full(stage));
        }
    };
    const uint32_t early = min(end, begin + Stages);
    for (uint32_t unit = begin; unit < early; ++unit) weights(unit, unit - begin);
    // the weights are nobody's output
    if constexpr (!Wide) wait_for_kernels_ahead();
    for (uint32_t unit = begin; unit < early; ++unit) rows(unit, unit - begin);
    for (uint32_t unit = early; unit < end; ++unit) {
        const uint32_t turn = (unit - begin) / Stages, stage = (unit - begin) % Stages;
        wait_phase(ring.empty(stage), (turn - 1) & 1);
        weights(unit, stage);
        rows(unit, stage);
    }
}

constexpr int kWideRows = 2;     // f32 rows that a warp keeps up with
constexpr uint32_t kAhead = 4;   // chunks whose inputs it has under way

// One warp rounds four inputs a lane of at most kWideRows rows. The rows of the tile behind them are zeros from the start.
template <typename Form, int Rows, int Stages>
__device__ __forceinline__ void round_all(const LinearArgs& a, const float* x, uint8_t* shared, const Ring<Form, Rows, Stages>& ring, uint32_t begin,
                                          uint32_t end) {
    using Places = Ring<Form, Rows, Stages>;
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t stage = 0; stage < Stages; ++stage)
        for (uint32_t at = lane * 16; at < Places::kRowsBytes; at += 512)
            *reinterpret_cast<uint4*>(shared + stage * Places::kStage + Places::kRowsAt + at) = make_uint4(0, 0, 0, 0);
    __syncwarp();  // other lanes write there next
    wait_for_kernels_ahead();
    float4 held[kAhead][kWideRows];
    const auto fetch = [&](uint32_t unit, float4 (&to)[kWideRows]) {
        const uint32_t k = unit % a.chunks * 128 + lane * 4;
#pragma unroll
        for (int r = 0; r < kWideRows; ++r)
            to[r] = r < a.rows && k < a.inputs && unit < end ? load4(x + (size_t)r * a.inputs + k) : make_float4(0, 0, 0, 0);
    };
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) fetch(begin + i, held[i]);
    for (uint32_t from = begin; from < end; from += kAhead) {
#pragma unroll
        for (uint32_t i = 0; i < kAhead; ++i) {
            const uint32_t unit = from + i, turn = (unit - begin) / Stages, stage = (unit - begin) % Stages;
            if (unit >= end) break;
            if (turn > 0) wait_phase(ring.empty(stage), (turn - 1) & 1);
            uint8_t* to = shared + stage * Places::kStage + Places::kRowsAt + lane / 16 * Rows * 128 + lane % 2 * 8;
#pragma unroll
            for (int r = 0; r < kWideRows; ++r) {
                const float4 v = held[i][r];
                if (r < a.rows) *reinterpret_cast<uint2*>(to + r * 128 + ((lane % 16 / 2 ^ r) << 4)) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
            }
            fetch(unit + kAhead, held[i]);
            writes_visible();
            __syncwarp();
            if (lane == 0) arrive(ring.full(stage));
        }
    }
}

__device__ __forceinline__ void products_together() { asm volatile("bar.sync 1, %0;" ::"n"(kProducts) : "memory"); }

// Where worker `v` leaves what it has of a block that others share: it shares at most the first and the last block that it touches.
template <int Rows>
__device__ __forceinline__ float4* span_of(const LinearArgs& a, float4* spans, uint32_t v, uint32_t block, uint32_t total) {
    const uint32_t place = 2 * v + (begin_of(v, total) / a.chunks == block ? 0 : 1);
    return spans + ((size_t)place * gridDim.x + blockIdx.x) * (Rows / 8) * kProducts + threadIdx.x;
}

// Adds one to a counter; what the CTA did before its last barrier is there for whoever finds it counted.
__device__ __forceinline__ uint32_t count_in(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// What this worker has of blocks: written where it has a whole one, else left for the worker that comes last, which adds all in the order of the
// inputs. That is done behind the worker's last chunk, so that nobody waits for a counter in between.
template <int Rows>
struct Finish {
    static constexpr int kTiles = Rows / 8;

    const LinearArgs& a;
    float4* spans;
    uint32_t* arrived;
    float* y;
    uint32_t v, total, begin, end;
    uint32_t before[2];  // arrivals of others at the first and the last block, known to thread 0

    __device__ __forceinline__ int tiles() const { return min(kTiles, ((int)a.rows - (int)blockIdx.x * Rows + 7) / 8); }
    __device__ __forceinline__ uint32_t first_of(uint32_t block) const { return owner_of(block * a.chunks, total); }
    __device__ __forceinline__ uint32_t last_of(uint32_t block) const { return owner_of(block * a.chunks + a.chunks - 1, total); }
    __device__ __forceinline__ bool is_shared(uint32_t block) const { return block * a.chunks < begin || (block + 1) * a.chunks > end; }

    // Keeps the addresses of one tile at a time in registers, which many sums leave no others.
    static __device__ __forceinline__ int in_turn(int at) {
        if (kTiles > 16) asm volatile("" : "+r"(at)::"memory");
        return at;
    }

    __device__ __forceinline__ void put(const Sums<Rows>& sum, uint32_t block) {
        const uint32_t tile = block * 8 + threadIdx.x / 32;
        if (!is_shared(block)) {
            if (tile >= a.tiles) return;
            const Place place = place_of(a, tile);
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
                if (t < tiles()) write(a, place, blockIdx.x * Rows + in_turn(8 * t), threadIdx.x % 32, sum.at(t), y);
            return;
        }
        float4* mine = span_of<Rows>(a, spans, v, block, total);
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
            if (t < tiles()) __stcg(mine + in_turn(t * kProducts), sum.at(t));
        products_together();
        if (threadIdx.x == 0) {
            const uint32_t others = count_in(arrived + (size_t)block * gridDim.x + blockIdx.x);
            if (block == begin / a.chunks) before[0] = others;
            else before[1] = others;
        }
    }

    // The sum of a block that this worker came last to.
    __device__ __forceinline__ void gather(uint32_t block) {
        constexpr uint32_t kSpans = 4;
        constexpr int kAtOnce = kTiles < 4 ? kTiles : 4;
        const uint32_t tile = block * 8 + threadIdx.x / 32, last = last_of(block);
        if (threadIdx.x == 0) arrived[(size_t)block * gridDim.x + blockIdx.x] = 0;
        if (tile >= a.tiles) return;
        const Place place = place_of(a, tile);
        for (int from = 0; from < tiles(); from += kAtOnce) {
            float4 all[kAtOnce];
#pragma unroll
            for (int t = 0; t < kAtOnce; ++t) all[t] = make_float4(0, 0, 0, 0);
            for (uint32_t from_worker = first_of(block); from_worker <= last; from_worker += kSpans) {
                float4 part[kSpans][kAtOnce];
#pragma unroll
                for (uint32_t i = 0; i < kSpans; ++i) {
                    const float4* span = span_of<Rows>(a, spans, min(from_worker + i, last), block, total) + from * kProducts;
#pragma unroll
                    for (int t = 0; t < kAtOnce; ++t) part[i][t] = from + t < tiles() ? __ldcg(span + t * kProducts) : make_float4(0, 0, 0, 0);
                }
#pragma unroll
                for (uint32_t i = 0; i < kSpans; ++i)
#pragma unroll
                    for (int t = 0; t < kAtOnce; ++t)
                        if (from_worker + i <= last && !(CANOPY_FAULT(dropped_slice) && from_worker + i == last)) all[t] = sum4(all[t], part[i][t]);
            }
#pragma unroll
            for (int t = 0; t < kAtOnce; ++t)
                if (from + t < tiles()) write(a, place, blockIdx.x * Rows + 8 * (from + t), threadIdx.x % 32, all[t], y);
        }
    }

    __device__ __forceinline__ void end_all() {
        __shared__ uint32_t is_last[2];
        const uint32_t blocks[2] = {begin / a.chunks, (end - 1) / a.chunks};
        const bool shared[2] = {is_shared(blocks[0]), blocks[1] != blocks[0] && is_shared(blocks[1])};
        if (!shared[0] && !shared[1]) return;
        if (threadIdx.x == 0)
#pragma unroll
            for (int i = 0; i < 2; ++i) is_last[i] = shared[i] && before[i] == last_of(blocks[i]) - first_of(blocks[i]);
        products_together();
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (is_last[i]) gather(blocks[i]);
    }
};

// The products of one group of a chunk's steps, under way behind this.
template <typename Form, int Group, int Rows>
__device__ __forceinline__ void multiply(const typename Form::Lane& tile, uint32_t rows, Sums<Rows>& sum) {
    constexpr int kCount = kSteps / Form::kGroups;
    uint4 w[kCount];
    tile.template read<Group>(w);
    products_begin();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int s = Group * kCount + i;
        products(sum.d, w[i], descriptor(rows + s / 4 * Rows * 128 + s % 4 * 32, 1));
    }
    products_issued();
}

// Whether one group's weights are made while the other's products run, across chunks too: where registers allow it.
template <typename Form, int Rows>
constexpr bool kOverlap = Form::kGroups > 1 && Rows <= 128;

// A chunk of a block. Overlapped, its last products may be under way behind it; `release` is called where those of the chunk before have ended.
template <typename Form, int Rows, typename Release>
__device__ __forceinline__ void multiply_chunk(const typename Form::Lane& tile, uint32_t rows, Sums<Rows>& sum, const Release& release) {
    if constexpr (kOverlap<Form, Rows>) {
        products_done<1>();
        multiply<Form, 0>(tile, rows, sum);
        products_done<1>();
        release();
        multiply<Form, 1>(tile, rows, sum);
        return;
    }
    settle(sum.d);
    multiply<Form, 0>(tile, rows, sum);
    products_done<0>();
    if constexpr (Form::kGroups > 1) {
        multiply<Form, 1>(tile, rows, sum);
        products_done<0>();
    }
    settle(sum.d);
}

// Grid (row tiles, workers).
template <typename Form, int Rows, int Stages, bool Pair = false, bool Wide>
__device__ __forceinline__ void product(const LinearArgs& a, const Source<Wide>& x, const uint8_t* weight, float4* spans, uint32_t* arrived,
                                        float* y) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ __align__(16) uint64_t barriers[2 * Stages];
    const Ring<Form, Rows, Stages> ring{shared_address(shared), shared_address(barriers)};
    const uint32_t v = worker<Pair>(), total = a.blocks * a.chunks, begin = begin_of(v, total), end = begin_of(v + 1, total);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == kProducts) {
#pragma unroll
        for (int s = 0; s < Stages; ++s) {
            barrier_init(ring.full(s), Wide ? 2 : 1);
            barrier_init(ring.empty(s), (Pair ? 2 : 1) * kProducts / 32);
        }
        barriers_ready();
    }
    next_may_begin();
    if constexpr (Pair) cluster_meets();
    else __syncthreads();
    if (warp >= kProducts / 32) {
        if constexpr (Rows > 128) keep_registers<40>();
        if (threadIdx.x == kProducts) copy_all<Pair>(a, x, weight, ring, begin, end);
        if constexpr (Wide)
            if (warp > kProducts / 32) round_all(a, x.rows, shared, ring, begin, end);
        // the other CTA's copies and arrivals come to what this one leaves
        if constexpr (Pair)
            if (threadIdx.x == kProducts) cluster_meets();
        return;
    }
    if constexpr (Rows > 128) take_registers<232>();
    wait_for_kernels_ahead();
    Finish<Rows> finish{a, spans, arrived, y, v, total, begin, end, {0, 0}};
    for (uint32_t unit = begin; unit < end;) {
        const uint32_t block = unit / a.chunks, behind = min(end, (block + 1) * a.chunks);
        Sums<Rows> sum;
        sum.clear();
        const uint32_t first = unit;
        const auto release = [&](uint32_t of) {
            __syncwarp();  // every lane has read its weights
            if (lane != 0) return;
            arrive(ring.empty((of - begin) % Stages));
            if constexpr (Pair) arrive_at(ring.empty((of - begin) % Stages), cluster_rank() ^ 1);
        };
        settle(sum.d);
        for (; unit < behind; ++unit) {
            const uint32_t stage = (unit - begin) % Stages;
            wait_phase(ring.full(stage), (unit - begin) / Stages & 1);
            const uint32_t from = CANOPY_FAULT(stale) && unit > begin ? (stage + Stages - 1) % Stages : stage;
            const typename Form::Lane tile(shared + from * Ring<Form, Rows, Stages>::kStage + warp * Form::kTileBytes, lane);
            multiply_chunk<Form>(tile, ring.rows(stage), sum, [&] {
                if (unit > first) release(unit - 1);
            });
            if constexpr (!kOverlap<Form, Rows>) release(unit);
        }
        if constexpr (kOverlap<Form, Rows>) {
            products_done<0>();
            settle(sum.d);
            release(behind - 1);
        }
        finish.put(sum, block);
    }
    finish.end_all();
    if constexpr (Pair) cluster_meets();
}

}  // namespace canopy

// `x` by map, in bf16.
#define CANOPY_LINEAR(NAME, FORM, ROWS, STAGES)                                                                                 \
    extern "C" __global__ void __launch_bounds__(canopy::threads_of(ROWS), 1) NAME(                                             \
        const __grid_constant__ LinearArgs a, const __grid_constant__ CUtensorMap x, const uint8_t* weight, float4* spans,      \
        uint32_t* arrived, float* y) {                                                                                          \
        canopy::product<canopy::FORM, ROWS, STAGES>(a, canopy::Source<false>{&x, nullptr}, weight, spans, arrived, y);          \
    }

// The same in pairs.
#define CANOPY_LINEAR_PAIR(NAME, FORM, ROWS, STAGES)                                                                            \
    extern "C" __global__ void __cluster_dims__(1, 2, 1) __launch_bounds__(canopy::threads_of(ROWS), 1) NAME(                   \
        const __grid_constant__ LinearArgs a, const __grid_constant__ CUtensorMap x, const uint8_t* weight, float4* spans,      \
        uint32_t* arrived, float* y) {                                                                                          \
        canopy::product<canopy::FORM, ROWS, STAGES, true>(a, canopy::Source<false>{&x, nullptr}, weight, spans, arrived, y);    \
    }

// `x` in f32.
#define CANOPY_LINEAR_WIDE(NAME, FORM, ROWS, STAGES)                                                                            \
    extern "C" __global__ void __launch_bounds__(canopy::kProducts + 64, 1) NAME(                                               \
        const __grid_constant__ LinearArgs a, const float* x, const uint8_t* weight, float4* spans, uint32_t* arrived,          \
        float* y) {                                                                                                             \
        canopy::product<canopy::FORM, ROWS, STAGES>(a, canopy::Source<true>{nullptr, x}, weight, spans, arrived, y);            \
    }

CANOPY_LINEAR_WIDE(linear_w8_f32, Bf16Tiles, 8, 5)
CANOPY_LINEAR(linear_w8, Bf16Tiles, 8, 5)
CANOPY_LINEAR(linear_w16, Bf16Tiles, 16, 5)
CANOPY_LINEAR(linear_w32, Bf16Tiles, 32, 4)
CANOPY_LINEAR(linear_w64, Bf16Tiles, 64, 4)
CANOPY_LINEAR(linear_w128, Bf16Tiles, 128, 3)
CANOPY_LINEAR(linear_w256, Bf16Tiles, 256, 2)
CANOPY_LINEAR_PAIR(linear_w256_pair, Bf16Tiles, 256, 2)
CANOPY_LINEAR_WIDE(linear_q8_f32, Int8Tiles, 8, 10)
CANOPY_LINEAR(linear_q8, Int8Tiles, 8, 10)
CANOPY_LINEAR(linear_q16, Int8Tiles, 16, 10)
CANOPY_LINEAR(linear_q32, Int8Tiles, 32, 8)
CANOPY_LINEAR(linear_q64, Int8Tiles, 64, 6)
CANOPY_LINEAR(linear_q128, Int8Tiles, 128, 4)
CANOPY_LINEAR(linear_q256, Int8Tiles, 256, 2)
CANOPY_LINEAR_PAIR(linear_q256_pair, Int8Tiles, 256, 2)
