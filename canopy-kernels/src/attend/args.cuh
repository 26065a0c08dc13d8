// The C twin of launch.rs AttendArgs, and the keys that a stream's rows walk: attend.cu and merge.cu follow the same plan.
#pragma once
#include <stdint.h>

#include "canopy/fault.cuh"
#include "lanes.cuh"

struct AttendArgs {
    uint32_t q_heads;     // Hq
    uint32_t kv_heads;    // Hkv
    uint32_t capacity;    // rows of a slot
    uint32_t rows;        // N packed rows
    uint32_t block_size;  // rows of a draft block; 0: draft trees
    uint32_t window;      // draft blocks: keys at this distance or further are hidden
    uint32_t causal;      // draft blocks: later rows are hidden
    float scale;          // D^-1/2 log2 e
    uint32_t tiles;       // ring_sm90a.cu: tiles of 128 rows in the call; 0: attend.cu
    uint32_t height;      // ring_sm90a.cu: rows of a CTA, 64 or 128; 0: as many as the keys ask for
    uint32_t wide;        // out is f32, not bf16
    uint32_t packed;      // ring_sm90a.cu: 16 bytes of out may be stored at a time
    uint32_t alone;       // the call has one stream
};
static_assert(sizeof(AttendArgs) == 52, "launch.rs AttendArgs");

namespace canopy {

constexpr int kMaskWords = 8;    // 256 nodes
constexpr int kMostSplits = 32;  // of one stream's keys in position order
constexpr int kSplitBlocks = 256;
constexpr int kLeastKeys = 128;  // of a split
constexpr int kFold = 4;         // splits that are added among themselves first, where ring_sm90a.cu makes them
constexpr int kFilled = 120;     // CTAs that fill a device

// Keys of one tile in shared memory, of attend.cu and of ring_sm90a.cu.
template <int D>
constexpr int kTileKeys = D == 256 ? 64 : 128;

// Tiles of a split from which splits of 128 rows, twice as many, are faster than splits of 64 rows.
template <int D>
constexpr int kFarTiles = D == 256 ? 20 : 13;

// Whole times that y, at least 1, is in x, which is from 0 to 2^21: without the long way of an integer division.
__device__ __forceinline__ int times_in(int x, int y) { return (int)__fdividef((float)x + 0.5f, (float)y); }

// What a stream's rows see: keys in position order, in splits of whole tiles, then (draft trees) its own rows by their paths. How the keys
// are split follows from the stream's own lengths alone, so that its sums do not depend on the batch or on the device.
struct Walk {
    int first, rows;    // packed rows
    int slot, context;  // pool slot, keys before the rows
    int end;            // keys in position order
    int tile, tiles;    // the first tile of keys, their number
    int per, splits;    // tiles of a split, number of splits
    int all;            // ring_sm90a.cu: tiles with those of the paths, which its splits share equally
    int chunk;          // splits of a part: 1 or kFold; 0: attend.cu
    bool tree, fits, tall, packed;

    // Parts to merge: the splits and then the paths; or the splits, whose last has the paths, or sums of `chunk` of them.
    __device__ __forceinline__ int parts() const { return chunk > 1 ? (splits + kFold - 1) / kFold : splits + (tree && !chunk ? 1 : 0); }

    // One part has all the keys: ring_sm90a.cu gives the outputs itself, and merge.cu looks at those in doubt alone.
    __device__ __forceinline__ bool direct() const { return packed && chunk && parts() == 1; }

