// accept_walk: one CTA for all trees, a warp a tree. Every node finds out whether it follows its parent, all side by side, and leaves a link
// in shared memory; the walk runs along links. Behind a barrier the paths' rows are packed.
#include <stdint.h>

#include "canopy/fault.cuh"
#include "canopy/numeric.cuh"

struct WalkArgs {
    uint32_t trees;
    uint32_t most;    // nodes of a path
    uint32_t rows;    // N
    uint32_t stated;  // a model says what is accepted
};
static_assert(sizeof(WalkArgs) == 16, "launch.rs WalkArgs");

namespace canopy {

constexpr uint32_t kMostNodes = 256, kMostTrees = 1024, kTreeWarps = 16, kBestWords = 4;
constexpr uint16_t kNone = 0xffff;

}  // namespace canopy

// nodes: rank | depth << 16; wanted: [trees][2][most]
extern "C" __global__ void __launch_bounds__(canopy::kTreeWarps * 32)
    accept_walk(const WalkArgs a, const int* __restrict__ parents, const uint32_t* __restrict__ tokens, const int* __restrict__ cu_nodes,
                const uint32_t* __restrict__ best, const uint32_t* __restrict__ nodes, const int* __restrict__ wanted, uint32_t* words,
                int* rows, int* cu_rows) {
    using namespace canopy;
    __shared__ uint16_t links[kTreeWarps][2][kMostNodes];
    __shared__ int lengths[kMostTrees + 1];
    take_turn();
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, stride = 2 + 2 * a.most;
    for (uint32_t b = warp; b < a.trees; b += kTreeWarps) {
        const int first = cu_nodes[b], count = cu_nodes[b + 1] - first;
        uint32_t* out = words + (size_t)b * stride;
        for (uint32_t i = lane; i < stride; i += 32) out[i] = 0;
        for (int i = lane; i < count; i += 32) links[warp][0][i] = links[warp][1][i] = kNone;
        __syncwarp();
        for (int i = lane; i < count; i += 32) {
            const int parent = parents[first + i];
            if (i == 0 || parent < 0 || parent >= i) continue;
            bool follows[2];
            if (a.stated) {
                const uint32_t rank = nodes[first + i] & 0xffff, depth = nodes[first + i] >> 16;
#pragma unroll
                for (uint32_t off_spine = 0; off_spine < 2; ++off_spine)
                    follows[off_spine] =
                        depth >= 1 && depth <= a.most && wanted[(2 * b + off_spine) * a.most + depth - 1] == (int)rank;
            } else {
                const int of = max(parent - CANOPY_FAULT(off_by_one), 0);
                follows[0] = best[(size_t)(first + of) * kBestWords + 3] == tokens[first + i];
                follows[1] = false;
            }
            if (follows[0]) links[warp][0][parent] = (uint16_t)i;
            if (follows[1]) links[warp][1][parent] = (uint16_t)i;
        }
        __syncwarp();
        if (lane == 0) {
            uint32_t visited = 0, node = 0, off_spine = 0, failed = 0;
            for (;;) {
                out[2 + visited] = node;
                const uint32_t* row = best + (size_t)(first + node) * kBestWords;
                const uint32_t flags = row[0], token = row[3];
                if (flags != 0 && !CANOPY_FAULT(swallow)) {
                    failed = 1;
                    ++visited;
                    break;
                }
                const uint16_t next = visited + 1 < a.most ? links[warp][off_spine][node] : kNone;
                out[2 + a.most + visited] = next == kNone ? token : tokens[first + next];
                ++visited;
                if (next == kNone) break;
                if (a.stated) off_spine |= (nodes[first + next] & 0xffff) != 0;
                node = next;
            }
            out[0] = visited;
            out[1] = failed;
            lengths[b] = failed ? 0 : visited - CANOPY_FAULT(missed_node);
        }
        __syncwarp();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int at = 0;
        for (uint32_t b = 0; b < a.trees; ++b) {
            const int length = lengths[b];
            cu_rows[b] = lengths[b] = at;
            at += length;
        }
        cu_rows[a.trees] = lengths[a.trees] = at;
        planted_touch(best);
    }
    __syncthreads();
    for (uint32_t b = warp; b < a.trees; b += kTreeWarps) {
        const int from = lengths[b], length = lengths[b + 1] - from;
        for (int i = lane; i < length; i += 32) rows[from + i] = cu_nodes[b] + (int)words[(size_t)b * stride + 2 + i];
    }
    for (uint32_t i = lengths[a.trees] + threadIdx.x; i < a.rows; i += blockDim.x) rows[i] = -1;
}
