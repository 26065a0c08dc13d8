// Root paths of a tree and its plan under levels, as plan.rs makes it, by a team of threads: a CTA, or threads of the host (`tests` in
// launch.rs holds them against plan.rs). A team has id(), size(), sync(), add() and set(): the last two are atomic.
#pragma once
#include "canopy/plan.cuh"

namespace canopy {

constexpr int kMostNodes = 256, kBand = 16;

// Rows of a tree, or of several, shallower than a band: every parent comes before its children, a root has depth 0.
struct Paths {
    uint64_t path[kMostNodes][kBand / 8];  // bytes: the root path, then the row itself
    uint8_t parent[kMostNodes], depth[kMostNodes];
};

// What a plan counts: in rows' order, or depth first.
struct Numbers {
    uint64_t path[kMostNodes][kBand / 8];  // a row's sort key; then, by number, its path in numbers
    uint16_t at[kMostNodes];               // a row's first path entry / 4
    uint8_t number[kMostNodes];            // of a row
    uint8_t place[kMostNodes];             // of a row among the nodes of its depth
    uint32_t tiles[kBand];
    int level[kBand];                      // nodes of every depth
    int fours;                             // path entries / 4
};

CANOPY_INLINE int fours_of(int depth) { return depth / 4 + 1; }

template <typename Team>
CANOPY_INLINE void find_paths(const Team& team, Paths& t, int nodes) {
    for (int i = team.id(); i < nodes; i += team.size()) {
        uint64_t low = i * 0x0101010101010101ull, high = low;
        for (int at = i; t.depth[at] > 0;) {
            at = t.parent[at];
            const int d = t.depth[at], shift = 8 * (d % 8);
            const uint64_t change = (uint64_t)(at ^ i) << shift;  // it is i so far
            if (d < 8) low ^= change;
            else high ^= change;
        }
        t.path[i][0] = low, t.path[i][1] = high;
    }
    team.sync();
}

// Bits of the nodes 32 word to 32 word + 31 on a path, from a depth on.
CANOPY_INLINE uint32_t seen(const uint64_t (&path)[kBand / 8], int from, int depth, int word) {
    uint32_t bits = 0;
    for (int d = from; d <= depth; ++d) {
        const int node = (int)(path[d / 8] >> 8 * (d % 8)) & 0xff;
        if (node / 32 == word) bits |= 1u << node % 32;
    }
    return bits;
}

CANOPY_INLINE uint64_t first_byte_on_top(uint64_t x) {
    uint64_t y = 0;
    for (int d = 0; d < 8; ++d) y = y << 8 | (x >> 8 * d & 0xff);
    return y;
}

// Paths compare as depth-first order does: a parent ends in itself, its children come after it.
template <typename Team>
CANOPY_INLINE void number_rows(const Team& team, const Paths& t, Numbers& s, int nodes) {
    for (int i = team.id(); i < kBand; i += team.size()) s.tiles[i] = s.level[i] = 0;
    for (int i = team.id(); i < nodes; i += team.size())
        for (int x = 0; x < kBand / 8; ++x) s.path[i][x] = first_byte_on_top(t.path[i][x]);
    team.sync();
    for (int i = team.id(); i < nodes; i += team.size()) {
        const uint64_t high = s.path[i][0], low = s.path[i][1];
        const int depth = t.depth[i];
        int number = 0, fours = 0, place = 0;
        for (int j = 0; j < nodes; ++j) {
            const uint64_t other = s.path[j][0];
            const bool before = nodes > kAsGiven ? other < high || (other == high && s.path[j][1] < low) : j < i;
            if (!before) continue;
            const int other_depth = t.depth[j];
            ++number;
            fours += fours_of(other_depth);
            place += other_depth == depth;
        }
        s.number[i] = (uint8_t)number;
        s.at[i] = (uint16_t)fours;
        s.place[i] = (uint8_t)place;
        team.add(&s.level[depth], 1);
        if (number == nodes - 1) s.fours = fours + fours_of(depth);
    }
    team.sync();
    for (int i = team.id(); i < nodes; i += team.size()) {
        const int number = s.number[i];
        uint32_t tiles = 0;
        for (int x = 0; x < kBand / 8; ++x) {
            uint64_t path = 0;
            for (int d = 0; d < 8; ++d) {
                const uint64_t node = s.number[t.path[i][x] >> 8 * d & 0xff];
                path |= node << 8 * d;
                tiles |= 1u << node / 8;
            }
            s.path[number][x] = path;
        }
        team.set(&s.tiles[number / 16], tiles);
    }
    team.sync();
}

// 0 behind it. Under a fault paths lose what is above depth `from`.
template <typename Team>
CANOPY_INLINE void write_plan(const Team& team, const Paths& t, Numbers& s, int nodes, int from, uint32_t* words, int room) {
    for (int idx = team.id(); idx < room; idx += team.size()) words[idx] = 0;
    number_rows(team, t, s, nodes);
    int deepest = 0;
    for (int d = 1; d < kBand; ++d) deepest = s.level[d] > 0 ? d : deepest;
    const PlanOf<uint32_t> plan(words, nodes, deepest + 1, nodes, 4 * s.fours, deepest);
    if (team.id() == 0) words[0] = plan.steps, words[1] = plan.items, words[2] = plan.entries, words[3] = plan.max_depth;
    for (int i = team.id(); i < kBand; i += team.size()) {
        plan.tiles[i] = s.tiles[i];
        int end = 0;
        for (int d = 0; d <= i; ++d) end += s.level[d];
        if (i <= deepest) plan.ends[i] = end;
    }
    const int mask_words = plan.mask_row / 4;
    for (int i = team.id(); i < nodes; i += team.size()) {
        const int depth = t.depth[i], number = s.number[i];
        int place = s.place[i];
        for (int d = 0; d < depth; ++d) place += s.level[d];
        const uint32_t of_node = depth | (uint32_t)s.at[i] << 8;
        plan.row_of[number] = (uint8_t)i;
        plan.info[number] = of_node;
        plan.order[place] = number | of_node << 8;
        plan.item[2 * number] = number | 1u << 16;
        plan.item[2 * number + 1] = 0xffffu << 16;
        for (int w = 0; w < fours_of(depth); ++w) {
            reinterpret_cast<uint32_t*>(plan.path)[s.at[i] + w] = (uint32_t)(s.path[number][w / 2] >> 32 * (w % 2));
            plan.rows[s.at[i] + w] = (uint8_t)number;
        }
        for (int w = 0; w < mask_words; ++w)
            reinterpret_cast<uint32_t*>(plan.mask)[number * mask_words + w] = seen(s.path[number], from, depth, w);
    }
}

}  // namespace canopy