    // The first tile of a split of ring_sm90a.cu.
    __device__ __forceinline__ int edge(int split) const { return times_in(split * all, anew(splits)); }
};

// The keys in position order that row i of a stream sees: [from, to).
__device__ __forceinline__ int2 sight(const AttendArgs& a, int context, int end, int i) {
    if (a.block_size == 0) return make_int2(0, context);
    const int at = context + i, reach = (int)a.window;
    const int ahead = reach < end - at ? at + reach : end;
    return make_int2(max(0, at + 1 - reach), a.causal ? at + 1 + CANOPY_FAULT(causal) : ahead);
}

// One row of a CTA's tile: the keys in position order that it sees, its packed row, its place in out (-1: the tile has no such row).
struct __align__(16) Row {
    int from, to, packed, place;
};

// Which of the 32 keys from `key` on (a multiple of 32) a row sees: by its path's mask, or by its range.
__device__ __forceinline__ uint32_t seen_keys(const Row& row, const uint32_t* mask, bool paths, int key) {
    if (paths) return mask[(size_t)row.packed * kMaskWords + key / 32] & ~(uint32_t)(CANOPY_FAULT(short_path) && key == 0);
    const auto below = [](int n) { return n >= 32 ? ~0u : (1u << max(n, 0)) - 1u; };
    return below(row.to - key) & ~below(row.from - key);
}

// The arguments, with the faults that lie in them.
#ifdef CANOPY_FAULTS
__device__ __forceinline__ AttendArgs planted(AttendArgs a) {
    if (CANOPY_FAULT(score_scale)) a.scale *= 1.0625f;
    if (CANOPY_FAULT(window)) a.window -= 1;
    a.scale = planted_ulp(a.scale);
    return a;
}
#else
__device__ __forceinline__ const AttendArgs& planted(const AttendArgs& a) { return a; }
#endif

// Sums of weighted values of one row relative to a level (a power of two), and the weights' sum; negative: a value that is not finite was
// left out.
struct Level {
    float top, sum;
};

// Takes in the sums of later keys: those so far count `down` times, the new ones `up` times. Always in this order and in these steps, so that
// it does not matter who adds.
__device__ __forceinline__ void take_in(Level& so_far, Level later, float& down, float& up) {
    const float top = fmaxf(so_far.top, later.top), shift = top == -INFINITY ? 0.f : top;
    down = power_of_two(so_far.top - shift);
    up = power_of_two(later.top - shift);
    const float sum = add_flushed(times_flushed(fabsf(so_far.sum), down), times_flushed(fabsf(later.sum), up));
    so_far = {top, signbit(so_far.sum) || signbit(later.sum) ? -sum : sum};
}

// The same of an output; where both count once it is what an addition in memory gives.
__device__ __forceinline__ float taken_in(float so_far, float down, float later, float up) {
    return add_flushed(times_flushed(so_far, down), times_flushed(later, up));
}

template <int D>
__device__ __forceinline__ Walk walk_of(const AttendArgs& a, int b, const int* lens, const int* slots, const int* cu_nodes) {
    Walk w;
    w.tree = a.block_size == 0;
    w.first = w.tree ? cu_nodes[b] : b * (int)a.block_size;
    w.rows = w.tree ? cu_nodes[b + 1] - w.first : (int)a.block_size;
    w.slot = slots[b];
    w.context = lens[b];
    w.fits = w.context >= 0 && w.context <= (int)a.capacity - w.rows;
    w.end = w.tree ? w.context : w.context + w.rows;
    constexpr int keys = kTileKeys<D>;
    w.tile = sight(a, w.context, w.end, 0).x / keys;
    w.tiles = (w.end + keys - 1) / keys - w.tile;
    w.all = w.tiles + (w.tree ? (w.rows + keys - 1) / keys : 0);
    w.chunk = 0;
    w.tall = false;
    w.packed = a.packed;
    if (a.tiles) {
        const int pairs = w.rows * times_in(a.q_heads, a.kv_heads);
        const auto most = [&](int height) {
            return min(max(times_in(kSplitBlocks / 2, max((int)a.kv_heads * ((pairs + height - 1) / height), 1)), 1), kMostSplits);
        };
        const int few = most(64);
        const bool far = w.all > kFarTiles<D> * few;
        w.splits = max(min(far ? most(128) : few, w.all * keys / kLeastKeys), 1);
        w.per = 0;
        // who adds and how many rows a CTA has does not change a sum: here the call may have its say
        w.chunk = (int)a.tiles * ((w.splits + kFold - 1) / kFold) >= kFilled ? kFold : 1;
        w.tall = a.height ? a.height > 64 : pairs > 64 && (far || 2 * (int)a.tiles * w.splits > kFilled * 4 / 3);
        return w;
    }
    const int pairs = w.rows * (int)(a.q_heads / a.kv_heads);
    const int row_tiles = (pairs + 63) / 64;
    const int most = max(min(kSplitBlocks / max((int)a.kv_heads * row_tiles, 1), kMostSplits) - (w.tree ? 1 : 0), 1);
    w.per = max((w.tiles + most - 1) / most, kLeastKeys / kTileKeys<D>);
    w.splits = (w.tiles + w.per - 1) / w.per;
    return w;
}

}  // namespace canopy
