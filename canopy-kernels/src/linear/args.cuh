// The C twin of the argument struct in launch.rs.
#pragma once
#include <stdint.h>

constexpr int kParts = 8;

struct LinearArgs {
    uint32_t inputs;          // true input width; the packed weight is padded to chunks of 128
    uint32_t chunks;          // chunks of 128 inputs
    uint32_t blocks;          // blocks of 128 outputs
    uint32_t per_worker;      // chunks of one worker
    uint32_t tiles;           // tiles of 16 outputs, all parts
    uint32_t rows;            // rows of x
    uint32_t parts;
    uint32_t tile_end[kParts];  // first tile behind each part
    uint32_t width[kParts];     // outputs of each part
    uint32_t start[kParts];     // first element of each part's plane
};
static_assert(sizeof(LinearArgs) == 28 + 12 * kParts, "launch.rs LinearArgs");
