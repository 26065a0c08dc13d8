// The C twins of the argument structs in launch.rs and fused.rs.
#pragma once
#include <stdint.h>

struct VerifyArgs {
    uint32_t batch;      // B sequences
    uint32_t k_heads;    // Hk
    uint32_t v_heads;    // Hv
    uint32_t max_nodes;  // most nodes of one tree in this batch
    uint32_t tiles;      // pair tiles per (sequence, key head) in the Gram scratch
    float scale;         // Dk^-1/2
};
static_assert(sizeof(VerifyArgs) == 24, "launch.rs VerifyArgs");

// How the matrices of series.cu make U of R.
struct SeriesArgs {
    uint32_t matrices;  // each of which is applied once
    uint32_t terms;     // or the first of which makes the next term of the last one
};
static_assert(sizeof(SeriesArgs) == 8, "series.rs SeriesArgs");

constexpr int kMostLayers = 64;

struct CommitArgs {
    uint32_t batch;
    uint32_t k_heads;
    uint32_t v_heads;
    uint32_t layers;
    uint64_t layer_state;  // elements from one layer's pool to the next
    const void* qkv[kMostLayers];
    const float* gates[kMostLayers];
    const float* u[kMostLayers];
};
static_assert(sizeof(CommitArgs) == 24 + 24 * kMostLayers, "launch.rs CommitArgs");

struct FusedArgs {
    uint32_t k_heads;
    uint32_t v_heads;
    uint32_t entries;  // path entries that shared memory holds
    float scale;
};
static_assert(sizeof(FusedArgs) == 16, "fused.rs FusedArgs");

struct BlockedArgs {
    uint32_t k_heads;
    uint32_t v_heads;
    float scale;
};
static_assert(sizeof(BlockedArgs) == 12, "blocked.rs BlockedArgs");
